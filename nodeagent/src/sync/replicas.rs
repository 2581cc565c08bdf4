//! The replicas of the control plane, and the order in which the agent tries them. Pure.
//!
//! Every agent orders the replicas by a hash of its node and the replica's address (rendezvous
//! hashing). So agents spread evenly, and when a replica comes or goes, only its own agents move.
//! Replicas in the node's zone come first, and those in other zones last. Agents learn a replica's zone when
//! they connect to it. An agent at a replica in another zone tries those that it does not know yet.
//! A control plane also names replicas that the agent cannot find out yet. The agent tries all replicas in this order without a pause: a round. Names are resolved again for
//! each round, and rounds are apart by a growing random time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use kplane_dataplane::backoff::Backoff;
use kplane_model::{Digest, NodeName, ObjectHash, chance};
use kplane_util::dial::MAX_ADDRESSES;
use tokio::time::Instant;

use super::older::Older;
use super::transport::{Found, OpenError, Replica};

/// First and longest upper bound of the wait before another round.
const RECONNECT: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));

/// Age of a replica's data from which the agent looks for a replica with newer data. Control planes are in
/// touch with their sources every 10 s at least and say so every 5 s, so agents leave one that is cut off
/// within 20 s.
pub(super) const CUT_OFF: Duration = Duration::from_secs(13);

/// First and longest time for which the agent stays with the freshest of several replicas that are all cut
/// off, before it asks the others again.
const STAY: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(120));

/// Greatest age of data that makes a difference.
const OLDEST: Duration = Duration::from_secs(24 * 3_600);

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
    /// The replicas that a control plane named last.
    named: Vec<Replica>,
    /// The replicas that this round has not tried yet.
    round: VecDeque<Replica>,
    /// The replica that was tried last, or has the stream.
    current: Option<Replica>,
    /// Replicas that asked the agent to stay away, and until when.
    resting: BTreeMap<Replica, Instant>,
    /// Replicas that said that they are cut off from their source.
    cut_off: BTreeMap<Replica, CutOff>,
    /// Replicas that gave the agent no stream when they were last asked, and when that was.
    failed: BTreeMap<Replica, Instant>,
    /// The time for which the agent stays with a replica that is cut off.
    stay: Duration,
    /// All replicas were cut off when they were last asked.
    settled: bool,
    /// Whether replicas that the agent has connected to are in the node's zone, as far as they said so.
    in_zone: BTreeMap<Replica, Option<bool>>,
    older: Older,
    backoff: Backoff,
}

/// A replica that was cut off from its source when it was asked.
#[derive(Clone, Copy, Debug)]
struct CutOff {
    /// The time up to which its data was current.
    current_at: Instant,
    /// The time at which it said so.
    said_at: Instant,
}

impl Replicas {
    /// Creates the replicas of a node's agent; none is known yet.
    pub(super) fn new(node: NodeName) -> Self {
        Self {
            node,
            known: Vec::new(),
            named: Vec::new(),
            round: VecDeque::new(),
            current: None,
            resting: BTreeMap::new(),
            cut_off: BTreeMap::new(),
            failed: BTreeMap::new(),
            stay: STAY.0,
            settled: false,
            in_zone: BTreeMap::new(),
            older: Older::default(),
            backoff: RECONNECT,
        }
    }

    /// Takes the replicas that were found and begins a round. A URL that leads nowhere now leads where
    /// it led before. Returns the failures.
    pub(super) fn begin_round(&mut self, found: Vec<Found>, now: Instant) -> Vec<OpenError> {
        let failures = self.learn(found);
        let order = self.order();
        self.resting.retain(|replica, until| order.contains(replica) && *until > now);
        self.cut_off.retain(|replica, _| order.contains(replica));
        self.failed.retain(|replica, _| order.contains(replica));
        self.older.retain(|replica| order.contains(replica));
        self.in_zone.retain(|replica, _| order.contains(replica));
        let mut round = order;
        round.retain(|replica| !self.resting.contains_key(replica));
        // The replica whose stream has just ended is the one most likely to be gone.
        round.sort_by_key(|replica| Some(*replica) == self.current);
        round.sort_by_key(|replica| {
            let cut_off = self.known_cut_off(*replica, now);
            cut_off.map(|cut_off| Reverse(cut_off.current_at))
        });
        self.round = round.into();
        failures
    }

    /// Takes the replicas that were found; returns the failures.
    fn learn(&mut self, found: Vec<Found>) -> Vec<OpenError> {
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
        failures
    }

    /// Takes the replicas that were found, and returns the agent's favourite if the stream is with another one. A
    /// replica that wants to be left alone, or said that it is cut off, is no favourite.
    pub(super) fn favourite_elsewhere(
        &mut self,
        found: Vec<Found>,
        now: Instant,
    ) -> Option<Replica> {
        self.learn(found);
        let rests = |replica: &Replica| self.resting.get(replica).is_some_and(|at| *at > now);
        let mut order = self.order().into_iter();
        let is_cut_off = |replica: &Replica| self.known_cut_off(*replica, now).is_some();
        let favourite = order.find(|replica| !rests(replica) && !is_cut_off(replica))?;
        let place = self.current.map(|current| current.place);
        (place != Some(favourite.place)).then_some(favourite)
    }

    /// Takes the addresses of replicas that the current replica, or the last one, names. They have the same credentials as
    /// this one. Texts that are no addresses are left out.
    pub(super) fn named(&mut self, places: &[String]) {
        let current = self.current.filter(|current| current.place.is_some());
        if places.is_empty() {
            return;
        }
        let Some(current) = current else {
            return;
        };
        let places = places.iter().take(MAX_ADDRESSES).filter_map(|place| place.parse().ok());
        let named = places.map(|place| Replica {
            place: Some(place),
            ..current
        });
        self.named = named.collect();
    }

    /// Returns all replicas: those to which URLs lead, and the other ones that were named.
    fn all(&self) -> impl Iterator<Item = Replica> + Clone {
        let known = self.known.iter().flatten();
        let is_new =
            |one: &&Replica| self.known.iter().flatten().all(|other| other.place != one.place);
        known.chain(self.named.iter().filter(is_new)).copied()
    }

    /// Returns whether any replica is known.
    pub(super) fn any(&self) -> bool {
        self.known.iter().any(|known| !known.is_empty())
    }

    /// Returns the replica that was tried last, or has the stream.
    pub(super) fn current(&self) -> Option<Replica> {
        self.current
    }

    /// Returns the addresses of all known replicas.
    pub(super) fn places(&self) -> BTreeSet<SocketAddr> {
        self.all().filter_map(|replica| replica.place).collect()
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
        if sent_away && self.has_other(now) { Duration::ZERO } else { self.pause(now) }
    }

    /// Records whether the current replica gave the agent a stream.
    pub(super) fn answered(&mut self, with_stream: bool, now: Instant) {
        if let Some(current) = self.current {
            self.failed.remove(&current);
            if !with_stream {
                self.failed.insert(current, now);
            }
        }
    }

    /// Records whether the current replica is in the node's zone, as far as it says so.
    pub(super) fn says_zone(&mut self, same: Option<bool>) {
        if let Some(current) = self.current {
            self.in_zone.insert(current, same);
        }
    }

    /// Returns whether the current replica is in another zone than the node, and one that the agent does not know yet
    /// may be in the same.
    pub(super) fn seeks_zone(&self) -> bool {
        let elsewhere = |at| self.in_zone.get(&at) == Some(&Some(false));
        self.current.is_some_and(elsewhere)
            && self.all().any(|one| !self.in_zone.contains_key(&one))
    }

    /// Records that the stream lived long enough for the next pause to be short.
    pub(super) fn healthy(&mut self) {
        self.backoff.reset();
    }

    /// Records that the current replica wants to be left alone for a time. Up to half of it is added.
    pub(super) fn rest(&mut self, time: Duration, now: Instant) {
        let time = time + chance::between(Duration::ZERO, time / 2);
        if let Some(current) = self.current {
            self.resting.insert(current, now + time);
        }
    }

    /// Returns whether there is a replica other than the current one that the agent may try.
    fn has_other(&self, now: Instant) -> bool {
        self.others(now).next().is_some()
    }

    fn others(&self, now: Instant) -> impl Iterator<Item = Replica> {
        let rests = move |replica: &Replica| self.resting.get(replica).is_some_and(|at| *at > now);
        self.all()
            .filter(|replica| self.current.is_none_or(|at| at.place != replica.place))
            .filter(move |replica| !rests(replica))
    }

    /// Records the age of the current replica's data; returns whether to leave it. The agent leaves a
    /// replica that is cut off for one that may be in touch, or whose data is clearly newer. If all are cut
    /// off, or give it no stream, it stays with the freshest, and asks the others again after a growing time.
    pub(super) fn leaves(&mut self, age: Duration, now: Instant) -> bool {
        let Some(current) = self.current else {
            return false;
        };
        if age < CUT_OFF {
            self.cut_off.remove(&current);
            self.stay = STAY.0;
            self.settled = false;
            return false;
        }
        let ours = CutOff {
            current_at: now - age.min(OLDEST),
            said_at: now,
        };
        self.cut_off.insert(current, ours);
        let better = |other| {
            let failed = self.failed.get(&other);
            let is_useless = failed.is_some_and(|at| now - *at < self.stay);
            let theirs = self.known_cut_off(other, now);
            !is_useless
                && theirs.is_none_or(|theirs| theirs.current_at >= ours.current_at + CUT_OFF)
        };
        let leaves = self.others(now).any(better);
        if leaves {
            let stay = self.stay;
            self.cut_off.retain(|_, known| now - known.said_at < stay);
            if self.settled {
                self.stay = STAY.1.min(2 * stay);
            }
        }
        self.settled = !leaves;
        leaves
    }

    /// Returns what a replica said of being cut off, if that was not long ago.
    fn known_cut_off(&self, replica: Replica, now: Instant) -> Option<CutOff> {
        let known = self.cut_off.get(&replica).copied();
        known.filter(|known| now - known.said_at < self.stay)
    }

    /// Records that the current replica shows an older state than the node holds. `in_touch` says whether
    /// the replica is in touch with its source.
    pub(super) fn shows_older(&mut self, in_touch: bool, now: Instant) {
        if let Some(current) = self.current {
            self.older.shown(current, in_touch, now);
        }
    }

    /// Records that the node took an update of the current replica.
    pub(super) fn taken(&mut self) {
        self.older.taken();
    }

    /// Returns whether the node takes an older state, because all replicas show one.
    pub(super) fn believes_older(&self, now: Instant) -> bool {
        let rests = self.resting.values().any(|until| *until > now);
        !rests && self.older.is_believed(now)
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
        let mut order: Vec<_> = self.all().filter(|replica| places.insert(replica.place)).collect();
        order.sort_by_cached_key(|replica| {
            let in_zone = self.in_zone.get(replica).copied().flatten();
            let distance = match in_zone {
                Some(true) => 0,
                None => 1,
                Some(false) => 2,
            };
            (distance, score(&self.node, replica))
        });
        order
    }
}

/// Returns the rank of a replica for a node; the smallest is the favourite.
fn score(node: &NodeName, replica: &Replica) -> [u8; 16] {
    let mut score = Digest::default();
    score.add(ObjectHash::of(format!("{node} {replica}").as_bytes()));
    score.to_bytes()
}

#[cfg(test)]
mod tests;
