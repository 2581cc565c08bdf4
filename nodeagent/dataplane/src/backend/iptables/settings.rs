//! What shapes the rules besides plans.

use kplane_model::Family;

use super::structure::Layout;
use crate::backend::PodInterface;

/// Settings that affect the rules besides plans, for one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuleSettings {
    /// The family.
    pub family: Family,
    /// Bit of the packet mark that asks for masquerading, 0..=31 (C5).
    pub masquerade_bit: u8,
    /// Mark of kplane's own connections, to which no rule applies in layout tree; 0 = none.
    pub own_mark: u32,
    /// Whether the tools know `MASQUERADE --random-fully` (iptables 1.6.2 or later, C5).
    pub random_fully: bool,
    /// Whether node ports are served on the loopback address too, IPv4 only (C8).
    pub localhost_nodeports: bool,
    /// Whether `nf_conntrack_tcp_be_liberal` is set, so that packets of no known flow are not dropped (C7).
    pub tcp_be_liberal: bool,
    /// Whether the counters of nfacct exist (C7, C8).
    pub counters: bool,
    /// Interface of the pods: packets that arrive on it count as coming from pods, in addition to the plan's
    /// pod sources.
    pub pod_interface: Option<PodInterface>,
    /// The structure in which a rule finds the Service of an address.
    pub layout: Layout,
}

impl RuleSettings {
    /// Returns kube-proxy's default settings, with kplane's default layout.
    pub fn new(family: Family) -> Self {
        Self {
            family,
            masquerade_bit: 14,
            own_mark: 0,
            random_fully: true,
            localhost_nodeports: true,
            tcp_be_liberal: false,
            counters: false,
            pod_interface: None,
            layout: Layout::Tree,
        }
    }
}
