//! What the tests stand on.

pub(crate) mod alarms;
pub(crate) mod audit;
pub(crate) mod kpctl;
pub(crate) mod oracle;
pub(crate) mod scheduler;
pub(crate) mod secure;
pub(crate) mod steady;
pub(crate) mod world;

pub(crate) use world::{World, with_pair, with_world};
