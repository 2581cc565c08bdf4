//! What is broken: the findings of all objects, as the status, a description and the checks have them.
//!
//! The nodes are gone through once, and the Services slice by slice: the index's task publishes between two slices. A Service is not
//! compared with each node, so the work grows with the sum of both and not with their product.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kplane_agents::hub::{Closing, Hub};
use kplane_agents::peers::Collected;
use kplane_desired_state::index::{Selection, ServiceDetail};
use kplane_desired_state::k8s::Kind;
use kplane_model::{NodeName, Reason, ServiceName};
use kplane_proto::v1 as pb;
use kplane_util::clock::millis;
use tonic::Status;

use super::pages::{Node, Snapshot};
use super::request::{bounded_names, known_node};
use super::views::{State, disagreement};
use crate::findings::{Broken, Finding, WorstFirst, of_service, of_state, reported};

/// Maximum number of findings in a list.
const MOST: usize = 1_000;
/// Time for which a node may lack a change before that is a finding.
const SYNCING: Duration = Duration::from_secs(10);

/// Returns the answer to a request.
pub(super) async fn answer(
    hub: &Hub,
    others: &Collected,
    request: pb::ListFindingsRequest,
) -> Result<pb::FindingsAnswer, Status> {
    let pb::ListFindingsRequest { namespace, node } = request;
    bounded_names(&[&namespace, &node])?;
    if !node.is_empty() {
        known_node(hub, &node)?;
    }
    let (findings, more) = worst_first(hub, others, &Scope { namespace, node }).await?;
    Ok(pb::FindingsAnswer {
        findings: findings.iter().map(Broken::to_wire).collect(),
        more,
        missing_replicas: others.missing.clone(),
        now_ms: millis(SystemTime::now()),
    })
}

/// What a list is limited to; empty = no limit.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scope {
    pub(crate) namespace: String,
    pub(crate) node: String,
}

/// Returns what is broken, the worst first, and the number of further findings.
pub(crate) async fn worst_first(
    hub: &Hub,
    others: &Collected,
    scope: &Scope,
) -> Result<(Vec<Broken>, u64), Closing> {
    let mut list = WorstFirst::new(MOST);
    let is_in_scope = |broken: &Broken| {
        let object = &broken.object;
        (scope.namespace.is_empty() || object.namespace == scope.namespace)
            && (scope.node.is_empty() || broken.finding.nodes.contains(&scope.node))
    };
    let (input, of_nodes, nodes) = {
        let snapshot = Snapshot::with(hub, others);
        let wanted = |name: &NodeName| scope.node.is_empty() || **name == *scope.node;
        let wanted: Vec<_> = snapshot.nodes().filter(|(name, _)| wanted(name)).collect();
        let mut of_nodes = of_reports(&wanted);
        of_nodes.extend(of_states(&snapshot, &wanted));
        (of_input(hub, others), of_nodes, names_of(&snapshot))
    };
    for broken in input.into_iter().chain(of_nodes).filter(is_in_scope) {
        list.add(broken);
    }
    if scope.node.is_empty() {
        let selection = Selection {
            namespace: scope.namespace.clone(),
            ..Selection::default()
        };
        let names = hub.index().look(move |index| index.names(&selection)).await?;
        // A suspected node has a finding of its own.
        let is_its = |finding: &Finding| finding.is_bad() && finding.code != Reason::NodeSuspected;
        let add = |name: &ServiceName, detail: &ServiceDetail| {
            for finding in of_service(name, detail, &nodes).into_iter().filter(is_its) {
                list.add(Broken::of_service(name, finding.to_wire()));
            }
        };
        each(hub, names, add).await?;
    }
    Ok(list.finish())
}

/// Returns the worst finding of each of these Services that has an error or a warning.
pub(super) async fn worst_of(
    hub: &Hub,
    others: &Collected,
    names: Vec<ServiceName>,
) -> Result<BTreeMap<ServiceName, Broken>, Closing> {
    let (of_nodes, nodes) = {
        let snapshot = Snapshot::with(hub, others);
        let all: Vec<_> = snapshot.nodes().collect();
        (of_reports(&all), names_of(&snapshot))
    };
    let mut of_reports = HashMap::<_, Vec<Broken>>::new();
    for broken in of_nodes {
        let object = &broken.object;
        if object.kind == Kind::Service.as_str() {
            let name = ServiceName::new(&object.namespace, &object.name);
            of_reports.entry(name).or_default().push(broken);
        }
    }
    let mut worst = BTreeMap::<ServiceName, Broken>::new();
    each(hub, names, |name, detail| {
        let all = of_service(name, detail, &nodes)
            .into_iter()
            .filter(Finding::is_bad)
            .map(|finding| Broken::of_service(name, finding.to_wire()))
            .chain(detail.issues.iter().map(Broken::of_issue))
            .chain(of_reports.remove(name).into_iter().flatten());
        for broken in all {
            match worst.entry(name.clone()) {
                Entry::Vacant(none) => drop(none.insert(broken)),
                Entry::Occupied(mut other) => {
                    if broken.urgency() < other.get().urgency() {
                        other.insert(broken);
                    }
                }
            }
        }
    })
    .await?;
    Ok(worst)
}

/// Examines Services, slice by slice.
async fn each(
    hub: &Hub,
    names: Vec<ServiceName>,
    mut examine: impl FnMut(&ServiceName, &ServiceDetail),
) -> Result<(), Closing> {
    let (names, mut begin) = (Arc::new(names), 0);
    while begin < names.len() {
        let all = Arc::clone(&names);
        let details = hub
            .index()
            .look(move |index| index.details(all.get(begin..).unwrap_or_default()))
            .await?;
        for (name, detail) in names.iter().skip(begin).zip(&details) {
            examine(name, detail);
        }
        begin += details.len().max(1);
    }
    Ok(())
}

/// Returns the problems of the input: those that the status shows.
fn of_input(hub: &Hub, others: &Collected) -> Vec<Broken> {
    let differ = disagreement(hub.store().enforcement(), others);
    let issues = hub.issues();
    differ.iter().chain(&*issues).map(Broken::of_issue).collect()
}

/// Returns what agents report besides the states of their nodes.
fn of_reports(nodes: &[(&NodeName, &Node<'_>)]) -> Vec<Broken> {
    let clocks: HashMap<_, _> = nodes.iter().copied().collect();
    let reports: Vec<_> =
        nodes.iter().filter_map(|(name, node)| Some((*name, node.report()?))).collect();
    reported(&reports, |name, ms| {
        clocks.get(name).map_or(ms, |node| node.local_ms(ms))
    })
}

/// Returns a finding for nodes that are in the same state for the same reason.
fn of_states(snapshot: &Snapshot<'_>, nodes: &[(&NodeName, &Node<'_>)]) -> Vec<Broken> {
    let late = millis(SystemTime::now() - SYNCING);
    let mut groups = BTreeMap::<_, (u64, Vec<NodeName>)>::new();
    for (name, node) in nodes {
        let State {
            state,
            since_ms,
            last_error,
        } = snapshot.state(name, node);
        let is_shown = match state {
            pb::NodeState::Syncing => since_ms < late,
            // The objects that fail have findings of their own.
            pb::NodeState::Failing => node.report().is_none_or(|report| {
                let fails = report.failures.iter().any(|failure| !failure.degraded);
                !fails || report.families.iter().any(|family| !family.error.is_empty())
            }),
            _ => true,
        };
        if is_shown {
            let key = (state as i32, last_error);
            let (since, nodes) = groups.entry(key).or_insert((u64::MAX, Vec::new()));
            *since = since_ms.min(*since);
            nodes.push((*name).clone());
        }
    }
    let of_group = |((state, error), (since_ms, nodes)): ((i32, String), (u64, Vec<NodeName>))| {
        let state = pb::NodeState::try_from(state).unwrap_or_default();
        let finding = of_state(state, &error, nodes)?;
        Some(Broken::of_nodes(finding.to_wire()).since(since_ms))
    };
    groups.into_iter().filter_map(of_group).collect()
}

/// Returns the names of all nodes, sorted.
fn names_of(snapshot: &Snapshot<'_>) -> Vec<NodeName> {
    snapshot.nodes().map(|(name, _)| name.clone()).collect()
}
