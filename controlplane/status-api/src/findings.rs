//! What is the matter with a Service, and what an operator can do about it: pure functions.
//!
//! ```text
//! ServiceDetail, nodes      -> endpoints, policies, places -> Findings
//! the Service on each node  -> fleet, avoided              -> Findings
//! ```
//!
//! A finding is computed on request. Nothing is kept for it but the facts that the index has.
//! `docs/reasons.md` explains each code.

mod avoided;
mod broken;
mod ended;
mod endpoints;
mod fleet;
mod host_findings;
mod policies;
mod reported;

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::net::IpAddr;
use std::time::SystemTime;

use kplane_desired_state::convert::SkipReason;
use kplane_desired_state::index::{Facts, ServiceDetail};
use kplane_desired_state::k8s::SERVICE_PROXY_NAME_LABEL;
use kplane_model::{Family, NodeName, Reason, ServiceName, Severity};
use kplane_proto::v1 as pb;

pub(crate) use self::avoided::avoided;
pub(crate) use self::broken::{Broken, WorstFirst};
pub(crate) use self::ended::ended;
pub(crate) use self::endpoints::is_published;
pub(crate) use self::fleet::{Place, of_fleet, of_state};
pub(crate) use self::host_findings::host_findings;
pub(crate) use self::reported::{Remarks, reported};

/// Maximum number of nodes that a finding names.
const NODES_NAMED: usize = 64;

/// One thing to know about a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) code: Reason,
    /// Error: connections fail. Warning: some fail, or may fail. Info: the Service works as it is written.
    pub(crate) severity: Severity,
    /// The cause, and what clients see.
    pub(crate) text: String,
    /// What to do or to type; empty if nothing has to be done.
    pub(crate) fix: String,
    /// The first nodes that it is about, sorted; empty for all.
    pub(crate) nodes: Vec<NodeName>,
    /// Number of nodes that are not in `nodes`.
    pub(crate) nodes_omitted: u64,
}

impl Finding {
    pub(crate) fn new(
        code: Reason,
        severity: Severity,
        text: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            code,
            severity,
            text: text.into(),
            fix: fix.into(),
            nodes: Vec::new(),
            nodes_omitted: 0,
        }
    }

    pub(crate) fn on(self, nodes: Vec<NodeName>) -> Self {
        let count = nodes.len();
        self.on_some(nodes, count)
    }

    /// Returns whether connections fail, or may fail.
    pub(crate) fn is_bad(&self) -> bool {
        self.severity != Severity::Info
    }

    /// Sets the nodes: the first ones, and the number of all.
    fn on_some(self, mut nodes: Vec<NodeName>, count: usize) -> Self {
        nodes.truncate(NODES_NAMED);
        let nodes_omitted = (count - nodes.len()) as u64;
        Self {
            nodes,
            nodes_omitted,
            ..self
        }
    }

    /// Returns the finding as the API shows it.
    pub(crate) fn to_wire(&self) -> pb::Finding {
        pb::Finding {
            code: self.code.code().to_owned(),
            severity: pb::Severity::from(self.severity).into(),
            text: self.text.clone(),
            fix: self.fix.clone(),
            nodes: self.nodes.iter().map(ToString::to_string).collect(),
            nodes_omitted: self.nodes_omitted,
        }
    }
}

/// Longest text of a problem or a finding in a list, in bytes.
const TEXT_BYTES: usize = 1 << 10;

/// Cuts a text to the maximum length.
pub(crate) fn cut(text: &mut String) {
    if text.len() > TEXT_BYTES {
        text.truncate(text.floor_char_boundary(TEXT_BYTES));
        text.push_str(" ..");
    }
}

/// Returns the names of the nodes that a finding names, and the number of those that it leaves out.
fn named<'n>(nodes: impl ExactSizeIterator<Item = &'n NodeName>) -> (Vec<String>, u64) {
    let omitted = nodes.len().saturating_sub(NODES_NAMED) as u64;
    let names = nodes.take(NODES_NAMED).map(ToString::to_string);
    (names.collect(), omitted)
}

/// Returns the findings about a Service as it is written and published, the worst first. `nodes` are all nodes, sorted. The work
/// does not grow with their number.
pub(crate) fn of_service(
    service: &ServiceName,
    detail: &ServiceDetail,
    nodes: &[NodeName],
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let facts = &detail.facts;
    if let Some(reason) = &facts.skipped {
        return skipped(service, reason).into_iter().collect();
    }
    if !detail.ports.is_empty() {
        findings.extend(endpoints::without_slices(service, detail, facts));
        findings.extend(without_address(service, facts));
        findings.extend(outside_ranges(detail, facts));
    }
    findings.extend(held(facts));
    findings.extend(suspected(facts));
    findings.extend(endpoints::slices_behind_pods(facts, SystemTime::now()));
    findings.extend(contested(facts));
    findings.extend(endpoints::chained(service, facts));
    findings.extend(endpoints::not_usable(service, detail));
    findings.extend(policies::all(detail, nodes));
    findings.sort_by_key(|finding| Reverse(finding.severity));
    findings
}

/// Explains why a Service is not proxied. The input's own issue explains a missing address.
fn skipped(service: &ServiceName, reason: &SkipReason) -> Option<Finding> {
    let info = |code, text: &str, fix: String| Some(Finding::new(code, Severity::Info, text, fix));
    match reason {
        SkipReason::Headless => info(
            Reason::Headless,
            "exists, and is not proxied because it is headless (clusterIP: None): DNS answers with the addresses \
             of its Pods",
            String::new(),
        ),
        SkipReason::ExternalName(name) => info(
            Reason::ExternalName,
            &format!(
                "exists, and is not proxied because its type is ExternalName: DNS answers with the name {name:?}"
            ),
            String::new(),
        ),
        SkipReason::OtherProxy => info(
            Reason::OtherProxy,
            &format!(
                "exists, and is not proxied by kplane because its label {SERVICE_PROXY_NAME_LABEL} gives it to \
                 another proxy"
            ),
            format!(
                "if kplane should serve it: kubectl label service -n {} {} {SERVICE_PROXY_NAME_LABEL}-",
                service.namespace, service.name
            ),
        ),
        SkipReason::NoClusterIp => None,
    }
}

fn held(facts: &Facts) -> Option<Finding> {
    facts.held.then(|| {
        Finding::new(
            Reason::Held,
            Severity::Warning,
            "the source no longer names the Service, and it is kept: the source lost so much at once that this may be \
             a mistake",
            "kpctl approve, if it is really gone",
        )
    })
}

/// Names the nodes that are probably dead.
fn suspected(facts: &Facts) -> impl Iterator<Item = Finding> {
    let (nodes, act) = &facts.suspected;
    nodes.iter().map(|(node, suspicion, endpoints, is_dead)| {
        let (severity, effect) = match act {
            true if *is_dead => (
                Severity::Warning,
                "get new connections only where no other endpoint is ready, and established ones end with the client's \
                 next packet",
            ),
            true => (
                Severity::Warning,
                "get new connections only where no other endpoint is ready",
            ),
            false => (
                Severity::Info,
                "get connections all the same (--dead-node observe)",
            ),
        };
        let age = suspicion.age_s();
        let text = format!(
            "{node} has been suspected for {age} s: {suspicion}; {endpoints} endpoints there {effect}"
        );
        let fix = format!(
            "kubectl get node {node} -o wide; check that the machine runs, and its network"
        );
        Finding::new(Reason::NodeSuspected, severity, text, fix).on(vec![node.clone()])
    })
}

/// A6: kplane serves the addresses of load balancers that others give.
fn without_address(service: &ServiceName, facts: &Facts) -> Option<Finding> {
    facts.origin.waits_for_address.then(|| {
        Finding::new(
            Reason::NoLoadBalancerAddress,
            Severity::Warning,
            "type is LoadBalancer, and status.loadBalancer.ingress is empty: clients outside reach the Service by its \
             node port at most",
            format!(
                "a controller of the cloud, or one such as MetalLB, gives addresses: kubectl describe service -n {} {} \
                 shows its events",
                service.namespace, service.name
            ),
        )
    })
}

/// Names the ClusterIP that the API server would not give.
fn outside_ranges(detail: &ServiceDetail, facts: &Facts) -> Option<Finding> {
    let ranges = &facts.service_ranges;
    let mut ips = detail.ports.iter().map(|view| view.port.cluster_ip);
    let known = |ip: &IpAddr| ranges.iter().any(|range| range.family() == Family::of(*ip));
    let ip = ips.find(|ip| known(ip) && !ranges.iter().any(|range| range.contains(*ip)))?;
    let named: Vec<String> = ranges.iter().map(ToString::to_string).collect();
    Some(Finding::new(
        Reason::OutsideServiceRange,
        Severity::Warning,
        format!(
            "the ClusterIP {ip} is in none of the cluster's ranges for Services, {}: another machine may have the address",
            named.join(", ")
        ),
        "kubectl get servicecidrs; give the Service an address of a range, or add the range",
    ))
}

/// Names the Services that want a place of this one: they have an issue, and this one should know.
fn contested(facts: &Facts) -> impl Iterator<Item = Finding> {
    facts.contested.iter().map(|(place, other)| {
        Finding::new(
            Reason::AddressContested,
            Severity::Info,
            format!("{other} wants {place} too, and does not get it: this Service came first"),
            "change one of the two Services",
        )
    })
}
