//! The IPVS backend: writes kube-proxy's virtual servers, IP sets, device and rules, and only what changes.
//!
//! ```text
//! kube-ipvs0   holds all addresses of Services, so that their packets come to the node itself
//! IPVS         address, protocol, port -> real servers, chosen by a scheduler; node ports: one virtual
//!              server for each of the node's addresses
//! IP sets      the facts about Services that iptables needs: KUBE-CLUSTER-IP, KUBE-NODE-PORT-TCP, ...
//! iptables     a few rules about these sets: masquerading, and access to load balancers
//! ```
//!
//! * **Names, types and rules are kube-proxy's** (D2-D4), so kube-proxy's leftovers are adopted, not
//!   rewritten.
//! * **IPVS has no transactions.** The backend keeps Services working by a fixed order. It adds entries of
//!   sets, servers, rules, then addresses; it removes addresses, servers, then entries. After each single
//!   step, every Service still works that worked before.
//! * **Only changes are written**: one endpoint is one message, whatever the number of Services.
//! * **A removed endpoint keeps its connections** until they end (D5), even across a restart of the agent.
//!
//! These files are pure: `sets.rs`, `demand.rs` (the needs of a ServicePort), `rules.rs`, `state.rs` (the
//! whole state, and the effect of a change). The others work on the machine: `lookup.rs` (one destination), `machine.rs` (one family's data
//! path), `probe.rs` and `scheduler.rs` (the machine's features), `sysctl.rs`, `data_path.rs` (the backend), `left.rs` (leftovers).

mod data_path;
mod demand;
pub(crate) mod left;
mod lookup;
mod machine;
mod probe;
mod rules;
mod scheduler;
mod sets;
mod state;
mod sysctl;
mod templates;

#[cfg(test)]
mod tests;

use kplane_model::{Cidr, IpvsScheduler, Severity};

pub use self::data_path::stopping::{OperationBudget, open_stopping};
pub(in crate::backend) use self::lookup::look_up;
pub use self::machine::LINK;
pub(crate) use self::sets::is_name as is_set_name;
pub(in crate::backend) use self::templates::remembered;
use super::{Backend, Description, Failures, ModeMetrics, NeededSetting, OpenError};
pub use kplane_netlink::ipvs::Timeouts;

/// The facts that hold for this backend on every machine.
pub(super) const DESCRIPTION: Description = Description {
    name: "ipvs",
    summary: "kube-proxy's virtual servers, IP sets and rules about these",
    deprecation: Some(
        "mode ipvs is deprecated in Kubernetes: off by default from 1.40, gone from kube-proxy in 1.43; mode \
         nftables is the way out",
    ),
    programs_kernel: true,
    shares_names: true,
    has_virtual_servers: true,
    is_proxy: false,
    needs: &[
        NeededSetting {
            key: "net.ipv4.vs.conntrack",
            severity: Severity::Error,
            effect: "the kernel does not masquerade connections to Services, so their answers do not come back",
            for_loopback: false,
        },
        NeededSetting {
            key: "net.ipv4.vs.expire_nodest_conn",
            severity: Severity::Warning,
            effect: "open connections to endpoints that are gone hang instead of ending",
            for_loopback: false,
        },
    ],
    leaves_conntrack_entries: true,
    metrics: ModeMetrics {
        full_and_partial: false,
        failures: Failures::Restore,
        rules: false,
    },
};

/// Settings that only this backend has: section `ipvs` of kube-proxy's configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpvsSettings {
    /// The scheduler, which spreads connections (D7).
    pub scheduler: IpvsScheduler,
    /// Ranges of addresses whose virtual servers are never removed (D8).
    pub exclude_cidrs: Vec<Cidr>,
    /// Whether the node answers ARP only for addresses of the asked device (D6).
    pub strict_arp: bool,
    /// Timeouts of connections (D8).
    pub timeouts: Timeouts,
    /// Whether local policies without endpoints on this node refuse connections. In kube-proxy, the cluster's
    /// endpoints serve then (A29).
    pub strict_local: bool,
    /// Whether forwarded packets that belong to no connection are dropped. kube-proxy drops them in mode
    /// iptables (C7, D9).
    pub drop_invalid: bool,
}

impl Default for IpvsSettings {
    fn default() -> Self {
        Self {
            scheduler: IpvsScheduler::ROUND_ROBIN,
            exclude_cidrs: Vec::new(),
            strict_arp: false,
            timeouts: Timeouts::default(),
            strict_local: false,
            drop_invalid: false,
        }
    }
}

/// Applies the settings that need root's privileges, for `--init-only`: settings of the kernel, and timeouts.
/// Failures are logged.
pub fn prepare(settings: &IpvsSettings) {
    data_path::prepare(settings);
}

/// Opens the backend for this thread's network namespace, after a check that this machine can run it.
///
/// # Errors
/// [`OpenError`] names the missing part, and the kernel module to load.
pub fn open(settings: &super::Settings) -> Result<Backend, OpenError> {
    data_path::open(settings)
}
