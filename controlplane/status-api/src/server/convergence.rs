//! How far the newest state of one Service has come in the fleet. Computed on request from the agents' latest reports
//! and the store, so that it costs nothing when nobody asks.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kplane_agents::fleet::Durations;
use kplane_agents::hub::{Hub, ReplicaInfo};
use kplane_agents::peers::{Collected, Peers};
use kplane_desired_state::publish::Followed;
use kplane_desired_state::trust::Trust;
use kplane_model::{NodeName, ServiceName};
use kplane_proto::v1 as pb;
use kplane_proto::v1::{LagState, ServiceState};
use tokio::sync::mpsc;
use tonic::Status;

use super::lag::Lag;
use super::millis;
use super::others::Others;
use super::pages::{Node, Snapshot};
use super::request::{WATCH_PAUSE, WATCH_REFRESH};
use super::service_on_node::{ServiceOnNode, Standings};

/// Maximum number of laggards in an answer.
const LISTED: usize = 20;
/// Longest reason in an answer, in bytes; agents send no longer ones.
const REASON_BYTES: usize = 300;
/// Share of the time that a watch may spend on its answers: one part in this many.
const SHARE: u32 = 10;

/// The counts over the fleet, and the nodes that lag.
#[derive(Debug, Default)]
struct Tally {
    nodes: u64,
    programmed: u64,
    verified: u64,
    laggards: Vec<pb::Laggard>,
}

impl Tally {
    /// Counts one node that must hold the Service.
    fn add(&mut self, node: &NodeName, service_on_node: ServiceOnNode) {
        let ServiceOnNode {
            lag,
            applied,
            verified,
            wanted,
            ..
        } = service_on_node;
        self.nodes += 1;
        self.programmed += u64::from(lag.is_none());
        let is_verified = lag.is_none() && verified >= wanted;
        self.verified += u64::from(is_verified);
        if is_verified {
            return;
        }
        let lag = lag.unwrap_or_else(|| Lag {
            state: LagState::Unverified,
            since_ms: 0,
            reason: format!("read back at revision {verified} of {wanted}"),
        });
        self.laggards.push(pb::Laggard {
            node: node.to_string(),
            state: lag.state.into(),
            since_ms: lag.since_ms,
            reason: cut(&lag.reason),
            revision: applied,
            wanted_revision: wanted,
        });
    }

    /// Returns the laggards that an answer lists, and the number of the others.
    fn laggards(mut self) -> (Vec<pb::Laggard>, u64) {
        let rank = |one: &pb::Laggard| {
            let unverified = one.state() == LagState::Unverified;
            (unverified, one.since_ms, one.node.clone())
        };
        self.laggards.sort_by_cached_key(rank);
        let omitted = self.laggards.len().saturating_sub(LISTED);
        self.laggards.truncate(LISTED);
        (self.laggards, omitted as u64)
    }
}

/// Returns whether a node counts: not if its Node object is gone, and its agent with it.
pub(super) fn counts(replica: &ReplicaInfo, node: &Node<'_>) -> bool {
    let exists = node.facts.as_ref().is_some_and(|facts| facts.known);
    exists || node.is_connected() || !replica.names_are_nodes()
}

/// Returns the durations that this replica measured of the newest change of a Service, up to this revision.
pub(super) fn durations(hub: &Hub, wanted: u64) -> Option<Durations> {
    let moment = if wanted > 0 { hub.store().moment_of(wanted) } else { None };
    hub.agents().timings.of_change(moment?.first)
}

/// Returns how far the newest state of a Service has come at this moment.
pub(super) fn convergence(
    hub: &Hub,
    followed: &mut Followed,
    others: &Collected,
) -> pb::Convergence {
    hub.store().follow(followed);
    let name = followed.service().clone();
    let (state, reason) = state(hub, followed);
    let snapshot = Snapshot::with(hub, others);
    let standings = Standings::new(hub, followed, others);
    let mut tally = Tally::default();
    // Revisions of other replicas do not compare with these.
    let mut wanted = 0;
    let counting = snapshot.nodes();
    for (node, state) in counting.filter(|(_, node)| counts(hub.replica(), node)) {
        wanted = wanted.max(hub.store().wanted_of_service(node, followed));
        tally.add(node, standings.of(node, state));
    }
    let moment = if wanted > 0 { hub.store().moment_of(wanted) } else { None };
    let mut durations = durations(hub, wanted).unwrap_or_default();
    standings.add_durations(&mut durations, others);
    let mut answer = pb::Convergence {
        namespace: name.namespace.to_string(),
        name: name.name.to_string(),
        state: state.into(),
        reason: cut(&reason),
        wanted_revision: wanted,
        changed_at_ms: moment.map_or(0, |moment| millis(moment.observed_at)),
        nodes: tally.nodes,
        programmed: tally.programmed,
        verified: tally.verified,
        durations: (durations.count() > 0).then(|| summary(&durations)),
        now_ms: millis(SystemTime::now()),
        missing_replicas: others.missing.clone(),
        nodes_incomplete: !others.missing.is_empty() && !hub.replica().names_are_nodes(),
        ..pb::Convergence::default()
    };
    (answer.laggards, answer.laggards_omitted) = tally.laggards();
    answer
}

/// Refuses a name of which no Service was served, unless the source may lack it.
pub(super) fn known(hub: &Hub, name: &ServiceName) -> Result<(), Status> {
    let mut followed = Followed::new(name.clone());
    hub.store().follow(&mut followed);
    match state(hub, &followed) {
        (ServiceState::Unknown, reason) => Err(Status::not_found(format!("{name}: {reason}"))),
        _ => Ok(()),
    }
}

/// Returns the state of a Service, and the reason if it is not served.
pub(super) fn state(hub: &Hub, followed: &Followed) -> (ServiceState, String) {
    if followed.is_served() {
        return (ServiceState::Served, String::new());
    }
    if followed.is_known() {
        let reason = "the Service is deleted, or has no ports any more".to_owned();
        return (ServiceState::Deleted, reason);
    }
    if !hub.store().head().borrow().synced {
        let reason = "the control plane has not read its source yet".to_owned();
        return (ServiceState::Uncertain, reason);
    }
    let name = followed.service();
    let refused = hub.issues().iter().find_map(|issue| {
        let object = &issue.object;
        let is_its = object.kind == "Service"
            && *object.namespace == *name.namespace
            && *object.name == *name.name;
        is_its.then(|| issue.reason.clone())
    });
    if let Some(reason) = refused {
        return (ServiceState::Unknown, reason);
    }
    match hub.store().trust() {
        Trust::Partial(doubt) => (
            ServiceState::Uncertain,
            format!("the source was not read completely: {doubt}"),
        ),
        Trust::Whole | Trust::Confirmed => (
            ServiceState::Unknown,
            "no Service of this name needs programming: it does not exist, or is headless or of type ExternalName"
                .to_owned(),
        ),
    }
}

fn cut(reason: &str) -> String {
    reason[..reason.floor_char_boundary(REASON_BYTES)].to_owned()
}

fn summary(durations: &Durations) -> pb::ChangeDurations {
    let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    pb::ChangeDurations {
        nodes: durations.count(),
        p50_ms: ms(durations.percentile(50)),
        p99_ms: ms(durations.percentile(99)),
        max_ms: ms(durations.longest()),
    }
}

/// Sends the convergence of a Service now and after each change, until the client has gone.
pub(super) async fn watch(
    hub: Arc<Hub>,
    name: ServiceName,
    peers: Option<Arc<Peers>>,
    outbox: mpsc::Sender<Result<pb::Convergence, Status>>,
) {
    let mut others = match Others::follow(peers.as_ref(), Some(name.clone())).await {
        Ok(others) => others,
        // The client may have gone.
        Err(status) => return drop(outbox.send(Err(status)).await),
    };
    let mut agents = hub.agents().changes();
    let mut head = hub.store().head();
    let mut summary = hub.index().summary();
    let mut followed = Followed::new(name);
    let mut last: Option<(pb::Convergence, Instant)> = None;
    loop {
        let started = Instant::now();
        let answer = convergence(&hub, &mut followed, &others.latest());
        let cost = started.elapsed();
        let is_news = last.as_ref().is_none_or(|(reported, at)| {
            at.elapsed() >= WATCH_REFRESH || !is_same(reported.clone(), &answer)
        });
        if is_news {
            last = Some((answer.clone(), Instant::now()));
            if outbox.send(Ok(answer)).await.is_err() {
                return;
            }
        }
        // A large fleet makes answers dear; then they come less often.
        tokio::time::sleep(WATCH_PAUSE.max(cost * SHARE)).await;
        let alive = tokio::select! {
            changed = agents.changed() => changed.is_ok(),
            changed = head.changed() => changed.is_ok(),
            changed = summary.changed() => changed.is_ok(),
            () = others.changed() => true,
            () = tokio::time::sleep(WATCH_REFRESH) => true,
            () = outbox.closed() => false,
            () = hub.shutdown().cancelled() => false,
        };
        if !alive {
            return;
        }
    }
}

/// Returns whether two answers differ in their time only.
fn is_same(mut reported: pb::Convergence, now: &pb::Convergence) -> bool {
    reported.now_ms = now.now_ms;
    reported == *now
}

#[cfg(test)]
mod tests;
