//! What the node enforces of the NetworkPolicies.

use std::fmt;

use kplane_dataplane::policy::PolicyCounts;
use kplane_http::metrics::{Labels, Name};
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
    .gauge(to, families.into_iter().zip(elements))
}
