//! What agents report of their nodes besides the state: obstructions, failures and endpoints that proxies avoid. A node with
//! any of them may be in sync all the same.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use kplane_model::{NodeName, Reason, nodes_agree};
use kplane_proto::v1::{self as pb, Severity};

use super::{host_findings, named};

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

/// Returns one finding for each kind of trouble, with the nodes that have it: errors first, then what most nodes have.
pub(crate) fn reported(nodes: &[(&NodeName, &pb::Report)]) -> Vec<pb::Finding> {
    let found: Vec<_> = nodes
        .iter()
        .map(|(node, report)| {
            let found: Vec<pb::Finding> = obstacles(report).cloned().collect();
            (*node, found)
        })
        .collect();
    let mut findings = host_findings(found.iter().map(|(node, found)| (*node, &**found)));
    findings.extend(failures(nodes));
    findings.extend(avoided(nodes));
    findings.sort_by_key(|finding| {
        let count = finding.nodes.len() as u64 + finding.nodes_omitted;
        (finding.severity() == Severity::Warning, Reverse(count))
    });
    findings
}

/// Returns a finding for each object that nodes do not serve as desired, for the same reason.
fn failures(nodes: &[(&NodeName, &pb::Report)]) -> impl Iterator<Item = pb::Finding> {
    let mut found = BTreeMap::<_, BTreeSet<&NodeName>>::new();
    for (node, report) in nodes.iter().copied() {
        for failure in report.failures.iter().take(FAILURES) {
            let key = failure.key.as_ref();
            let service = key.map(|key| (&*key.namespace, &*key.name));
            let (reason, severity) = kind(failure);
            let problem = (reason, severity as i32, service, &*failure.reason);
            found.entry(problem).or_default().insert(node);
        }
    }
    found.into_iter().map(|((reason, severity, service, text), nodes)| {
        let (text, fix) = match service {
            Some((namespace, name)) => (
                format!("{namespace}/{name}: {text}"),
                format!("kpctl describe service {namespace}/{name}"),
            ),
            None => {
                let first = nodes.first().map_or("", |node| &***node);
                (text.to_owned(), format!("kpctl describe node {first}"))
            }
        };
        on(&nodes, reason, severity, text, fix)
    })
}

/// Returns a finding for each endpoint that the userspace proxies of several nodes avoid.
fn avoided(nodes: &[(&NodeName, &pb::Report)]) -> impl Iterator<Item = pb::Finding> {
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
            on(&nodes, Reason::EndpointAvoided, severity, text, fix)
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
