//! The iptables backend: writes exactly kube-proxy's chains, and only those that change.
//!
//! ```text
//! nat     PREROUTING, OUTPUT -> KUBE-SERVICES -> (dispatch) -> KUBE-SVC | SVL | EXT | FW
//!                                             -> KUBE-NODEPORTS -> (dispatch) -> KUBE-EXT
//!         KUBE-FW -> KUBE-EXT -> KUBE-SVC | SVL -> KUBE-SEP -> DNAT
//!         POSTROUTING -> KUBE-POSTROUTING: masquerades what KUBE-MARK-MASQ marked
//! filter  INPUT, FORWARD, OUTPUT -> KUBE-SERVICES, KUBE-EXTERNAL-SERVICES, KUBE-PROXY-FIREWALL,
//!         KUBE-NODEPORTS -> (dispatch) -> REJECT | DROP | ACCEPT;  KUBE-FORWARD, KUBE-FIREWALL
//! mangle  KUBE-PROXY-CANARY: missing if another program flushed the table; the other tables have one too
//! ```
//!
//! * **Names, rules and their order are kube-proxy's** behind the dispatch. There is one chain more only
//!   where pods come from several ranges. Other tools find the chains that they expect, and kube-proxy's
//!   leftovers are adopted, not rewritten. `tests/compare.rs` compares the chains with those that kube-proxy
//!   made of the same objects.
//! * **The lists that all Services share are trees** ([`Layout::Tree`], `dispatch.rs`). kube-proxy writes the
//!   whole lists at every change, and packets pass half of them. In a tree, a new Service writes one leaf,
//!   and none of 10,000 frontends is more than 45 rules away. [`Layout::Compat`] has kube-proxy's lists.
//! * **A rule is text as `iptables-save` prints it** (`rule.rs`). So a chain is compared by the digest of its
//!   lines: with its earlier content, with the content read back, with the content found at start.
//! * **A chain is written as a whole or not at all** (`stage.rs`), after the chains to which it jumps. Places
//!   change between the tables in an order in which no packet is lost.
//!
//! These files are pure: `name.rs`, `text.rs`, `rule.rs` (rules as text), `layout.rs` (chains that always
//! exist), `service.rs` (a ServicePort's chains), `prefix.rs` and `dispatch.rs` (a packet's way to its
//! ServicePort), `ruleset.rs` and `stage.rs` (the whole ruleset, and the effect of a change), `restore.rs`
//! (the text for `iptables-restore`). The others work on the machine: `tool.rs` (the tools that exist),
//! `readback.rs` and `lookup.rs` (their output), `counting.rs` (packet counters), `data_path.rs` (the tables, and how they change).

mod counting;
mod data_path;
mod dispatch;
pub(in crate::backend) mod layout;
mod lookup;
mod name;
mod prefix;
pub(in crate::backend) mod readback;
mod recent;
pub mod restore;
pub(in crate::backend) mod rule;
mod ruleset;
mod service;
mod settings;
mod stage;
mod structure;
mod text;
pub(in crate::backend) mod tool;

#[cfg(test)]
mod tests;

pub use counting::PacketCounts;
pub(crate) use counting::remove as remove_counters;
pub(in crate::backend) use lookup::look_up;
pub use name::{BuiltIn, ChainName, ServiceChain, TableName};
pub(crate) use readback::words;
pub(in crate::backend) use recent::remembered;
pub use restore::Limits;
pub use ruleset::{ChainDigest, FoundRules, JumpOp, Ruleset, StagedRules, TableChange, Written};
pub use settings::RuleSettings;
pub use structure::Layout;
pub use tool::{Flavour, Tool, ToolError, plain_name};

use kplane_model::{Cidr, Family, Severity};

use super::{Backend, Description, Failures, ModeMetrics, NeededSetting, OpenError};

/// The facts that hold for this backend on every machine.
pub(super) const DESCRIPTION: Description = Description {
    name: "iptables",
    summary: "kube-proxy's chains, written by `iptables-restore`",
    deprecation: None,
    programs_kernel: true,
    shares_names: true,
    has_virtual_servers: false,
    is_proxy: false,
    needs: &[NeededSetting {
        key: "net.ipv4.conf.all.route_localnet",
        severity: Severity::Warning,
        effect: "node ports are not served on 127.0.0.1",
        for_loopback: true,
    }],
    leaves_conntrack_entries: true,
    metrics: ModeMetrics {
        full_and_partial: true,
        failures: Failures::Restore,
        rules: true,
    },
};

/// Returns whether a range has loopback addresses of IPv4, on which this mode can serve node ports (C8).
pub fn meets_loopback(range: Cidr) -> bool {
    let loopback = crate::plan::loopback(Family::V4);
    range.covers(loopback) || loopback.covers(range)
}

/// Applies the setting that needs root's privileges, for `--init-only`, if node ports are served on loopback addresses.
/// As in kube-proxy, the rule against other senders to such addresses is kubelet's until the agent writes its own. A
/// failure is logged.
pub fn prepare() {
    data_path::prepare();
}

/// Opens the backend for this thread's network namespace, after a check that this machine can run its rules.
///
/// # Errors
/// [`OpenError`] names the missing part.
pub fn open(settings: &super::Settings) -> Result<Backend, OpenError> {
    data_path::open(settings)
}
