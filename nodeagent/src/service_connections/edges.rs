//! Who began connections, through which ServicePort and to which endpoint, in the last hour (`--flows`). Pure.
//!
//! An edge has slots of a minute for the last ten minutes, and of ten minutes before: 16 at most, of 32 bytes each. 10,000 edges take 8 MB at
//! most, whatever strangers send. Edges that are known go on to count when there is no room for new ones.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use kplane_dataplane::beginnings::{Ending, Reported};
use kplane_model::ServiceKey;
use kplane_proto::ranking::by_turns;

/// Maximum number of edges with a client. A million forged source addresses fill this, and no more.
const CLIENTS: usize = 9_000;
/// Maximum number of edges of one ServicePort, and of one client: the rest is for others. A flood through one Service, or of
/// one Pod through all of them, hides nobody else.
const SHARE: usize = CLIENTS / 3;
/// Maximum number of edges for clients without room, one for each ServicePort and endpoint.
const OTHERS: usize = 1_000;
/// Number of the latest minutes that have slots of their own, and number of minutes in an older slot.
const FINE: u32 = 10;
/// Longest time that is kept, in minutes.
const KEPT: u32 = 60;

/// The identity of an edge.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EdgeKey {
    /// The ServicePort.
    pub port: ServiceKey,
    /// Address of the client; `None` = clients for which there was no room.
    pub client: Option<IpAddr>,
    /// The endpoint, or the node's userspace proxy.
    pub endpoint: SocketAddr,
}

/// The counts of an edge. Nothing overflows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EdgeCounts {
    /// Connections that began.
    pub begun: u32,
    /// Connections that ended without ever being established.
    pub failed: u32,
    /// Established connections that one side ended by RST.
    pub reset: u32,
    /// Bytes to the endpoint and to the client of connections that ended, where the kernel counts them.
    pub bytes: [u64; 2],
}

impl EdgeCounts {
    /// Returns what one report counts for.
    fn of(reported: &Reported) -> Self {
        let Some(ending) = reported.ending else {
            return Self {
                begun: 1,
                ..Self::default()
            };
        };
        let traffic = reported.connection.traffic;
        Self {
            begun: 0,
            failed: (ending == Ending::Failed).into(),
            reset: (ending == Ending::Reset).into(),
            bytes: traffic.map_or([0; 2], |ways| ways.map(|way| way.bytes)),
        }
    }

    fn add(&mut self, more: &Self) {
        self.begun = self.begun.saturating_add(more.begun);
        self.failed = self.failed.saturating_add(more.failed);
        self.reset = self.reset.saturating_add(more.reset);
        for (sum, bytes) in self.bytes.iter_mut().zip(more.bytes) {
            *sum = sum.saturating_add(bytes);
        }
    }
}

/// The counts of some minutes.
#[derive(Debug)]
struct TimeSlot {
    /// The first minute.
    start: u32,
    counts: EdgeCounts,
}

/// Counts by time, oldest first.
#[derive(Debug, Default)]
struct History(Vec<TimeSlot>);

impl History {
    fn add(&mut self, minute: u32, counts: &EdgeCounts) {
        match self.0.last_mut() {
            Some(slot) if slot.start == minute => slot.counts.add(counts),
            _ => self.0.push(TimeSlot {
                start: minute,
                counts: *counts,
            }),
        }
    }

    /// Forgets what is too old, and joins older minutes. Returns whether anything is left.
    fn age(&mut self, now: u32) -> bool {
        let oldest = boundary(now.saturating_sub(KEPT), now);
        self.0.retain(|slot| slot.start >= oldest);
        for slot in &mut self.0 {
            slot.start = boundary(slot.start, now);
        }
        self.0.dedup_by(|later, earlier| {
            let same = later.start == earlier.start;
            if same {
                earlier.counts.add(&later.counts);
            }
            same
        });
        !self.0.is_empty()
    }

    /// Returns the end of the first slot since a minute; `None` if there is none.
    fn began_by(&self, minute: u32, now: u32) -> Option<Duration> {
        let first = self.0.iter().find(|slot| slot.start >= minute)?;
        let length = if first.start + FINE > now { 1 } else { FINE };
        Some(minutes(first.start + length))
    }

    fn since(&self, minute: u32) -> EdgeCounts {
        let mut sum = EdgeCounts::default();
        let slots = self.0.iter().filter(|slot| slot.start >= minute);
        slots.for_each(|slot| sum.add(&slot.counts));
        sum
    }
}

/// Returns the start of the slot that has a minute.
fn boundary(minute: u32, now: u32) -> u32 {
    if minute + FINE > now { minute } else { minute - minute % FINE }
}

/// The edges of a node. Times are since the count began, so that a clock that is set changes nothing.
#[derive(Debug, Default)]
pub(crate) struct Edges {
    edges: HashMap<EdgeKey, History>,
    shares: Shares,
    /// Connections for which there was no room at all.
    more: History,
    /// Times when the kernel dropped reports, and minutes in which it reported nothing, as `begun`.
    lost: History,
    now: u32,
}

/// How much of a table's room is taken, and by whom.
#[derive(Debug, Default)]
struct Shares {
    /// Number of edges with a client: of all, of each ServicePort, and of each client.
    clients: usize,
    of_port: HashMap<ServiceKey, usize>,
    of_client: HashMap<IpAddr, usize>,
    /// Number of edges without a client.
    others: usize,
}

impl Shares {
    /// Returns whether there is room for a new edge.
    fn has_room(&self, edge: &EdgeKey) -> bool {
        let Some(client) = edge.client else {
            return self.others < OTHERS;
        };
        let has_share = |edges: Option<&usize>| edges.is_none_or(|edges| *edges < SHARE);
        self.clients < CLIENTS
            && has_share(self.of_port.get(&edge.port))
            && has_share(self.of_client.get(&client))
    }

    /// Counts a new edge.
    fn take(&mut self, edge: &EdgeKey) {
        let Some(client) = edge.client else {
            self.others += 1;
            return;
        };
        self.clients += 1;
        *self.of_port.entry(edge.port.clone()).or_default() += 1;
        *self.of_client.entry(client).or_default() += 1;
    }
}

/// The sums of an edge, and the least time since the first report of its connections: counts know times by minutes.
pub type EdgeSum = (EdgeKey, EdgeCounts, Duration);

/// What an answer says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EdgeSums {
    /// Edges. However many of the first ones are kept, half are those with the most failures and half those with the most
    /// connections.
    pub edges: Vec<EdgeSum>,
    /// Connections of any ServicePort for which there was no room.
    pub more: u64,
    /// Those of them that failed.
    pub more_failed: u64,
    /// Times when the kernel dropped reports, and minutes in which it reported nothing.
    pub lost: u64,
    /// Time that the sums cover.
    pub covered: Duration,
}

impl Edges {
    /// Sets the time. Each minute it forgets what is too old.
    pub(crate) fn set_time(&mut self, now: Duration) {
        let now = minute(now);
        if now <= self.now {
            return;
        }
        self.now = now;
        self.edges.retain(|_, history| history.age(now));
        self.shares = Shares::default();
        self.edges.keys().for_each(|edge| self.shares.take(edge));
        self.more.age(now);
        self.lost.age(now);
    }

    /// Counts a report of a connection through a ServicePort.
    pub(crate) fn add(&mut self, port: &ServiceKey, reported: &Reported) {
        let counts = EdgeCounts::of(reported);
        let connection = &reported.connection;
        for client in [Some(connection.client.ip()), None] {
            let edge = self.edges.entry(EdgeKey {
                port: port.clone(),
                client,
                endpoint: connection.endpoint,
            });
            match edge {
                Entry::Occupied(mut known) => return known.get_mut().add(self.now, &counts),
                Entry::Vacant(new) if self.shares.has_room(new.key()) => {
                    self.shares.take(new.key());
                    return new.insert(History::default()).add(self.now, &counts);
                }
                Entry::Vacant(_) => {}
            }
        }
        self.more.add(self.now, &counts);
    }

    /// Records that reports are missing.
    pub(crate) fn lose(&mut self) {
        let once = EdgeCounts {
            begun: 1,
            ..EdgeCounts::default()
        };
        self.lost.add(self.now, &once);
    }

    /// Returns the sums of the ServicePorts that are wanted, since a time ago. It is rounded up to minutes, and to tens of
    /// minutes beyond ten.
    pub(crate) fn sums(
        &mut self,
        now: Duration,
        ago: Duration,
        wanted: impl Fn(&ServiceKey) -> bool,
    ) -> EdgeSums {
        self.set_time(now);
        let from = minute(now.saturating_sub(ago)).max(self.now.saturating_sub(KEPT));
        let from = boundary(from, self.now);
        let mut edges: Vec<EdgeSum> = self
            .edges
            .iter()
            .filter(|(key, _)| wanted(&key.port))
            .filter_map(|(key, history)| {
                let age = now.saturating_sub(history.began_by(from, self.now)?);
                Some((key.clone(), history.since(from), age))
            })
            .filter(|(_, counts, _)| *counts != EdgeCounts::default())
            .collect();
        edges.sort_unstable_by(|(a, ..), (b, ..)| a.cmp(b));
        by_turns(
            &mut edges,
            |(_, counts, _)| counts.begun.into(),
            |(_, counts, _)| counts.failed.into(),
        );
        let more = self.more.since(from);
        EdgeSums {
            edges,
            more: more.begun.into(),
            more_failed: more.failed.into(),
            lost: self.lost.since(from).begun.into(),
            covered: now.saturating_sub(minutes(from)),
        }
    }
}

fn minutes(number: u32) -> Duration {
    Duration::from_secs(u64::from(number) * 60)
}

fn minute(time: Duration) -> u32 {
    u32::try_from(time.as_secs() / 60).unwrap_or(u32::MAX - FINE)
}

#[cfg(test)]
mod tests;
