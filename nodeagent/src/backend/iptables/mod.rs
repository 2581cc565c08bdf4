//! iptables: kube-proxy's chains, letter by letter, written only where they change.
//!
//! Pure: `name.rs`, `text.rs`, `rule.rs` (what a rule is, as text), `layout.rs` (chains that are
//! always there), `service.rs` (a ServicePort's chains), `dispatch.rs` (how a packet finds its
//! ServicePort), `ruleset.rs` (all of it, and what a change does), `restore.rs` (the text for
//! `iptables-restore`).

mod name;
mod restore;
mod rule;
mod ruleset;
mod text;

pub use name::{BuiltIn, ChainName, ServiceChain, TableName};
pub use restore::Limits;
pub use ruleset::{
    Content, Counts, Found, JumpOp, Layout, Ruleset, Settings, Staged, Step, Written,
};
