//! The replicas of the control plane, and the order in which the agent tries them. Pure.
//!
//! Every agent orders the replicas by a hash of its node and the replica's address (rendezvous
//! hashing). So agents spread evenly, and when a replica comes or goes, only its own agents move.
//! The agent tries all replicas in this order without a pause: a round. Names are resolved again for
//! each round, and rounds are apart by a growing random time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use kplane_dataplane::backoff::Backoff;
use kplane_model::{Digest, NodeName, ObjectHash};
use tokio::time::Instant;

use super::transport::OpenError;

/// First and longest upper bound of the wait before another round.
const RECONNECT: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));

/// A replica of the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Replica {
    /// Its address; `None` = in the same process.
    pub place: Option<SocketAddr>,
    /// The index of the configured URL that led to it.
    pub url: usize,
}

/// The replicas to which one URL leads, or the reason why that is not known.
pub type Found = Result<Vec<Replica>, OpenError>;

/// The next step of an agent without a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Connect to a replica.
    Try(Replica),
    /// Begin another round after a time.
    Wait(Duration),
}

/// All known replicas.
#[derive(Debug)]
pub(super) struct Replicas {
    node: NodeName,
    /// The replicas to which each URL last led.
    known: Vec<Vec<Replica>>,
    /// The replicas that this round has not tried yet.
    round: VecDeque<Replica>,
    /// The replica that was tried last, or has the stream.
    current: Option<Replica>,
    /// Replicas that asked the agent to stay away, and until when.
    resting: BTreeMap<Replica, Instant>,
    backoff: Backoff,
}

impl Replicas {
    /// Creates the replicas of a node's agent; none is known yet.
    pub(super) fn new(node: NodeName) -> Self {
        Self {
            node,
            known: Vec::new(),
            round: VecDeque::new(),
            current: None,
            resting: BTreeMap::new(),
            backoff: RECONNECT,
        }
    }

    /// Takes the replicas that were found and begins a round. A URL that leads nowhere now leads where
    /// it led before. Returns the failures.
    pub(super) fn begin_round(&mut self, found: Vec<Found>, now: Instant) -> Vec<OpenError> {
        let urls = self.known.len().max(found.len());
        self.known.resize(urls, Vec::new());
        let mut failures = Vec::new();
        for (known, found) in self.known.iter_mut().zip(found) {
            match found {
                Ok(replicas) if replicas.is_empty() => {}
                Ok(replicas) => *known = replicas,
                Err(failure) => failures.push(failure),
            }
        }
        let order = self.order();
        self.resting
            .retain(|replica, until| order.contains(replica) && *until > now);
        // The replica whose stream has just ended is the one most likely to be gone.
        let (last, first): (Vec<_>, Vec<_>) = order
            .into_iter()
            .filter(|replica| !self.resting.contains_key(replica))
            .partition(|replica| Some(*replica) == self.current);
        self.round = first.into_iter().chain(last).collect();
        failures
    }

    /// Returns whether any replica is known.
    pub(super) fn any(&self) -> bool {
        self.known.iter().any(|known| !known.is_empty())
    }

    /// Returns the addresses of all known replicas.
    pub(super) fn places(&self) -> BTreeSet<SocketAddr> {
        let known = self.known.iter().flatten();
        known.filter_map(|replica| replica.place).collect()
    }

    /// Returns the next replica of the round, or the wait until the next round.
    pub(super) fn next(&mut self, now: Instant) -> Next {
        if let Some(next) = self.round.pop_front() {
            self.current = Some(next);
            return Next::Try(next);
        }
        Next::Wait(self.pause(now))
    }

    /// Ends the round, because the stream of the current replica ended. Returns the wait until the next
    /// one: none if the replica sent the agent away and there is another.
    pub(super) fn ended(&mut self, sent_away: bool, now: Instant) -> Duration {
        self.round.clear();
        match sent_away && self.has_other(now) {
            true => Duration::ZERO,
            false => self.pause(now),
        }
    }

    /// Records that the stream lived long enough for the next pause to be short.
    pub(super) fn healthy(&mut self) {
        self.backoff.reset();
    }

    /// Records that the current replica wants to be left alone for a time. Up to half of it is added.
    pub(super) fn rest(&mut self, time: Duration, now: Instant) {
        let time = time + rand::random_range(Duration::ZERO..=time / 2);
        if let Some(current) = self.current {
            self.resting.insert(current, now + time);
        }
    }

    /// Returns whether there is a replica other than the current one that the agent may try.
    pub(super) fn has_other(&self, now: Instant) -> bool {
        let rests = |replica: &Replica| self.resting.get(replica).is_some_and(|at| *at > now);
        let mut known = self.known.iter().flatten();
        known.any(|replica| Some(*replica) != self.current && !rests(replica))
    }

    /// Returns the wait until the next round: until a replica may be tried, or else a random time whose
    /// bound grows.
    fn pause(&mut self, now: Instant) -> Duration {
        let all = self.order();
        let rests = all.iter().map(|replica| self.resting.get(replica));
        let first = rests.collect::<Option<Vec<_>>>();
        match first.and_then(|until| until.into_iter().min()) {
            Some(until) => until.saturating_duration_since(now),
            None => self.backoff.full_jitter(),
        }
    }

    /// Returns all replicas, each address once, the agent's favourite first.
    fn order(&self) -> Vec<Replica> {
        let mut places = BTreeSet::new();
        let known = self.known.iter().flatten().copied();
        let mut order: Vec<_> = known
            .filter(|replica| places.insert(replica.place))
            .collect();
        order.sort_by_cached_key(|replica| score(&self.node, replica));
        order
    }
}

/// Returns the rank of a replica for a node; the smallest is the favourite.
fn score(node: &NodeName, replica: &Replica) -> [u8; 16] {
    let mut score = Digest::default();
    score.add(ObjectHash::of(format!("{node} {replica}").as_bytes()));
    score.to_bytes()
}

impl fmt::Display for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Some(place) => write!(f, "{place}"),
            None => f.write_str("this process"),
        }
    }
}

#[cfg(test)]
mod tests;
