//! Places that the proxy serves in front of the kernel. Pure.

use kplane_model::{Cidr, Family};

use super::super::nftables::proxy_tables::CapturedFrontend;
use super::localhost::is_relayed;
use crate::plan::{Frontend, NodePlan, ServicePlan, disjoint, loopback};

/// Returns the frontends of a plan that the proxy serves: those that every client may use, and where every client has an
/// endpoint. The kernel rejects and drops for the rest (A8, A16, A18). With session affinity, all frontends or none, since they
/// share what is remembered.
pub(super) fn captured(plan: &ServicePlan, by_interface: bool) -> Vec<CapturedFrontend> {
    let for_all = |frontend: &&Frontend| {
        let inside = frontend
            .inside
            .as_ref()
            .is_none_or(|inside| !inside.is_empty() && !by_interface);
        frontend.source_ranges.is_empty() && !frontend.endpoints.is_empty() && inside
    };
    let has_all = || plan.frontends.iter().all(|frontend| for_all(&frontend));
    let is_sticky = plan.affinity_timeout_s.is_some();
    if !is_relayed(plan.key.protocol) || is_sticky && !has_all() {
        return Vec::new();
    }
    plan.frontends
        .iter()
        .filter(for_all)
        .map(|frontend| CapturedFrontend::Of(frontend.at))
        .collect()
}

/// Returns the addresses with node ports.
pub(super) fn node_ports(family: Family, node: &NodePlan) -> Vec<Cidr> {
    let mut ranges = node.nodeport_ips.clone();
    if node.nodeport_localhost {
        ranges.push(loopback(family));
    }
    disjoint(&ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a21_loopback_joins_the_addresses_with_node_ports() {
        let plan = |ips: &[&str], nodeport_localhost| {
            let node = NodePlan {
                nodeport_ips: ips.iter().map(|ip| ip.parse().unwrap()).collect(),
                nodeport_localhost,
                ..NodePlan::default()
            };
            let ranges = node_ports(Family::V4, &node);
            ranges.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(plan(&["192.0.2.1/32"], false), ["192.0.2.1/32"]);
        assert_eq!(
            plan(&["192.0.2.1/32"], true),
            ["127.0.0.0/8", "192.0.2.1/32"]
        );
        assert_eq!(plan(&["0.0.0.0/0"], true), ["0.0.0.0/0"]);
        assert_eq!(plan(&["127.0.0.0/8"], true), ["127.0.0.0/8"]);
    }
}
