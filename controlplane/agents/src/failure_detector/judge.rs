//! Which nodes are dead, as far as their streams and their neighbours tell. Pure: time is an input.
//!
//! A node is *quiet* when its stream ended or carries nothing. Neighbours of a quiet node are asked in rounds whether
//! they reach it, and *witnesses* whether they are there at all. A round convicts the node if enough neighbours do not
//! reach it although each of them reaches another node, and if nearly all that were asked answered. One neighbour that
//! reaches the node, or its stream, acquits it at once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kplane_model::{NodeName, ZoneName};

use super::choose::{self, AskedNode, Neighbour};

/// A time, since any fixed moment.
pub(super) type Time = Duration;

/// Longest time to wait for the answers of a round: a neighbour tries for half a second.
pub(super) const ROUND: Duration = Duration::from_millis(900);
/// Number of neighbours that must not reach a node, if there are as many.
const ENOUGH: usize = 3;
/// Number of neighbours that must not reach a node in any cluster.
const FEWEST: usize = 2;
/// Part of those asked that may leave a round without an answer, as a divisor.
const SILENT: usize = 7;
/// Largest part of all nodes, or of a zone's, that may be suspected at a time, in percent.
const FEW: usize = 30;
/// Age from which a verdict stays and no longer counts among those: a machine that is off for good.
pub(super) const OLD: Duration = Duration::from_secs(300);
/// Time in which nodes that become quiet count as one event.
const AT_ONCE: Duration = Duration::from_secs(10);
/// Time between two looks after which this process itself was stopped.
const STOPPED: Duration = Duration::from_secs(1);
/// Time without convictions after this process was stopped: streams need it to tell what happened meanwhile.
const RECOVERS: Duration = Duration::from_secs(5);
/// Pause before a round without a result is repeated.
const AGAIN: Duration = Duration::from_millis(300);
/// Shortest and longest pause between two rounds about a node with a verdict. In between it is a part of the time for
/// which the node has been quiet.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));
/// The part, as a divisor.
const PACE: u32 = 10;
/// Number of pauses after which a verdict ends that no round confirms: without answers nobody is suspected.
const LASTS: u32 = 4;
/// Maximum number of nodes about which rounds are open at a time.
const ROUNDS: usize = 64;

/// The state of all streams at one moment.
#[derive(Debug, Default)]
pub(super) struct StreamSigns {
    /// Known nodes whose streams ended or are silent everywhere, and since when.
    pub(super) quiet: BTreeMap<NodeName, Time>,
    /// Number of nodes whose streams are alive, here or at other replicas.
    pub(super) alive: usize,
}

/// The answer of one node in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// The neighbour reaches the node.
    Reaches,
    /// The neighbour does not reach the node, and reaches another one.
    Misses,
    /// The neighbour answers, and its word about the node is worth nothing.
    Present,
}

/// Questions to the neighbours of one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) number: u64,
    pub(super) about: NodeName,
    pub(super) asked: Vec<AskedNode>,
}

/// A node that its neighbours do not reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Conviction {
    /// Time of the verdict.
    pub(super) at: Time,
    /// Time at which it ends unless a round confirms it.
    until: Time,
    /// Whether it was one of too many and no round has confirmed it since. It counts among them, and suspects nobody.
    is_held: bool,
    /// Number of neighbours that do not reach it, and of those that were asked.
    pub(super) missed: usize,
    pub(super) asked: usize,
}

#[derive(Debug)]
struct Open {
    number: u64,
    until: Time,
    asked: Vec<AskedNode>,
    words: BTreeMap<NodeName, Word>,
}

#[derive(Debug)]
struct Case {
    since: Time,
    zone: Option<ZoneName>,
    next: Time,
    open: Option<Open>,
    /// Whether the last round decided nothing.
    is_undecided: bool,
    conviction: Option<Conviction>,
}

/// Judges quiet nodes.
#[derive(Debug, Default)]
pub(super) struct Judge {
    cases: BTreeMap<NodeName, Case>,
    looked_at: Option<Time>,
    /// No node is convicted before this time.
    calm_at: Time,
    /// Number of known nodes with streams, alive or not.
    all: usize,
    /// Number of nodes in each zone with streams that are alive.
    zones: BTreeMap<ZoneName, usize>,
    /// Number of rounds so far.
    rounds: u64,
    /// The reason why nobody is suspected.
    pub(super) holds: Option<&'static str>,
}

impl Judge {
    /// Takes notice of the streams; returns the nodes about which neighbours are to be asked now.
    pub(super) fn look(&mut self, now: Time, signs: &StreamSigns) -> Vec<NodeName> {
        let stopped = self.looked_at.is_some_and(|at| now.saturating_sub(at) > STOPPED);
        self.looked_at = Some(now);
        if stopped {
            self.hold(
                now + RECOVERS,
                "this replica itself was stopped for a moment",
            );
        }
        self.all = signs.alive + signs.quiet.len();
        self.cases.retain(|node, _| signs.quiet.contains_key(node));
        for (node, since) in &signs.quiet {
            self.cases.entry(node.clone()).or_insert_with(|| Case {
                since: *since,
                zone: None,
                next: now,
                open: None,
                is_undecided: false,
                conviction: None,
            });
        }
        let mut recent = self.cases.values();
        let recent = recent.by_ref().filter(|case| now.saturating_sub(case.since) < AT_ONCE);
        if recent.count() > few(self.all) {
            self.hold(now + AT_ONCE, "many streams were lost at once");
        }
        if now < self.calm_at {
            return Vec::new();
        }
        self.holds = None;
        self.settle(now);
        if self.cases.values().all(|case| case.conviction.is_none())
            && self.cases.values().any(|case| case.is_undecided)
        {
            self.holds = Some("too few agents answer, or reach other nodes");
        }
        let open = self.cases.values().filter(|case| case.open.is_some());
        let room = ROUNDS.saturating_sub(open.count());
        self.cases
            .iter()
            .filter(|(_, case)| case.open.is_none() && case.next <= now)
            .take(room)
            .map(|(node, _)| node.clone())
            .collect()
    }

    /// Convicts nobody for a time, and acquits everybody whose verdict is not old.
    fn hold(&mut self, until: Time, reason: &'static str) {
        (self.calm_at, self.holds) = (until, Some(reason));
        let now = self.looked_at.unwrap_or_default();
        for case in self.cases.values_mut() {
            case.open = None;
            case.conviction.take_if(|conviction| conviction.is_new(now));
        }
    }

    /// Begins a round about a node. `neighbours`: all nodes whose streams are alive.
    pub(super) fn ask(
        &mut self,
        now: Time,
        about: &NodeName,
        zone: Option<&ZoneName>,
        neighbours: &[Neighbour],
    ) -> Option<Round> {
        self.zones.clear();
        for neighbour in neighbours {
            if let Some(zone) = &neighbour.zone {
                *self.zones.entry(zone.clone()).or_default() += 1;
            }
        }
        let case = self.cases.get_mut(about)?;
        case.zone = zone.cloned();
        case.next = now + pause(now.saturating_sub(case.since));
        let asked = choose::choose(neighbours, about, self.rounds);
        if asked.iter().filter(|asked| asked.control.is_some()).count() < FEWEST {
            return None;
        }
        self.rounds += 1;
        case.open = Some(Open {
            number: self.rounds,
            until: now + ROUND,
            asked: asked.clone(),
            words: BTreeMap::new(),
        });
        Some(Round {
            number: self.rounds,
            about: about.clone(),
            asked,
        })
    }

    /// Takes the answer of one node in a round.
    pub(super) fn hear(&mut self, now: Time, round: &Round, of: &NodeName, word: Word) {
        let case = self.cases.get_mut(&round.about);
        let open = case.and_then(|case| case.open.as_mut());
        let open = open.filter(|open| open.number == round.number);
        if let Some(open) = open
            && open.asked.iter().any(|asked| asked.node == *of)
        {
            open.words.insert(of.clone(), word);
            self.settle(now);
        }
    }

    /// Ends rounds that are complete or over.
    fn settle(&mut self, now: Time) {
        for case in self.cases.values_mut() {
            case.conviction.take_if(|conviction| conviction.until <= now);
            let ends = |open: &mut Open| {
                let complete = open.words.len() == open.asked.len();
                let reached = open.words.values().any(|word| *word == Word::Reaches);
                reached || complete || now >= open.until
            };
            let Some(open) = case.open.take_if(ends) else {
                continue;
            };
            let verdict = open.verdict();
            case.is_undecided = verdict.is_none();
            match verdict {
                Some(Some((missed, asked))) => {
                    let before = case.conviction.take();
                    let at = before.map_or(now, |before| before.at);
                    let until = now + LASTS * pause(now.saturating_sub(case.since));
                    case.conviction = Some(Conviction {
                        at,
                        until,
                        is_held: false,
                        missed,
                        asked,
                    });
                }
                Some(None) => case.conviction = None,
                // What was known stays so, and the question is repeated soon.
                None => case.next = case.next.min(now + AGAIN),
            }
        }
    }

    /// Returns the nodes that are suspected. Nobody new is, or nobody new of a zone, if it would be too many.
    pub(super) fn suspected(&mut self) -> BTreeMap<NodeName, Conviction> {
        let now = self.looked_at.unwrap_or_default();
        let is_new = |case: &&Case| {
            let conviction = case.conviction.as_ref();
            conviction.is_some_and(|conviction| conviction.is_new(now))
        };
        let convicted = self.cases.values().filter(is_new);
        let mut by_zone = BTreeMap::<&ZoneName, usize>::new();
        for zone in convicted.clone().filter_map(|case| case.zone.as_ref()) {
            *by_zone.entry(zone).or_default() += 1;
        }
        let too_many = |(zone, dead): (&ZoneName, usize)| {
            (dead > few(dead + self.zones.get(zone).unwrap_or(&0))).then(|| zone.clone())
        };
        let lost: BTreeSet<ZoneName> = by_zone.into_iter().filter_map(too_many).collect();
        let too_many = convicted.count() > few(self.all);
        if too_many {
            self.holds = Some("too many nodes do not answer");
        } else if !lost.is_empty() {
            self.holds = Some("too many nodes of a zone do not answer");
        }
        let mut suspected = BTreeMap::new();
        for (node, case) in &mut self.cases {
            let is_lost = case.zone.as_ref().is_some_and(|zone| lost.contains(zone));
            let Some(conviction) = &mut case.conviction else {
                continue;
            };
            conviction.is_held |= (too_many || is_lost) && conviction.is_new(now);
            if !conviction.is_held {
                suspected.insert(node.clone(), conviction.clone());
            }
        }
        suspected
    }
}

impl Conviction {
    fn is_new(&self, now: Time) -> bool {
        now.saturating_sub(self.at) < OLD
    }
}

impl Open {
    /// Returns how many neighbours miss the node, and of how many, if the round convicts it; `Some(None)` if it acquits
    /// it; `None` if it decides nothing.
    fn verdict(&self) -> Option<Option<(usize, usize)>> {
        if self.words.values().any(|word| *word == Word::Reaches) {
            return Some(None);
        }
        let silent = self.asked.len() - self.words.len();
        if silent > self.asked.len() / SILENT {
            return None;
        }
        let neighbours = self.asked.iter().filter(|asked| asked.control.is_some());
        let zones = |of: &mut dyn Iterator<Item = &AskedNode>| {
            of.filter_map(|asked| asked.zone.clone()).collect::<BTreeSet<_>>().len()
        };
        let misses = |asked: &&AskedNode| self.words.get(&asked.node) == Some(&Word::Misses);
        let count = neighbours.clone().count();
        let missed = neighbours.clone().filter(misses).count();
        let spread = zones(&mut neighbours.clone()).min(2);
        let enough = missed >= ENOUGH.min(count).max(FEWEST)
            && zones(&mut neighbours.filter(misses)) >= spread;
        enough.then_some(Some((missed, count)))
    }
}

/// Returns how many of so many nodes may be suspected at a time: one of any.
pub(super) fn few(of: usize) -> usize {
    (of * FEW / 100).max(1)
}

fn pause(quiet_for: Duration) -> Duration {
    (quiet_for / PACE).clamp(PAUSES.0, PAUSES.1)
}

#[cfg(test)]
mod tests;
