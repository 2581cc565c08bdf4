//! iptables: kube-proxy's chains, letter by letter, written only where they change.
//!
//! ```text
//! nat     PREROUTING, OUTPUT -> KUBE-SERVICES -> (dispatch) -> KUBE-SVC | SVL | EXT | FW
//!                                             -> KUBE-NODEPORTS -> (dispatch) -> KUBE-EXT
//!         KUBE-FW -> KUBE-EXT -> KUBE-SVC | SVL -> KUBE-SEP -> DNAT
//!         POSTROUTING -> KUBE-POSTROUTING: masquerades what KUBE-MARK-MASQ marked
//! filter  INPUT, FORWARD, OUTPUT -> KUBE-SERVICES, KUBE-EXTERNAL-SERVICES, KUBE-PROXY-FIREWALL,
//!         KUBE-NODEPORTS -> (dispatch) -> REJECT | DROP | ACCEPT;  KUBE-FORWARD, KUBE-FIREWALL
//! mangle  KUBE-PROXY-CANARY: gone when somebody flushed the table; the others have one too
//! ```
//!
//! * **Names, rules and their order are kube-proxy's** behind the dispatch; only where pods come
//!   from several ranges there is a chain more. Other tools find what they look for, and what
//!   kube-proxy left is adopted, not rewritten. `tests/compare.rs` holds the same objects against
//!   what kube-proxy made of them.
//! * **The lists that all Services share are trees** ([`Layout::Tree`], `dispatch.rs`): kube-proxy
//!   writes them whole at every change, and packets pass half of them. In a tree a new Service
//!   writes one leaf, and of 10,000 places none is more than 45 rules away. [`Layout::Compat`] has kube-proxy's lists.
//! * **A rule is text as `iptables-save` prints it** (`rule.rs`). So a chain is compared by the
//!   digest of its lines: with what it held, with what is read back, with what was found at start.
//! * **A chain is written as a whole or not at all** (`stage.rs`), those to which it jumps before
//!   it; and places change between the tables in the order in which no packet is lost.
//!
//! Pure: `name.rs`, `text.rs`, `rule.rs` (what a rule is, as text), `layout.rs` (chains that are
//! always there), `service.rs` (a ServicePort's chains), `prefix.rs` and `dispatch.rs` (how a packet
//! finds its ServicePort), `ruleset.rs` and `stage.rs` (all of it, and what a change does),
//! `restore.rs` (the text for `iptables-restore`). The rest deals with the machine: `tool.rs` (which
//! tools there are), `readback.rs` (what they print), `counting.rs` (packet counters), `driver.rs` (the backend).

mod counting;
mod dispatch;
mod driver;
pub(in crate::backend) mod layout;
mod name;
mod prefix;
pub(in crate::backend) mod readback;
pub mod restore;
pub(in crate::backend) mod rule;
mod ruleset;
mod service;
mod stage;
mod text;
pub(in crate::backend) mod tool;

#[cfg(test)]
mod tests;

pub use counting::PacketCounts;
pub(crate) use counting::remove as remove_counters;
pub use name::{BuiltIn, ChainName, ServiceChain, TableName};
pub(crate) use readback::words;
pub use restore::Limits;
pub use ruleset::{Content, Found, JumpOp, Layout, Ruleset, Settings, Staged, Step, Written};
pub use tool::{Flavour, Tool, ToolError, plain_name};

use super::{Backend, Description, Failures, ModeMetrics, OpenError};

/// What is true of this backend on every machine.
pub(super) const DESCRIPTION: Description = Description {
    name: "iptables",
    summary: "kube-proxy's chains, written by `iptables-restore`",
    deprecation: None,
    programs_kernel: true,
    shares_names: true,
    has_virtual_servers: false,
    leaves_conntrack_entries: true,
    metrics: ModeMetrics {
        full_and_partial: true,
        failures: Failures::Restore,
        rules: true,
    },
};

/// Opens the backend for this thread's network namespace, having tried out that this machine can
/// run our rules.
///
/// # Errors
/// [`OpenError`] says what is missing.
pub fn open(settings: &super::Settings) -> Result<Box<dyn Backend>, OpenError> {
    driver::open(settings)
}
