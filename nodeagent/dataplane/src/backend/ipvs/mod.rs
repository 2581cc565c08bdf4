//! IPVS: kube-proxy's virtual servers, IP sets, device and rules, written only where they change.
//!
//! ```text
//! kube-ipvs0   holds all addresses of Services, so that their packets come to the node itself
//! IPVS         address, protocol, port -> real servers, chosen by a scheduler; node ports: one virtual
//!              server for each of the node's addresses
//! IP sets      what iptables must know of Services: KUBE-CLUSTER-IP, KUBE-NODE-PORT-TCP, ...
//! iptables     a few rules about these sets: who is masqueraded, who may use a load balancer
//! ```
//!
//! * **Names, types and rules are kube-proxy's** (D2-D4): what it left is adopted, not rewritten.
//! * **There is no transaction.** On the way in come entries of sets, servers, rules, addresses; on the
//!   way out addresses, servers, entries. After each single step every Service that was served is.
//! * **Only what changes is written**: one endpoint is one message, whatever the number of Services.
//! * **An endpoint that goes keeps its connections** until they end (D5), over a restart too.
//!
//! Pure: `sets.rs`, `demand.rs` (what a ServicePort needs), `rules.rs`, `state.rs` (all of it, and what
//! a change does). The rest deals with the machine: `kernel.rs` (one family's data path), `probe.rs`
//! (what the machine can), `sysctl.rs`, `driver.rs` (the backend), `left.rs` (what is left of it).

mod demand;
mod driver;
mod kernel;
pub(crate) mod left;
mod probe;
mod rules;
mod sets;
mod state;
mod sysctl;

#[cfg(test)]
mod tests;

use kplane_model::{Cidr, IpvsScheduler};

pub use self::driver::stopping::{Budget, open_stopping};
pub use self::kernel::LINK;
pub(crate) use self::sets::is_name as is_set_name;
use super::{Backend, Description, Failures, ModeMetrics, OpenError};
pub use kplane_netlink::ipvs::Timeouts;

/// What is true of this backend on every machine.
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
    leaves_conntrack_entries: true,
    metrics: ModeMetrics {
        full_and_partial: false,
        failures: Failures::Restore,
        rules: false,
    },
};

/// Settings of this backend alone: `ipvs` of kube-proxy's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How virtual servers spread connections (D7).
    pub scheduler: IpvsScheduler,
    /// Virtual servers on these addresses are never removed (D8).
    pub exclude_cidrs: Vec<Cidr>,
    /// The node answers ARP for addresses of the asked device only (D6).
    pub strict_arp: bool,
    /// Timeouts of connections (D8).
    pub timeouts: Timeouts,
    /// Local policies without endpoints on this node refuse connections; kube-proxy has the cluster's
    /// endpoints serve then (A29).
    pub strict_local: bool,
    /// Forwarded packets that belong to no connection are dropped; kube-proxy does so in mode iptables
    /// (C7, D9).
    pub drop_invalid: bool,
}

impl Default for Settings {
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

/// Sets what needs root's privileges, as `--init-only` wants it: settings of the kernel and timeouts.
/// What cannot be set is logged.
pub fn prepare(settings: &Settings) {
    driver::prepare(settings);
}

/// Opens the backend for this thread's network namespace, having tried out that this machine can
/// run it.
///
/// # Errors
/// [`OpenError`] says what is missing, and which kernel module to load.
pub fn open(settings: &super::Settings) -> Result<Box<dyn Backend>, OpenError> {
    driver::open(settings)
}
