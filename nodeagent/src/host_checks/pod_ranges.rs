//! What the agent does not know about the addresses of the node's Pods, while NetworkPolicies are enforced (NP19).

use kplane_model::{Cidr, Reason, Severity};

use super::{Finding, finding};
use crate::desired::Desired;

/// Returns findings about the ranges whose unknown addresses are cut off. Work: the Pods of the node.
pub fn findings(desired: &Desired) -> impl Iterator<Item = Finding> {
    desired
        .has_policies()
        .then(|| [lost(desired), outside(desired)])
        .into_iter()
        .flatten()
        .flatten()
}

/// Returns the finding that the Node object does not name its ranges any more.
fn lost(desired: &Desired) -> Option<Finding> {
    let lost: Vec<String> = desired.lost_pod_ranges().map(|range| range.to_string()).collect();
    let text = format!(
        "the Node object does not name the podCIDRs {} any more: unknown Pods in these last known ranges stay cut off",
        lost.join(", ")
    );
    let fix = "kubectl get node -o jsonpath={.spec.podCIDRs} shows the ranges: the controller manager or the cloud's \
               controller sets them. Restore the Node object";
    let found = || finding(Reason::PodRangeUnknown, Severity::Warning, text, fix);
    (!lost.is_empty()).then(found)
}

/// Returns the finding that Pods have addresses in which new Pods are not known as the node's.
fn outside(desired: &Desired) -> Option<Finding> {
    let ranges = desired.pod_ranges();
    let is_outside = |ip: &_| !ranges.iter().any(|range| range.contains(*ip));
    let mut outside = desired.local_pods().filter_map(|pod| {
        let ip = pod.addresses.iter().find(|ip| is_outside(ip))?;
        Some((ip, &pod.name))
    });
    let (ip, pod) = outside.next()?;
    let (more, all) = (outside.count(), desired.local_pods().count());
    let of = match ranges {
        [] => "the Node object names no podCIDRs".to_owned(),
        _ => format!("the Node object's podCIDRs are {}", listed(ranges)),
    };
    let text = format!(
        "{} of {all} Pods of the node have addresses outside of its podCIDRs, such as {ip} of {pod}; {of}: a new Pod there \
         is open for what NetworkPolicies deny until the control plane names its address",
        more + 1
    );
    let fix = "let the CNI plugin take addresses from the Node's podCIDRs (host-local IPAM); otherwise let Pods wait for \
               their policies before they serve or trust anybody (see docs/network-policy.md, Limits)";
    Some(finding(
        Reason::PodRangeUnknown,
        Severity::Warning,
        text,
        fix,
    ))
}

fn listed(ranges: &[Cidr]) -> String {
    let texts: Vec<String> = ranges.iter().map(ToString::to_string).collect();
    texts.join(", ")
}
