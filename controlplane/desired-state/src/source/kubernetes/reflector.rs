//! A reflector: follows one kind of objects forever.
//!
//! ```text
//! Paging    -> Paging | Unwatched        a page; the last one, and the list is believed
//! Unwatched -> Watching | Paging         a watch is open; after a long outage a list is needed
//! Watching  -> Watching | Unwatched      an event; the watch ended
//! Watching  -> Paging                    410, the server went back in time, or a second list is due
//! any       -> Waiting -> Paging | Unwatched    a failure, or a list that is not believed
//! ```
//!
//! Known objects survive every failure. Only a watch event that names an object, or a list that is
//! believed ([`super::memory`]), removes one.

mod failing;
mod listing;
mod looking;

use std::time::{Duration, SystemTime};

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use self::looking::SecondLook;
use super::backoff::Backoff;
use super::gathering::{Gathering, located};
use super::memory::Memory;
use super::report::Reporter;
use super::resource::Resource;
use super::transport::{PageRequest, Transport, Watch, WatchEvent};
use crate::k8s::Kind;
use crate::kubernetes::Failure;
use crate::source::Event;

/// Number of objects of a page: 500 slices are 0.7 MB, or 10 MB when they are full.
const PAGE: u32 = 500;
/// Maximum number of events that are passed on at a time.
const CHUNK: usize = 1_024;
/// Silence after which a watch is probed: the server must be reachable, and not behind the known
/// state. Agents leave a replica that has not been in touch for 13 s, so this is well below that.
const PROBE_AFTER: Duration = Duration::from_secs(8);
/// Silence after which a watch is opened again. Servers send a bookmark every minute.
const WATCH_SILENCE: Duration = Duration::from_secs(75);
/// Minimum life of a watch that does not count as a failure.
const LIVELY: Duration = Duration::from_secs(1);
/// Length of an outage after which everything is listed: a backup may have been restored meanwhile,
/// and the server may have moved on beyond the known state.
const LONG_OUTAGE: Duration = Duration::from_secs(30);
/// Interval between two checks for a resource that the server does not have.
const ABSENT: Duration = Duration::from_secs(60);
/// Time after which a failing list of ServiceCIDRs no longer delays the start.
const OPTIONAL_AFTER: Duration = Duration::from_secs(30);

/// Events of one kind that came together.
#[derive(Debug)]
pub(super) struct KindEvents {
    pub(super) events: Vec<Event>,
    pub(super) at: SystemTime,
    /// The reason why unknown objects of the kind may exist, where that has changed.
    pub(super) doubt: Option<(Kind, Option<String>)>,
}

impl KindEvents {
    fn now(events: Vec<Event>) -> Self {
        Self {
            events,
            at: SystemTime::now(),
            doubt: None,
        }
    }
}

/// The consumer has gone.
#[derive(Debug)]
pub(super) struct Closed;

/// The state of a reflector.
#[derive(Debug)]
enum Phase<W> {
    Paging { list: Gathering, next: PageRequest },
    Unwatched,
    Watching(Watching<W>),
    Waiting { until: Instant, then: Then },
}

/// An open watch.
#[derive(Debug)]
struct Watching<W> {
    watch: W,
    opened_at: Instant,
    heard_at: Instant,
    probe_at: Instant,
    /// A probe failed: the connection of the watch may be dead as well.
    suspect: bool,
}

/// The step after a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    List,
    /// List, earlier if a second list is wanted.
    Look,
    Watch,
}

impl<W> Phase<W> {
    fn after(wait: Duration, then: Then) -> Self {
        Self::Waiting {
            until: Instant::now() + wait,
            then,
        }
    }
}

/// The reflector of one kind.
#[derive(Debug)]
pub(super) struct Reflector<T> {
    transport: T,
    kind: Kind,
    memory: Memory,
    backoff: Backoff,
    report: Reporter,
    outbox: mpsc::Sender<KindEvents>,
    /// The last watch ended because the server had compacted its start version.
    compacted: bool,
    /// Start of the time during which the server cannot be reached.
    outage_since: Option<Instant>,
    /// A complete list was passed on, possibly an empty one because the server has no such
    /// resource.
    synced: bool,
    started: Instant,
    second_look: SecondLook,
    /// The last doubt that was passed on.
    doubt: Option<String>,
}

impl<T: Transport> Reflector<T> {
    pub(super) fn new(transport: T, report: Reporter, outbox: mpsc::Sender<KindEvents>) -> Self {
        let kind = transport.resource().kind();
        Self {
            transport,
            kind,
            memory: Memory::new(kind),
            second_look: SecondLook::new(kind, report.looks()),
            doubt: None,
            backoff: Backoff::default(),
            report,
            outbox,
            compacted: false,
            outage_since: None,
            synced: false,
            started: Instant::now(),
        }
    }

    /// Runs until the consumer has gone.
    pub(super) async fn run(mut self) {
        let outbox = self.outbox.clone();
        tokio::select! {
            () = self.follow() => {}
            () = outbox.closed() => {}
        }
    }

    async fn follow(&mut self) {
        let mut state = self.list(PAGE);
        while let Ok(next) = self.step(state).await {
            state = next;
        }
    }

    async fn step(&mut self, state: Phase<T::Watch>) -> Result<Phase<T::Watch>, Closed> {
        match state {
            Phase::Paging { list, next } => self.page(list, next).await,
            Phase::Unwatched => self.open().await,
            Phase::Watching(watching) => self.watch(watching).await,
            Phase::Waiting { until, then } => {
                tokio::select! {
                    () = sleep_until(until) => {}
                    () = self.second_look.due(), if then == Then::Look => {}
                }
                Ok(match then {
                    Then::List | Then::Look => self.list(PAGE),
                    Then::Watch => Phase::Unwatched,
                })
            }
        }
    }

    async fn open(&mut self) -> Result<Phase<T::Watch>, Closed> {
        let outage = self.outage_since.map(|since| since.elapsed());
        if outage.is_some_and(|outage| outage >= LONG_OUTAGE) {
            return Ok(self.list(PAGE));
        }
        match self.transport.watch(self.memory.seen()).await {
            Ok(watch) => {
                let mut watching = Watching::new(watch);
                if self.outage_since.is_some() || self.report.is_troubled() {
                    // After an outage, another server may answer than before.
                    watching.probe_at = Instant::now();
                }
                Ok(Phase::Watching(watching))
            }
            Err(failure) => self.failed("watch", failure, Then::Watch).await,
        }
    }

    async fn watch(&mut self, mut watching: Watching<T::Watch>) -> Result<Phase<T::Watch>, Closed> {
        let silent_at = watching.heard_at + WATCH_SILENCE;
        let said = tokio::select! {
            biased;
            // The list also contains the pending events of the watch.
            () = self.second_look.due() => return Ok(self.list(PAGE)),
            said = watching.watch.next() => Some(said),
            () = sleep_until(watching.probe_at.min(silent_at)) => None,
        };
        match said {
            None if Instant::now() >= silent_at => {
                self.report.failure(&Failure::Silent(WATCH_SILENCE));
                Ok(Phase::Unwatched)
            }
            None => self.probe(watching).await,
            Some(said) => self.received(watching, said).await,
        }
    }

    async fn received(
        &mut self,
        watching: Watching<T::Watch>,
        said: Result<Option<Vec<WatchEvent>>, Failure>,
    ) -> Result<Phase<T::Watch>, Closed> {
        match said {
            Ok(Some(said)) => self.heard(watching, said).await,
            Ok(None) if watching.opened_at.elapsed() >= LIVELY => Ok(Phase::Unwatched),
            Ok(None) => {
                let failure = Failure::Broken("closed at once".to_owned());
                self.failed("watch", failure, Then::Watch).await
            }
            Err(failure) => self.failed("watch", failure, Then::Watch).await,
        }
    }

    /// Handles events of a watch.
    async fn heard(
        &mut self,
        mut watching: Watching<T::Watch>,
        said: Vec<WatchEvent>,
    ) -> Result<Phase<T::Watch>, Closed> {
        let mut events = Vec::with_capacity(said.len());
        let versions = self.memory.versions();
        for one in said {
            if let WatchEvent::Bookmark(version) = one
                && version < self.memory.seen()
            {
                self.tell(events).await?;
                return Ok(self.went_back(version));
            }
            events.extend(self.change(one));
        }
        self.backoff.reset();
        self.compacted = false;
        let now = Instant::now();
        watching.heard_at = now;
        watching.suspect = false;
        if self.outage_since.is_none() {
            watching.probe_at = now + PROBE_AFTER;
        }
        self.report.current(now);
        if self.memory.versions() != versions {
            events.push(self.version());
        }
        self.tell(events).await?;
        self.tell_doubt().await?;
        Ok(Phase::Watching(watching))
    }

    /// Applies one event of a watch. A replay changes nothing.
    fn change(&mut self, said: WatchEvent) -> Option<Event> {
        let version = said.version();
        let seen = self.memory.seen();
        // Legacy Endpoints become several slices of the same version.
        let several = *self.transport.resource() == Resource::Endpoints;
        if version < seen || (version == seen && !several) {
            self.report.replay();
            return None;
        }
        match said {
            WatchEvent::Bookmark(_) => self.memory.advance(version),
            _ => self.memory.change(version),
        }
        match said {
            WatchEvent::Put(object, _) => {
                self.memory.put(&object);
                self.report.event(Some(&object.id()));
                Some(Event::Apply(located(object)))
            }
            WatchEvent::Gone(id, _) => {
                self.memory.gone(&id);
                self.report.event(Some(&id));
                Some(Event::Delete(id))
            }
            WatchEvent::Unreadable(unreadable, _) => {
                self.report.event(None);
                self.report.unreadable(unreadable);
                None
            }
            WatchEvent::Bookmark(_) => None,
        }
    }

    /// Checks whether the server answers, and whether its state is as new as the known one.
    async fn probe(&mut self, mut watching: Watching<T::Watch>) -> Result<Phase<T::Watch>, Closed> {
        let seen = self.memory.seen();
        let least = PageRequest {
            limit: 1,
            next: None,
        };
        let probed = tokio::select! {
            biased;
            said = watching.watch.next() => Err(said),
            page = self.transport.page(&least) => Ok(page),
        };
        match probed {
            Err(said) => self.received(watching, said).await,
            Ok(Ok(page)) if page.version < seen => Ok(self.went_back(page.version)),
            Ok(Ok(_)) => {
                self.outage_since = None;
                self.backoff.reset();
                let now = Instant::now();
                self.report.current(now);
                watching.probe_at = now + PROBE_AFTER;
                Ok(if watching.suspect { Phase::Unwatched } else { Phase::Watching(watching) })
            }
            Ok(Err(failure)) => {
                watching.suspect = true;
                watching.probe_at = Instant::now() + self.note("list", &failure).await;
                Ok(Phase::Watching(watching))
            }
        }
    }

    /// Returns the event that all changes so far have been passed on.
    pub(super) fn version(&self) -> Event {
        Event::Version(self.kind, self.memory.versions())
    }

    fn went_back(&mut self, version: u64) -> Phase<T::Watch> {
        let seen = self.memory.seen();
        tracing::warn!(kind = %self.kind, seen, version, "the API server shows an older state than it did; listing again");
        Phase::after(self.backoff.next(), Then::List)
    }

    async fn tell(&mut self, events: Vec<Event>) -> Result<(), Closed> {
        let at = SystemTime::now();
        let mut events = events.into_iter();
        loop {
            let events: Vec<_> = events.by_ref().take(CHUNK).collect();
            if events.is_empty() {
                return Ok(());
            }
            let sent = KindEvents {
                at,
                ..KindEvents::now(events)
            };
            self.outbox.send(sent).await.map_err(|_| Closed)?;
        }
    }
}

impl<W> Watching<W> {
    fn new(watch: W) -> Self {
        let now = Instant::now();
        Self {
            watch,
            opened_at: now,
            heard_at: now,
            probe_at: now + PROBE_AFTER,
            suspect: false,
        }
    }
}

#[cfg(test)]
mod tests;
