//! The task: looks every few seconds, and writes what is to be said.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::time::{MissedTickBehavior, interval, sleep};
use tracing::{debug, warn};

use super::announce::Announcer;
use super::limits::Queue;
use super::write::{CREATE, Unwritten, Writer};
use super::{Event, NodePicture, Picture};
use crate::hub::Hub;
use crate::k8s::{Kind, ObjectId, Uid};
use crate::kubernetes::{Api, Failure};

/// How often the state is looked at.
const LOOK: Duration = Duration::from_secs(5);
/// Least time between two requests: five a second.
const PACE: Duration = Duration::from_millis(200);
/// Wait before an event is tried again, and how often: two minutes in all, as client-go does.
const RETRY: Duration = Duration::from_secs(10);
const TRIES: u32 = 12;
/// Without the permission to write events nothing is tried for so long.
const FORBIDDEN_FOR: Duration = Duration::from_secs(300);

/// Whose events this process writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// A control plane: of everything.
    Cluster,
    /// A standalone agent: of its node, and of Services on it. What is wrong with the input every
    /// other one sees as well, and thousands would say it at once.
    Node,
}

/// Writes events about the state of `hub` until it is shut down.
pub async fn run(hub: Arc<Hub>, api: Arc<Api>, scope: Scope) {
    let machine = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let task = Task {
        announcer: Announcer::new(scope == Scope::Cluster),
        writer: Writer::new(api, machine.trim()),
        queue: Queue::default(),
        tries: 0,
        paused_until: Instant::now(),
        complained: Complained::default(),
        hub: Arc::clone(&hub),
    };
    tokio::select! {
        () = task.run() => {}
        () = hub.shutdown.cancelled() => {}
    }
}

/// What the log has been told, so that it is told once.
#[derive(Debug, Default)]
struct Complained {
    dropped: bool,
    unwritten: bool,
}

struct Task {
    hub: Arc<Hub>,
    announcer: Announcer,
    writer: Writer,
    queue: Queue,
    /// Attempts at the event at the front.
    tries: u32,
    paused_until: Instant,
    complained: Complained,
}

impl Task {
    async fn run(mut self) {
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let wait = self.paused_until.saturating_duration_since(Instant::now());
            let has_work = !self.queue.is_empty();
            tokio::select! {
                _ = look.tick() => self.look(),
                () = sleep(wait.max(PACE)), if has_work => self.write_one().await,
            }
        }
    }

    fn look(&mut self) {
        // Before that it is not known which nodes exist.
        if !self.hub.store.head().borrow().synced {
            return;
        }
        let picture = picture(&self.hub);
        let now = Instant::now();
        for event in self.announcer.step(&picture, SystemTime::now()) {
            self.queue.push(event, now);
        }
        if self.queue.dropped > 0 && !std::mem::replace(&mut self.complained.dropped, true) {
            warn!(
                dropped = self.queue.dropped,
                "more events than are written: the rest is left out, here and from now on"
            );
        }
    }

    async fn write_one(&mut self) {
        let Some(event) = self.queue.pop() else {
            return;
        };
        let uid = match self.uid(&event).await {
            // What was wrong with it is of no interest any more.
            None if event.object.kind == Kind::Service && !event.reason.is_warning() => return,
            uid => uid,
        };
        match self.writer.write(&event, uid).await {
            Ok(()) => {
                debug!(object = ?event.object, reason = event.reason.as_str(), "event written");
                self.tries = 0;
                self.complained.unwritten = false;
            }
            Err(Unwritten::Refused(asked, failure)) => {
                self.tries = 0;
                // A namespace that goes away takes no more events: that is no lack of permission.
                let forbidden = matches!(&failure, Failure::Forbidden(why) if !why.contains("being terminated"));
                if forbidden {
                    self.paused_until = Instant::now() + FORBIDDEN_FOR;
                    self.complain(&failure.explain(asked));
                } else {
                    debug!(failure = failure.explain(asked), "event refused");
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
                }
            }
        }
    }

    /// Once until it works again: events are not worth more.
    fn complain(&mut self, problem: &str) {
        if !std::mem::replace(&mut self.complained.unwritten, true) {
            warn!(
                problem,
                needed = %CREATE,
                "Kubernetes events cannot be written; nothing else is affected. --events=false does without"
            );
        }
    }

    /// The identity of the object, unless nothing is known of it (any more).
    async fn uid(&self, event: &Event) -> Option<Uid> {
        let object = &event.object;
        let id = ObjectId {
            kind: object.kind,
            namespace: object.namespace.clone(),
            name: object.name.clone(),
        };
        self.hub.uid(id).await.ok().flatten()
    }
}

fn picture(hub: &Hub) -> Picture {
    let summary = hub.summary().borrow().clone();
    let mut picture = Picture {
        issues: Arc::clone(&summary.issues),
        held: summary.held.clone(),
        ..Picture::default()
    };
    for (name, facts) in hub.store.nodes() {
        let node = NodePicture {
            known: facts.known,
            agent: None,
        };
        picture.nodes.insert(name, node);
    }
    for (name, record) in hub.fleet.records() {
        picture.nodes.entry(name).or_default().agent = Some(record);
    }
    picture
}
