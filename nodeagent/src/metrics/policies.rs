//! What the node enforces of the NetworkPolicies.

use std::fmt;

use kplane_dataplane::backend::nftables::denied_packets;
use kplane_dataplane::policy::PolicyCounts;
use kplane_http::metrics::{Label, Metric, alone};
use kplane_model::{Direction, Family};
use prometheus_client::encoding::DescriptorEncoder;

use super::numbers::float;

/// Encodes the sizes that each family has. Both families are about the same Pods.
pub(super) fn encode(
    to: &mut DescriptorEncoder<'_>,
    counts: &[PolicyCounts; 2],
    families: [[Label<'static>; 1]; 2],
) -> fmt::Result {
    let most = |of: fn(&PolicyCounts) -> u64| {
        let most = counts.iter().map(of).max();
        most.unwrap_or_default()
    };
    let (pods, isolated) = (most(|of| of.pods), most(|of| of.isolated));
    Metric::new("kplane_agent_network_policies")
        .help("NetworkPolicies that select a Pod of the node")
        .gauge(to, [alone(float(most(|of| of.policies)))])?;
    let series = [
        ([("isolated", "true")], float(isolated)),
        (
            [("isolated", "false")],
            float(pods.saturating_sub(isolated)),
        ),
    ];
    Metric::new("kplane_agent_policy_pods")
        .help("Pods of the node with addresses of their own, by whether a NetworkPolicy isolates them")
        .gauge(to, series)?;
    let elements = counts.map(|of| float(of.elements));
    Metric::new("kplane_agent_policy_elements")
        .help("Elements that NetworkPolicies have in the kernel")
        .gauge(to, families.into_iter().zip(elements))?;
    let has_table = counts.iter().any(|of| of.elements > 0);
    let denied = if has_table { denied_packets() } else { Vec::new() };
    let mut series = Vec::new();
    for (family, labels) in Family::ALL.into_iter().zip(families) {
        for direction in Direction::ALL {
            let mut of = denied.iter();
            let of = of.find(|(of, way, _)| (*of, *way) == (family, direction));
            let packets = of.map_or(0, |(.., packets)| *packets);
            let labels = [labels[0], ("direction", name(direction))];
            series.push((labels, float(packets)));
        }
    }
    Metric::new("kplane_agent_policy_denied_packets")
        .help("Packets that NetworkPolicies denied since the kernel's table was made; `kpctl get drops` says of which Pods")
        .counter(to, series)
}

fn name(direction: Direction) -> &'static str {
    match direction {
        Direction::Ingress => "ingress",
        Direction::Egress => "egress",
    }
}
