//! What the node enforces of the NetworkPolicies.

use std::fmt;

use kplane_dataplane::backend::nftables::denied_packets;
use kplane_dataplane::policy::PolicyCounts;
use kplane_http::metrics::{Labels, Name};
use kplane_model::{Direction, Family};
use prometheus_client::encoding::DescriptorEncoder;

use super::numbers::float;

/// Encodes the sizes that each family has. Both families are about the same Pods.
pub(super) fn encode(
    to: &mut DescriptorEncoder<'_>,
    counts: &[PolicyCounts; 2],
    families: [&Labels<'static>; 2],
) -> fmt::Result {
    let most = |of: fn(&PolicyCounts) -> u64| {
        let most = counts.iter().map(of).max();
        most.unwrap_or_default()
    };
    let (pods, isolated) = (most(|of| of.pods), most(|of| of.isolated));
    Name(
        "kplane_agent_network_policies",
        "NetworkPolicies that select a Pod of the node",
    )
    .gauge(to, [(&[] as &Labels<'_>, float(most(|of| of.policies)))])?;
    let series: [(&Labels<'_>, f64); 2] = [
        (&[("isolated", "true")], float(isolated)),
        (
            &[("isolated", "false")],
            float(pods.saturating_sub(isolated)),
        ),
    ];
    Name(
        "kplane_agent_policy_pods",
        "Pods of the node with addresses of their own, by whether a NetworkPolicy isolates them",
    )
    .gauge(to, series)?;
    let elements = counts.map(|of| float(of.elements));
    Name(
        "kplane_agent_policy_elements",
        "Elements that NetworkPolicies have in the kernel",
    )
    .gauge(to, families.into_iter().zip(elements))?;
    let has_table = counts.iter().any(|of| of.elements > 0);
    let denied = if has_table {
        denied_packets()
    } else {
        Vec::new()
    };
    let mut series = Vec::new();
    for (family, labels) in Family::ALL.into_iter().zip(families) {
        for direction in Direction::ALL {
            let mut of = denied.iter();
            let of = of.find(|(of, way, _)| (*of, *way) == (family, direction));
            let packets = of.map_or(0, |(.., packets)| *packets);
            let labels = [labels, &[("direction", name(direction))]].concat();
            series.push((labels, float(packets)));
        }
    }
    Name(
        "kplane_agent_policy_denied_packets",
        "Packets that NetworkPolicies denied since the kernel's table was made; `kpctl drops` says of which Pods",
    )
    .counter(to, series.iter().map(|(labels, value)| (&labels[..], *value)))
}

fn name(direction: Direction) -> &'static str {
    match direction {
        Direction::Ingress => "ingress",
        Direction::Egress => "egress",
    }
}
