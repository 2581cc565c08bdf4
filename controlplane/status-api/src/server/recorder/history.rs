//! The history of one Service: what changed, and when each node had it.
//!
//! Revisions of replicas do not compare. Changes of two replicas are the same one if they have the same causes.

use kplane_agents::fleet::AgentRegistry;
use std::cmp::Reverse;
use std::time::SystemTime;

use kplane_agents::fleet::Reached;
use kplane_agents::hub::Hub;
use kplane_agents::peers::Peers;
use kplane_desired_state::recorder::Change;
use kplane_model::NodeName;
use kplane_proto::v1 as pb;

use super::super::millis;
use super::{limit, service_name, wire};

/// Number of changes in an answer, unless the question says otherwise, and the largest number.
const CHANGES: (usize, usize) = (20, 200);
/// Maximum number of nodes that an answer names.
const NAMED: usize = 5;

/// Returns the record of a Service, with the times of the agents of all replicas.
pub(super) async fn of_all(
    hub: &Hub,
    peers: Option<&Peers>,
    request: &pb::ServiceHistoryRequest,
) -> pb::ServiceHistory {
    let theirs = match peers {
        Some(peers) => peers.recorded(request).await,
        None => Default::default(),
    };
    let mut answer = of_own_agents(hub, request);
    for their in &theirs.0 {
        for change in &mut answer.changes {
            if let Some(same) = their.changes.iter().find(|other| is_same(change, other)) {
                add(change, same);
            }
        }
    }
    answer.missing_replicas = theirs.1;
    answer
}

/// Returns the record of a Service, with the times of this replica's agents.
pub(in crate::server) fn of_own_agents(
    hub: &Hub,
    request: &pb::ServiceHistoryRequest,
) -> pb::ServiceHistory {
    let Ok(name) = service_name(request) else {
        return pb::ServiceHistory::default();
    };
    let recorder = &hub.notices().recorder;
    let found = recorder.of(&name, limit(request.limit, CHANGES));
    let changes = found
        .changes
        .iter()
        .map(|change| of_change(hub.agents(), change, &request.node));
    pb::ServiceHistory {
        changes: changes.collect(),
        now_ms: millis(SystemTime::now()),
        since_ms: found.since_ms,
        older: found.older as u64,
        missing_replicas: Vec::new(),
    }
}

fn of_change(agents: &AgentRegistry, change: &Change, only: &str) -> pb::ServiceChange {
    let mut answer = pb::ServiceChange {
        revision: change.revision,
        observed_ms: change.observed_ms,
        published_ms: change.published_ms,
        single_nodes: change.revision > 0 && !change.shared,
        causes: change.causes.iter().map(|cause| wire::cause(cause)).collect(),
        indirect: change.indirect,
        ..pb::ServiceChange::default()
    };
    if change.revision == 0 {
        return answer;
    }
    let concerned = |node: &str| change.shared || has_endpoint(change, node);
    if only.is_empty() {
        let (mut slowest, mut waiting) = (Vec::new(), Vec::new());
        agents.reached(change.revision, |node, reached, applied| {
            if !concerned(node) {
                return;
            }
            answer.nodes += 1;
            let (at_ms, or_before) = match reached {
                Reached::At(at) => (at, false),
                Reached::By(at) => (at, true),
                Reached::NotYet => {
                    if waiting.len() < NAMED {
                        waiting.push(named(node, 0, false, applied));
                    }
                    return;
                }
            };
            count(&mut answer, at_ms);
            slowest.push((at_ms, or_before, applied, node.clone()));
        });
        slowest.sort_by_cached_key(|(at, _, _, node)| (Reverse(*at), node.clone()));
        slowest.truncate(NAMED);
        let slowest = slowest
            .iter()
            .map(|(at, before, applied, node)| named(node, *at, *before, *applied));
        (answer.slowest, answer.waiting) = (slowest.collect(), waiting);
    } else if let Some((reached, applied)) = agents.reached_by(only, change.revision)
        && concerned(only)
    {
        let node = NodeName::from(only);
        answer.nodes = 1;
        match reached {
            Reached::NotYet => answer.waiting.push(named(&node, 0, false, applied)),
            Reached::At(at) | Reached::By(at) => {
                count(&mut answer, at);
                let before = matches!(reached, Reached::By(_));
                answer.slowest.push(named(&node, at, before, applied));
            }
        }
    }
    answer
}

/// Returns whether an endpoint that changed is on a node. Those that a cause does not name may be on any.
fn has_endpoint(change: &Change, node: &str) -> bool {
    change.causes.iter().any(|cause| {
        let details = &cause.details;
        let mut endpoints = details.endpoints.iter();
        details.omitted > 0 || endpoints.any(|one| one.node.as_deref() == Some(node))
    })
}

/// Counts a node that holds a change since a time.
fn count(answer: &mut pb::ServiceChange, at_ms: u64) {
    answer.reached += 1;
    answer.first_ms = match answer.first_ms {
        0 => at_ms,
        first => first.min(at_ms),
    };
    answer.last_ms = answer.last_ms.max(at_ms);
}

fn named(node: &NodeName, at_ms: u64, or_before: bool, applied: u64) -> pb::NodeReached {
    pb::NodeReached {
        node: node.to_string(),
        at_ms,
        or_before,
        applied_revision: applied,
    }
}

/// Returns whether two replicas recorded the same change: the same objects in the same versions, or, if the source has no
/// versions, the same endpoints and fields.
fn is_same(one: &pb::ServiceChange, other: &pb::ServiceChange) -> bool {
    let has_versions =
        |change: &pb::ServiceChange| change.causes.iter().any(|cause| cause.version > 0);
    if !has_versions(one) {
        return one.causes == other.causes;
    }
    let id = |cause: &pb::ChangeCause| (cause.kind.clone(), cause.name.clone(), cause.version);
    let mut known = other.causes.iter().map(id);
    one.causes
        .iter()
        .any(|cause| cause.version > 0 && known.any(|known| known == id(cause)))
}

/// Adds the times of another replica's agents.
fn add(change: &mut pb::ServiceChange, other: &pb::ServiceChange) {
    change.nodes = change.nodes.saturating_add(other.nodes);
    change.reached = change.reached.saturating_add(other.reached);
    change.first_ms = match (change.first_ms, other.first_ms) {
        (0, first) | (first, 0) => first,
        (one, two) => one.min(two),
    };
    change.last_ms = change.last_ms.max(other.last_ms);
    // A node that moved to another replica has a record at both; the earlier time counts.
    change.slowest.extend(other.slowest.iter().cloned());
    change
        .slowest
        .sort_by_cached_key(|node| (Reverse(node.at_ms), node.node.clone()));
    change.waiting.extend(other.waiting.iter().cloned());
    change.slowest.truncate(NAMED);
    change.waiting.truncate(NAMED);
}
