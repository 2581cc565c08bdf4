//! Node ports on loopback addresses, where the proxy serves what the kernel cannot. Pure.

use kplane_model::{Family, FrontendAddr, Protocol};

use super::super::nftables::NodePort;
use super::super::{Description, Settings, iptables};
use crate::plan::{NodePlan, ServicePlan};

/// What the kernel serves on loopback addresses of one family.
#[derive(Clone, Copy, Debug)]
pub(super) struct Localhost {
    /// Whether the kernel serves node ports there if these addresses are among those of the node plan.
    by_kernel: bool,
}

impl Localhost {
    /// Returns what a backend of the kernel serves: node ports of IPv4 alone.
    pub(super) fn of(backend: &Description, family: Family, settings: &Settings) -> Self {
        let by_kernel =
            backend.routes_loopback() && family == Family::V4 && settings.localhost_nodeports;
        Self { by_kernel }
    }

    /// Returns the node port of a plan that the kernel does not serve, unless the proxy serves it for all clients, and if it
    /// has an endpoint: one of this node with a policy Local (K7). The kernel refuses for the rest (K6).
    pub(super) fn lacks(
        self,
        plan: &ServicePlan,
        node: &NodePlan,
        is_captured: impl Fn(FrontendAddr) -> bool,
    ) -> Option<NodePort> {
        let mut ranges = node.nodeport_ips.iter();
        let by_kernel = self.by_kernel && ranges.any(|range| iptables::meets_loopback(*range));
        if !node.nodeport_localhost || by_kernel {
            return None;
        }
        plan.frontends.iter().find_map(|frontend| {
            let FrontendAddr::NodePort { protocol, port } = frontend.at else {
                return None;
            };
            let is_served = is_relayed(protocol) && !frontend.endpoints.is_empty();
            let is_left = is_served && !is_captured(frontend.at);
            is_left.then_some(NodePort { protocol, port })
        })
    }
}

pub(super) fn is_relayed(protocol: Protocol) -> bool {
    match protocol {
        Protocol::Tcp | Protocol::Udp => true,
        Protocol::Sctp => false,
    }
}
