//! iptables: kube-proxy's chains, letter by letter, written only where they change.
//!
//! Pure: `name.rs`, `text.rs`, `rule.rs` (what a rule is, as text), `layout.rs` (chains that are
//! always there), `service.rs` (a ServicePort's chains), `dispatch.rs` (how a packet finds its
//! ServicePort), `ruleset.rs` (all of it, and what a change does), `restore.rs` (the text for
//! `iptables-restore`).

mod dispatch;
mod driver;
mod layout;
mod name;
mod prefix;
mod readback;
pub mod restore;
mod rule;
mod ruleset;
mod service;
mod stage;
mod text;
mod tool;

#[cfg(test)]
mod tests;

pub use name::{BuiltIn, ChainName, ServiceChain, TableName};
pub(crate) use readback::words;
pub use restore::Limits;
pub use ruleset::{
    Content, Counts, Found, JumpOp, Layout, Ruleset, Settings, Staged, Step, Written,
};
pub use tool::{Flavour, Tool, ToolError, plain_name};

use super::{Backend, OpenError};

/// Opens the backend for this thread's network namespace, having tried out that this machine can
/// run our rules.
///
/// # Errors
/// [`OpenError`] says what is missing.
pub fn open(settings: &super::Settings) -> Result<Box<dyn Backend>, OpenError> {
    driver::open(settings)
}
