//! What kplane's programs share that is no part of a proxy: budgets of events, two clocks, connections that carry kplane's
//! mark, and maps of bounded size.

pub mod bounded;
pub mod buckets;
pub mod clock;
pub mod dial;
