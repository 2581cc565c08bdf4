//! The problems of one moment, as far as events report them. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kplane_desired_state::index::Held;
use kplane_desired_state::k8s::Kind;
use kplane_model::{Issue, NodeName, ServiceName, Severity};
use kplane_proto::HEALTH_CHECK_PORT;
use kplane_proto::v1 as pb;

use super::{NodeSnapshot, Object, Reason, Snapshot, node_names};
use crate::fleet::holding;

/// Time without an agent after which a node gets an event: restarts and upgrades are over by then.
const STALE_AFTER: Duration = Duration::from_secs(60);
/// Time after which a failure counts as lasting: the next attempt is unlikely to resolve it.
const FAILING_AFTER: Duration = Duration::from_secs(10);

/// Identity of one problem with one object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) object: Object,
    pub(super) reason: Reason,
    /// Distinguishes problems with the same reason.
    pub(super) what: String,
}

/// Details of a problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Problem {
    pub(super) note: String,
    /// Start of the problem, if known; otherwise the time of its detection counts.
    pub(super) since: Option<Instant>,
    /// Duration after which the problem is announced.
    pub(super) after: Duration,
}

pub(super) type Problems = BTreeMap<Key, Problem>;

/// Returns all problems of a snapshot. `with_input`: includes issues of the input.
pub(super) fn problems(snapshot: &Snapshot, with_input: bool) -> Problems {
    let mut found = Problems::new();
    if with_input {
        let issues = snapshot.issues.iter();
        found.extend(issues.filter_map(of_issue));
        found.extend(snapshot.held.iter().flat_map(|held| of_held(held)));
    }
    let mut services = Services::new();
    for (name, node) in snapshot.nodes.iter().filter(|(_, node)| node.known) {
        of_node(name, node, &mut found);
        let report = node.agent.as_ref().and_then(|agent| agent.report.as_ref());
        for failure in report.iter().flat_map(|report| &report.failures) {
            collect(name, failure, &mut services);
        }
    }
    found.extend(services.into_iter().map(of_service));
    found
}

/// Returns the problem of an issue with severity error. Warnings are left out: their objects are
/// served, though not as written, and every cluster has some.
fn of_issue(issue: &Issue) -> Option<(Key, Problem)> {
    if issue.severity != Severity::Error {
        return None;
    }
    let object = &issue.object;
    let kind = Kind::WITH_POLICIES.into_iter().find(|kind| kind.as_str() == object.kind)?;
    let key = Key {
        object: Object {
            kind,
            namespace: object.namespace.as_str().into(),
            name: object.name.as_str().into(),
        },
        reason: Reason::Refused(issue.code),
        what: issue.reason.clone(),
    };
    let problem = Problem {
        note: issue.reason.clone(),
        since: None,
        after: Duration::ZERO,
    };
    Some((key, problem))
}

/// Returns the problems of some of the held Services. One event for each held Service could be as
/// many as there are Services.
fn of_held(held: &Held) -> impl Iterator<Item = (Key, Problem)> {
    held.examples.iter().map(move |name| {
        let key = Key {
            object: Object {
                kind: Kind::Service,
                namespace: name.namespace.clone(),
                name: name.name.clone(),
            },
            reason: Reason::ServiceHeld,
            what: String::new(),
        };
        let problem = Problem {
            note: held.to_string(),
            since: None,
            // A second list from the source arrives within this time.
            after: FAILING_AFTER,
        };
        (key, problem)
    })
}

fn of_node(name: &NodeName, node: &NodeSnapshot, found: &mut Problems) {
    let mut add = |reason, what: &str, note, since, after| {
        let key = Key {
            object: Object::node(name),
            reason,
            what: what.to_owned(),
        };
        found.insert(key, Problem { note, since, after });
    };
    if let Some(suspected) = &node.suspected {
        let note = format!("no stream from the node, and {suspected}");
        add(Reason::NodeSuspected, "", note, None, Duration::ZERO);
    }
    let Some(agent) = &node.agent else {
        return;
    };
    if !agent.connected {
        let note = "no agent of the node has been connected to this control plane for a minute: \
                    the node's kernel keeps its rules and gets no changes. Check that the agent \
                    is running. (With several control planes without --peers, the agent may be \
                    connected to another one.)";
        let since = Some(agent.since);
        add(Reason::ProxyStale, "", note.to_owned(), since, STALE_AFTER);
    }
    let Some(report) = &agent.report else {
        return;
    };
    for family in report.families.iter().filter(|f| !f.error.is_empty()) {
        let name = match family.family() {
            pb::Family::Ipv6 => "IPv6",
            pb::Family::Ipv4 | pb::Family::Unspecified => "IPv4",
        };
        let note = format!("{name}: {}", family.error);
        add(Reason::SyncFailing, name, note, None, FAILING_AFTER);
    }
    if let Some(held) = &report.held {
        let note = format!("the node {}", holding::describe(held));
        add(Reason::HoldingServices, "", note, None, FAILING_AFTER);
    }
    let mut failed = report.failures.iter().filter(|f| !f.degraded);
    if let Some(first) = failed.next() {
        let object = first.key.as_ref().map_or_else(String::new, |key| {
            format!(" of {}/{}", key.namespace, key.name)
        });
        let note = format!(
            "{} objects are not in the kernel as desired, the first{object}: {}",
            failed.count() + 1,
            first.reason
        );
        add(Reason::SyncFailing, "objects", note, None, FAILING_AFTER);
    }
}

/// Nodes with a problem, and the note of the first of them, by Service and reason.
type Services = BTreeMap<(ServiceName, Reason), (BTreeSet<NodeName>, String)>;

fn collect(node: &NodeName, failure: &pb::ObjectFailure, services: &mut Services) {
    let Some(key) = &failure.key else {
        return;
    };
    let reason = if !failure.degraded {
        Reason::ServiceNotProgrammed
    } else if failure.reason.starts_with(HEALTH_CHECK_PORT) {
        Reason::FailedToStartServiceHealthcheck
    } else {
        return;
    };
    let service = ServiceName::new(&key.namespace, &key.name);
    let (nodes, _) = services
        .entry((service, reason))
        .or_insert_with(|| (BTreeSet::new(), failure.reason.clone()));
    nodes.insert(node.clone());
}

fn of_service(
    ((service, reason), (nodes, text)): ((ServiceName, Reason), (BTreeSet<NodeName>, String)),
) -> (Key, Problem) {
    let key = Key {
        object: Object {
            kind: Kind::Service,
            namespace: service.namespace.clone(),
            name: service.name.clone(),
        },
        reason,
        what: String::new(),
    };
    let problem = Problem {
        note: format!("on {}: {text}", node_names(nodes.iter())),
        since: None,
        after: FAILING_AFTER,
    };
    (key, problem)
}
