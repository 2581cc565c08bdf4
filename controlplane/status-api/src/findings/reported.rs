//! What agents report of their nodes besides the state: obstructions, failures and endpoints that proxies avoid. A node with
//! any of them may be in sync all the same.

use std::collections::{BTreeMap, BTreeSet};

use kplane_model::{NodeName, Reason, ServiceName, nodes_agree};
use kplane_proto::v1::{self as pb, Severity};

use super::{Broken, host_findings, named};

/// Maximum number of failures of one node that are compared with those of others.
const FAILURES: usize = 20;

/// What a report says of its node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Remarks {
    /// The codes of reasons, each once.
    pub(crate) codes: BTreeSet<String>,
    /// Whether something is an error.
    pub(crate) has_error: bool,
}

impl Remarks {
    /// Collects the remarks of a report.
    pub(crate) fn of(report: &pb::Report) -> Self {
        let failures = report.failures.iter().map(|failure| {
            let (reason, severity) = kind(failure);
            (reason.code(), severity)
        });
        let findings = obstacles(report).map(|finding| (&*finding.code, finding.severity()));
        let mut remarks = Self::default();
        for (code, severity) in findings.chain(failures) {
            remarks.has_error |= severity != Severity::Warning;
            if !remarks.codes.contains(code) {
                remarks.codes.insert(code.to_owned());
            }
        }
        remarks
    }
}

/// Returns the findings of a report that are more than worth knowing.
fn obstacles(report: &pb::Report) -> impl Iterator<Item = &pb::Finding> {
    report.findings.iter().filter(|finding| finding.severity() != Severity::Info)
}

/// Returns the reason and the severity of a failure.
fn kind(failure: &pb::ObjectFailure) -> (Reason, Severity) {
    let reason = match (failure.policies, failure.degraded) {
        (true, _) => Reason::PolicyDegraded,
        (false, true) => Reason::Degraded,
        (false, false) => Reason::NotProgrammed,
    };
    if failure.degraded {
        (reason, Severity::Warning)
    } else {
        (reason, Severity::Error)
    }
}

/// Returns one finding for each kind of trouble, with the nodes that have it. `local_ms` turns a time of a node's report into one of
/// this machine's clock.
pub(crate) fn reported(
    nodes: &[(&NodeName, &pb::Report)],
    local_ms: impl Fn(&NodeName, u64) -> u64,
) -> Vec<Broken> {
    let found: Vec<_> = nodes
        .iter()
        .map(|(node, report)| {
            let found: Vec<pb::Finding> = obstacles(report).cloned().collect();
            (*node, found)
        })
        .collect();
    let around = host_findings(found.iter().map(|(node, found)| (*node, &**found)));
    let mut all: Vec<_> = around.into_iter().map(Broken::of_nodes).collect();
    all.extend(failures(nodes, local_ms));
    all.extend(avoided(nodes));
    all
}

/// Returns a finding for each object that nodes do not serve as desired, for the same reason.
fn failures(
    nodes: &[(&NodeName, &pb::Report)],
    local_ms: impl Fn(&NodeName, u64) -> u64,
) -> impl Iterator<Item = Broken> {
    let mut found = BTreeMap::<_, (u64, BTreeSet<&NodeName>)>::new();
    for (node, report) in nodes.iter().copied() {
        for failure in report.failures.iter().take(FAILURES) {
            let key = failure.key.as_ref();
            let service = key.map(|key| (&*key.namespace, &*key.name));
            let (reason, severity) = kind(failure);
            let problem = (reason, severity as i32, service, &*failure.reason);
            let (since_ms, nodes) = found.entry(problem).or_insert((u64::MAX, BTreeSet::new()));
            *since_ms = local_ms(node, failure.since_ms).min(*since_ms);
            nodes.insert(node);
        }
    }
    found.into_iter().map(|((reason, severity, service, text), (since_ms, nodes))| {
        let text = text.to_owned();
        let broken = match service {
            Some((namespace, name)) => {
                let fix = format!("kpctl describe service {namespace}/{name}");
                let service = ServiceName::new(namespace, name);
                Broken::of_service(&service, on(&nodes, reason, severity, text, fix))
            }
            None => {
                let first = nodes.first().map_or("", |node| &***node);
                let fix = format!("kpctl describe node {first}");
                Broken::of_nodes(on(&nodes, reason, severity, text, fix))
            }
        };
        broken.since(since_ms)
    })
}

/// Returns a finding for each endpoint that the userspace proxies of several nodes avoid.
fn avoided(nodes: &[(&NodeName, &pb::Report)]) -> impl Iterator<Item = Broken> {
    let mut found = BTreeMap::<_, BTreeSet<&NodeName>>::new();
    for (node, report) in nodes.iter().copied() {
        for one in &report.avoided {
            if let Some(key) = &one.key {
                let endpoint = (&*key.namespace, &*key.name, &*one.address);
                found.entry(endpoint).or_default().insert(node);
            }
        }
    }
    found.into_iter().filter(|(_, nodes)| nodes_agree(nodes.len())).map(
        |((namespace, name, address), nodes)| {
            let text =
                format!("the userspace proxies avoid the endpoint {address} of {namespace}/{name}");
            let fix = format!("kpctl describe service {namespace}/{name}");
            let severity = Severity::Warning as i32;
            let finding = on(&nodes, Reason::EndpointAvoided, severity, text, fix);
            Broken::of_service(&ServiceName::new(namespace, name), finding)
        },
    )
}

fn on(
    nodes: &BTreeSet<&NodeName>,
    code: Reason,
    severity: i32,
    text: String,
    fix: String,
) -> pb::Finding {
    let (nodes, nodes_omitted) = named(nodes.iter().copied());
    pb::Finding {
        code: code.code().to_owned(),
        severity,
        text,
        fix,
        nodes,
        nodes_omitted,
    }
}
