//! What traffic policies, source ranges and affinity mean for clients.

use kplane_desired_state::index::{PortView, ServiceDetail};
use kplane_model::select::local_by_node;
use kplane_model::{Endpoint, NodeName, Reason, ServicePort, Severity, TrafficPolicy};

use super::{Finding, NODES_NAMED};

/// Returns what a reader has to know about a Service's policies.
pub(super) fn all(detail: &ServiceDetail, nodes: &[NodeName]) -> Vec<Finding> {
    let mut findings = Vec::new();
    // Without any endpoint connections are refused everywhere, and another finding says so.
    let usable = |view: &&PortView| view.endpoints.iter().any(Endpoint::is_usable);
    let usable: Vec<_> = detail.ports.iter().filter(usable).collect();
    let external = usable.iter().copied().find(|view| is_local_outside(&view.port));
    if let Some(view) = external {
        findings.extend(external_local(view, nodes));
    }
    let internal = usable
        .iter()
        .copied()
        .find(|view| view.port.internal_policy == TrafficPolicy::Local);
    if let Some(view) = internal {
        findings.extend(internal_local(view, nodes));
    }
    if let Some(view) = detail.ports.first() {
        findings.extend(affinity(&view.port));
    }
    let ranged = |view: &&PortView| {
        !view.port.source_ranges.is_empty() && !view.port.load_balancer_ips.is_empty()
    };
    findings.extend(detail.ports.iter().find(ranged).map(|view| ranges(&view.port)));
    findings
}

fn is_local_outside(port: &ServicePort) -> bool {
    port.external_policy == TrafficPolicy::Local && port.externally_accessible()
}

/// Returns the first nodes that have no endpoint of a port under policy Local, and the number of such nodes.
fn without_local(view: &PortView, nodes: &[NodeName]) -> (Vec<NodeName>, usize) {
    let with = local_by_node(&view.endpoints);
    let are_nodes = with.keys().filter(|node| nodes.binary_search(node).is_ok());
    let count = nodes.len() - are_nodes.count();
    let without = nodes.iter().filter(|node| !with.contains_key(*node));
    (
        without.take(count.min(NODES_NAMED)).cloned().collect(),
        count,
    )
}

/// A18: connections of clients outside are dropped where no endpoint is.
fn external_local(view: &PortView, nodes: &[NodeName]) -> Option<Finding> {
    let (without, count) = without_local(view, nodes);
    let all = nodes.len();
    let (severity, fix) = match view.port.health_check_node_port {
        Some(port) => (
            Severity::Info,
            format!(
                "load balancers avoid these nodes if they check the health check node port {port}"
            ),
        ),
        None => (
            Severity::Warning,
            "send clients to nodes with endpoints, or set externalTrafficPolicy to Cluster"
                .to_owned(),
        ),
    };
    (count > 0).then(|| {
        let text = format!(
            "externalTrafficPolicy is Local, and {count} of {all} nodes have no endpoint: connections of clients \
             outside of the cluster are dropped there"
        );
        Finding::new(Reason::ExternalPolicyLocal, severity, text, fix).on_some(without, count)
    })
}

/// A18: connections of a node's own Pods to the ClusterIP are dropped where no endpoint is.
fn internal_local(view: &PortView, nodes: &[NodeName]) -> Option<Finding> {
    let (without, count) = without_local(view, nodes);
    let all = nodes.len();
    (count > 0).then(|| {
        let text = format!(
            "internalTrafficPolicy is Local, and {count} of {all} nodes have no endpoint: connections of Pods on \
             these nodes to the ClusterIP are dropped"
        );
        let fix = "run an endpoint on each node (a DaemonSet), or set internalTrafficPolicy to Cluster";
        Finding::new(Reason::InternalPolicyLocal, Severity::Warning, text, fix).on_some(without, count)
    })
}

fn affinity(port: &ServicePort) -> Option<Finding> {
    let seconds = port.affinity_timeout_s?;
    Some(Finding::new(
        Reason::SessionAffinity,
        Severity::Info,
        format!(
            "sessionAffinity is ClientIP: a client stays with its endpoint until it has opened no connection for \
             {seconds} s, so connections of few clients are not spread evenly"
        ),
        format!(
            "if a client is stuck: kpctl get affinity {0} says where it is remembered, and kpctl forget-client {0} \
             --client ADDRESS makes nodes forget it",
            port.key.service
        ),
    ))
}

fn ranges(port: &ServicePort) -> Finding {
    /// Number of ranges that are named.
    const NAMED: usize = 5;
    let ranges = &port.source_ranges;
    let named: Vec<String> = ranges.iter().take(NAMED).map(ToString::to_string).collect();
    let more = match ranges.len() - named.len() {
        0 => String::new(),
        more => format!(" and {more} more ranges"),
    };
    Finding::new(
        Reason::SourceRanges,
        Severity::Info,
        format!(
            "only clients in {}{more} may use the load balancer's addresses: packets of all other clients are dropped",
            named.join(", ")
        ),
        "add a range to spec.loadBalancerSourceRanges to admit more clients",
    )
}
