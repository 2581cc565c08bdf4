//! The task that checks the state every few seconds, and writes the events that are due.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kplane_desired_state::k8s::{Kind, ObjectId, Uid};
use kplane_desired_state::kubernetes::{Api, Failure};
use tokio::time::{MissedTickBehavior, interval, sleep};
use tracing::{debug, warn};

use super::announce::Announcer;
use super::limits::Queue;
use super::write::{CREATE, Unwritten, Writer};
use super::{Event, NodeSnapshot, Snapshot};
use crate::hub::Hub;
use crate::peers::{Peers, Served};
use crate::traffic::{EventCounts, Fate};

/// Interval between two checks of the state.
const LOOK: Duration = Duration::from_secs(5);
/// Minimum time between two requests: five a second.
const PACE: Duration = Duration::from_millis(200);
/// Pause before an event is tried again, and the number of attempts: two minutes in all, as in
/// client-go.
const RETRY: Duration = Duration::from_secs(10);
const TRIES: u32 = 12;
/// Pause after the API server denied the permission to write events.
const FORBIDDEN_FOR: Duration = Duration::from_secs(300);

/// Interval between two questions to other replicas, while an agent is gone: half of the time after which that is an event.
const ASK: Duration = Duration::from_secs(30);

/// The scope of the events that this process writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventScope {
    /// The whole cluster: the scope of a control plane.
    Cluster,
    /// One node and Services on it: the scope of a standalone agent. Problems of the input are left
    /// out, because every other standalone agent sees them too, and thousands would write them at
    /// once.
    Node,
}

/// Writes events about the state of `hub` forever, and counts them.
pub async fn run(
    (hub, peers): (Arc<Hub>, Option<Arc<Peers>>),
    api: Arc<Api>,
    scope: EventScope,
    counts: Arc<EventCounts>,
) {
    let machine = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let task = Task {
        announcer: Announcer::new(scope == EventScope::Cluster),
        writer: Writer::new(api, machine.trim()),
        queue: Queue::default(),
        tries: 0,
        paused_until: Instant::now(),
        complained: Complained::default(),
        served: None,
        hub,
        peers,
        counts,
    };
    task.run().await;
}

/// Problems that were logged, so that each is logged once.
#[derive(Debug, Default)]
struct Complained {
    dropped: bool,
    unwritten: bool,
}

struct Task {
    hub: Arc<Hub>,
    /// The other replicas, if this one asks any.
    peers: Option<Arc<Peers>>,
    counts: Arc<EventCounts>,
    announcer: Announcer,
    writer: Writer,
    queue: Queue,
    /// Number of attempts to write the first event of the queue.
    tries: u32,
    paused_until: Instant,
    complained: Complained,
    /// The agents that other replicas served when they were last asked.
    served: Option<(Instant, Served)>,
}

impl Task {
    async fn run(mut self) {
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let wait = self.paused_until.saturating_duration_since(Instant::now());
            let has_work = !self.queue.is_empty();
            tokio::select! {
                _ = look.tick() => self.look().await,
                () = sleep(wait.max(PACE)), if has_work => self.write_one().await,
            }
        }
    }

    /// Asks other replicas whether they serve agents that are gone here, if there are any.
    async fn ask_others(&mut self) {
        let is_due = self.served.as_ref().is_none_or(|(at, _)| at.elapsed() >= ASK);
        let is_due = is_due && self.hub.agents().any_gone();
        if is_due && let Some(peers) = self.peers.as_ref() {
            let served = peers.served().await;
            self.served = Some((Instant::now(), served));
        }
    }

    async fn look(&mut self) {
        // Before the first complete snapshot, the existing nodes are unknown.
        if !self.hub.store().head().borrow().synced {
            return;
        }
        self.ask_others().await;
        let served = self.served.as_ref().map(|(_, served)| served);
        let snapshot = snapshot(&self.hub, served);
        let now = Instant::now();
        let dropped = self.queue.dropped;
        for event in self.announcer.step(&snapshot, now) {
            self.queue.push(event, now);
        }
        self.count(Fate::Dropped, self.queue.dropped - dropped);
        if self.queue.dropped > 0 && !std::mem::replace(&mut self.complained.dropped, true) {
            warn!(
                dropped = self.queue.dropped,
                "too many events; dropping some of them from now on"
            );
        }
    }

    async fn write_one(&mut self) {
        let Some(event) = self.queue.pop() else {
            return;
        };
        let uid = match self.uid(&event).await {
            // The object is gone, so the end of its problem is no longer relevant.
            None if event.object.kind == Kind::Service && !event.reason.is_warning() => return,
            uid => uid,
        };
        match self.writer.write(&event, uid).await {
            Ok(()) => {
                debug!(object = ?event.object, reason = event.reason.as_str(), "event written");
                self.count(Fate::Written, 1);
                self.tries = 0;
                self.complained.unwritten = false;
            }
            Err(Unwritten::Refused(asked, failure)) => {
                self.tries = 0;
                self.count(Fate::Refused, 1);
                // A namespace that is being deleted takes no more events. This is not a missing
                // permission.
                let forbidden = matches!(&failure, Failure::Forbidden(why) if !why.contains("being terminated"));
                if forbidden {
                    self.paused_until = Instant::now() + FORBIDDEN_FOR;
                    self.complain(&failure.explain(asked));
                } else {
                    debug!(
                        failure = failure.explain(asked),
                        "the API server refused an event"
                    );
                }
            }
            Err(Unwritten::Later(asked, failure)) => {
                self.complain(&failure.explain(asked));
                self.paused_until = Instant::now() + RETRY;
                self.tries += 1;
                if self.tries < TRIES {
                    self.queue.put_back(event);
                } else {
                    self.tries = 0;
                    self.count(Fate::Failed, 1);
                }
            }
        }
    }

    fn count(&self, fate: Fate, events: u64) {
        self.counts.add(fate, events);
    }

    /// Logs a problem once until writing succeeds again.
    fn complain(&mut self, problem: &str) {
        if !std::mem::replace(&mut self.complained.unwritten, true) {
            warn!(
                problem,
                needed = %CREATE,
                "cannot write Kubernetes events; nothing else is affected. --events=false turns \
                 events off"
            );
        }
    }

    /// Returns the UID of the event's object, if known.
    async fn uid(&self, event: &Event) -> Option<Uid> {
        let object = &event.object;
        let id = ObjectId {
            kind: object.kind,
            namespace: object.namespace.clone(),
            name: object.name.clone(),
        };
        let uid = self.hub.index().look(move |index| index.uid(&id));
        uid.await.ok().flatten()
    }
}

/// Returns the present state. Only the replica that serves a node reports on its agent.
fn snapshot(hub: &Hub, served: Option<&Served>) -> Snapshot {
    let mut snapshot = Snapshot {
        issues: hub.issues(),
        held: hub.index().summary().borrow().held.clone(),
        departures: hub.streams().departures.latest(),
        ..Snapshot::default()
    };
    let suspicions = hub.suspects().now();
    for (name, facts) in hub.store().nodes() {
        let node = NodeSnapshot {
            known: facts.known,
            agent: None,
            suspected: suspicions.nodes.get(&name).map(|suspicion| {
                let ends = suspicions.dead.contains(&name);
                let effect = if ends { ", and connections to its endpoints end" } else { "" };
                format!("{suspicion}{effect}")
            }),
        };
        snapshot.nodes.insert(name, node);
    }
    for (name, record) in hub.agents().records() {
        if record.connected || !served.is_some_and(|served| served.may_have(&name)) {
            snapshot.nodes.entry(name).or_default().agent = Some(record);
        }
    }
    snapshot
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::fleet::Session;

    #[test]
    fn an_agent_that_moved_is_the_business_of_its_new_replica() {
        let hub = Hub::sample(1, "test");
        let _here = Session::sample(&hub, "here");
        drop(Session::sample(&hub, "gone"));
        let agents = |served: Option<&Served>| {
            snapshot(&hub, served)
                .nodes
                .into_iter()
                .filter(|(_, node)| node.agent.is_some())
                .map(|(name, _)| name.to_string())
                .collect::<Vec<_>>()
        };
        let served = |nodes: &[&str], incomplete| Served {
            nodes: nodes.iter().map(|node| (*node).into()).collect::<BTreeSet<_>>(),
            incomplete,
        };
        assert_eq!(agents(None), ["gone", "here"]);
        assert_eq!(agents(Some(&served(&[], false))), ["gone", "here"]);
        assert_eq!(agents(Some(&served(&["gone", "here"], false))), ["here"]);
        assert_eq!(
            agents(Some(&served(&[], true))),
            ["here"],
            "it may be elsewhere"
        );
    }
}
