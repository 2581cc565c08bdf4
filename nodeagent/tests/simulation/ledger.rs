//! Everything that replicas have published, and what is known of agents.

mod hooks;
mod invariants;
mod verdicts;

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kplane_desired_state::freshness::Versions;
use kplane_desired_state::k8s::Kind;
use kplane_model::Family;
use tokio::time::Instant;

use self::hooks::Leaving;
pub(crate) use self::verdicts::Claim;
use self::verdicts::{States, Verdicts};
use crate::oracle::{Entry, Key, Marks, Side, expected, hash};
use crate::reference::{Answers, Packet};
use crate::source::{Trust, View};
use crate::truth::Truth;

/// Deliveries of which one may explain what an agent does.
const REMEMBERED: usize = 8;

/// A broken invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    /// Its number and meaning in fleet.md.
    pub(crate) invariant: &'static str,
    pub(crate) text: String,
}

pub(crate) const I1: &str =
    "I1: a kernel holds one of the published states, and none older than it held";
pub(crate) const I2: &str = "I2: once faults have ended, all agents reach the newest state";
pub(crate) const I3: &str = "I3: no agent applies what belongs to another node";
pub(crate) const I4: &str =
    "I4: a Service that has endpoints before and after is never unprogrammed";
pub(crate) const I5: &str = "I5: an agent reports no more than its kernel holds";

pub(crate) const C1: &str = "C1: connections end only if they wait for an endpoint out of service or lead to a dead one, and these all do";

pub(crate) const N1: &str = "N1: a kernel passes no packet that all states deny in which it may be";
pub(crate) const N2: &str = "N2: a kernel drops no packet that all states allow in which it may be";
pub(crate) const N3: &str = "N3: the control plane answers what NetworkPolicies say";

pub(crate) const H1: &str =
    "H1: no kernel of a node in reach leads to a Pod once its preStop hook is answered";

pub(crate) const FROZEN: &str = "a node that is frozen takes no state that came later";
pub(crate) const FITS: &str = "every update adds up to its digest";
pub(crate) const RESTS: &str = "no part works without end";
pub(crate) const STORM: &str = "no agent asks for streams without a pause";

/// Streams that an agent may ask for within a second.
const STREAMS: usize = 60;

/// An epoch and a revision.
pub(crate) type Position = (u64, u64);

/// What a kernel has, and the ServicePorts that it refused, by family.
pub(crate) type Sides = [(Side, BTreeSet<Key>); 2];

/// The versions of each kind that a state contains.
type Floor = BTreeMap<Kind, u64>;

/// One state of a replica.
#[derive(Debug)]
struct Published {
    at: Instant,
    /// The number of changes of objects that it contains.
    change: u64,
    /// The number of those of objects that NetworkPolicies are about.
    policy_change: u64,
    /// The versions that the state contained first. It may contain more by now, which made no difference.
    versions: BTreeMap<Kind, Versions>,
    /// The versions that it contains by now.
    latest: BTreeMap<Kind, Versions>,
    trust: Trust,
    /// What each node must have, IPv4 first.
    nodes: Vec<[Arc<Side>; 2]>,
    hashes: Vec<[u64; 2]>,
    /// Services that the replica's source lacks although they exist.
    missing: BTreeSet<u8>,
    /// `None` until everything is listed that NetworkPolicies are about.
    verdicts: Option<Verdicts>,
    /// The verdicts until then of nodes that know no NetworkPolicies.
    unread: Option<Verdicts>,
}

/// What is known of one agent.
#[derive(Debug, Default)]
struct Notes {
    /// The latest complete updates that reached the agent, and whether they were snapshots.
    delivered: VecDeque<(Position, bool)>,
    /// Updates that were delivered since the kernel last took a change.
    since: usize,
    /// The agent's last stream goes on from a state that the agent has.
    resumes: bool,
    /// The times at which the agent asked for a stream within the last second.
    hellos: VecDeque<Instant>,
    /// What the agent knows of what the node served before, until its first change: it cannot keep anything else.
    remembers: Option<Position>,
    /// The kernel has taken a change of this process.
    applied: bool,
    /// The newest change of each kind that the agent's states have contained.
    floor: Floor,
    floors: BTreeMap<Position, Floor>,
    at: Option<Position>,
    moved_at: Option<Instant>,
    /// The newest position that the kernel holds, with Services that the control plane did not name.
    kept_at: Option<Position>,
    /// The kernel has more than the control plane named, by family.
    holding: [bool; 2],
    /// Everything that the agent was sent and the kernel had, ever, by family.
    had: [BTreeMap<Key, Vec<Entry>>; 2],
    states: States,
    /// The process knows which NetworkPolicies there are, or were, and whether it was sent some.
    knows_policies: bool,
    has_policies: bool,
    /// A control plane has told the process whether there are some.
    is_told: bool,
    /// The verdicts that the kernel may have at positions without a word of NetworkPolicies, and whether others were beside
    /// them.
    kept: BTreeMap<Position, (Answers, bool)>,
    /// The replica with which the agent speaks, and since when.
    joined: Option<(u64, Instant)>,
}

impl Notes {
    fn knows(&mut self, family: Family, side: &Side) {
        for (key, entry) in side {
            let had = self.had[family as usize].entry(*key).or_default();
            if !had.contains(entry) {
                had.push(entry.clone());
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct Ledger {
    published: BTreeMap<Position, Published>,
    hashes: HashSet<(u8, usize, u64)>,
    agents: Vec<Notes>,
    /// The packets about which each state is asked.
    packets: Arc<[Packet]>,
    /// What each replica's last state says of them, and the number of its changes.
    judged: BTreeMap<u64, (u64, Verdicts)>,
    /// Pods that wait to end, by the tokens of their questions.
    leaving: BTreeMap<u64, Leaving>,
    asked: u64,
    /// What kernels have.
    served: Vec<Sides>,
    pub(crate) violation: Option<Violation>,
    trace: DefaultHasher,
    /// What happened, in words; empty unless asked for.
    pub(crate) story: Option<Vec<String>>,
    began: Instant,
}

pub(crate) type Shared = Arc<Mutex<Ledger>>;

/// Locks the ledger. There is one thread.
pub(crate) fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ledger {
    pub(crate) fn new(nodes: u8, packets: Vec<Packet>, reported: bool) -> Shared {
        Arc::new(Mutex::new(Self {
            published: BTreeMap::new(),
            hashes: HashSet::new(),
            agents: (0..nodes).map(|_| Notes::default()).collect(),
            packets: packets.into(),
            judged: BTreeMap::new(),
            leaving: BTreeMap::new(),
            asked: 0,
            served: (0..nodes).map(|_| Sides::default()).collect(),
            violation: None,
            trace: DefaultHasher::new(),
            story: reported.then(Vec::new),
            began: Instant::now(),
        }))
    }

    /// Notes that something happened now. The same seed makes the same notes.
    pub(crate) fn note(&mut self, what: impl Hash, words: impl FnOnce() -> String) {
        let at = self.began.elapsed();
        (at, what).hash(&mut self.trace);
        if let Some(story) = &mut self.story {
            story.push(format!("{:>10.4}  {}", at.as_secs_f64(), words()));
        }
    }

    pub(crate) fn trace(&self) -> u64 {
        self.trace.finish()
    }

    pub(crate) fn break_invariant(&mut self, invariant: &'static str, text: String) {
        self.note("broken", || format!("{invariant}: {text}"));
        self.violation.get_or_insert(Violation { invariant, text });
    }

    /// Notes what a replica's state is at a revision.
    pub(crate) fn publish(&mut self, at: Position, view: &View, truth: Option<&Truth>) {
        if let Some(before) = self.published.get_mut(&at)
            && before.change == view.change
        {
            before.trust = before.trust.max(view.trust());
            before.latest.clone_from(&view.versions);
            return;
        }
        let (verdicts, unread) = (self.verdicts(at.0, view), self.unread(view));
        let nodes = u8::try_from(self.agents.len()).unwrap_or(0);
        let side = |node, family| Arc::new(expected(&view.objects, &view.marks, node, family));
        let states: Vec<_> =
            (0..nodes).map(|node| Family::ALL.map(|family| side(node, family))).collect();
        let hashes: Vec<_> =
            states.iter().map(|sides| sides.each_ref().map(|side| hash(side))).collect();
        self.note(("published", at, &hashes, &verdicts), || {
            format!("epoch {} publishes revision {}", at.0, at.1)
        });
        if let Some(before) = self.published.get_mut(&at) {
            before.trust = before.trust.max(view.trust());
            before.latest.clone_from(&view.versions);
            (before.change, before.policy_change) = (view.change, view.policy_change);
            before.unread = unread;
            let differs =
                before.verdicts.as_ref().is_some_and(|known| Some(known) != verdicts.as_ref());
            before.verdicts = verdicts;
            if before.hashes != hashes || differs {
                let text = format!(
                    "epoch {} changed without a new revision after {}",
                    at.0, at.1
                );
                self.break_invariant(I2, text);
            }
            return;
        }
        for (node, hashes) in (0..).zip(&hashes) {
            for (family, hash) in hashes.iter().enumerate() {
                self.hashes.insert((node, family, *hash));
            }
        }
        let published = Published {
            at: Instant::now(),
            change: view.change,
            policy_change: view.policy_change,
            trust: view.trust(),
            missing: truth.map(|truth| missing(view, truth)).unwrap_or_default(),
            versions: view.versions.clone(),
            latest: view.versions.clone(),
            nodes: states,
            hashes,
            verdicts,
            unread,
        };
        self.published.insert(at, published);
    }

    /// Notes that an agent asks a replica for a stream.
    pub(crate) fn asked(&mut self, node: u8, epoch: u64, resume: Option<Position>) {
        self.note(("hello", node, epoch, resume), || {
            format!("n{node} says hello to epoch {epoch}; it resumes {resume:?}")
        });
        let now = Instant::now();
        let notes = &mut self.agents[usize::from(node)];
        notes.resumes = resume.is_some();
        notes.hellos.push_back(now);
        notes.hellos.retain(|at| now - *at < Duration::from_secs(1));
        if notes.hellos.len() > STREAMS {
            let text = format!("n{node} has asked for {STREAMS} streams within a second");
            self.break_invariant(STORM, text);
        }
    }

    /// Notes that the last piece of an update reached an agent.
    pub(crate) fn delivered(&mut self, node: u8, at: Position, snapshot: bool) {
        self.note(("delivered", node, at, snapshot), || {
            let kind = if snapshot { "a snapshot" } else { "a difference" };
            format!("n{node} receives {kind}: epoch {}, revision {}", at.0, at.1)
        });
        let notes = &mut self.agents[usize::from(node)];
        notes.delivered.push_back((at, snapshot));
        notes.since += 1;
        if notes.delivered.len() > REMEMBERED {
            notes.delivered.pop_front();
        }
        if let Some(published) = self.published.get(&at) {
            notes.is_told |= published.verdicts.is_some();
            for (family, side) in Family::ALL.into_iter().zip(&published.nodes[usize::from(node)]) {
                notes.knows(family, side);
            }
        }
        self.may_be_in(node, at);
    }

    /// Notes that an agent starts with a cache file of this position.
    pub(crate) fn starts(&mut self, node: u8, remembers: Option<Position>) {
        self.note(("starts", node, remembers), || {
            format!("the agent of n{node} starts; it remembers {remembers:?}")
        });
        let notes = &mut self.agents[usize::from(node)];
        let (floors, had, states, kept) = (
            std::mem::take(&mut notes.floors),
            std::mem::take(&mut notes.had),
            std::mem::take(&mut notes.states),
            std::mem::take(&mut notes.kept),
        );
        let floor = remembers.and_then(|at| floors.get(&at).cloned());
        *notes = Notes {
            floor: floor.unwrap_or_default(),
            remembers,
            delivered: remembers.into_iter().map(|at| (at, false)).collect(),
            floors,
            had,
            states,
            kept,
            ..Notes::default()
        };
        if let Some(at) = remembers {
            self.remembers(node, at);
        }
    }
}

/// Returns the Services that exist and have endpoints, and that a view lacks.
fn missing(view: &View, truth: &Truth) -> BTreeSet<u8> {
    let versions = view.versions.values().map(|versions| versions.seen);
    let there = truth.at(versions.min().unwrap_or_default());
    let serving = |objects| {
        let side: Side = expected(objects, &Marks::default(), u8::MAX, Family::V4);
        side.iter()
            .filter(|(_, entry)| entry.serves())
            .map(|((service, _), _)| *service)
            .collect::<BTreeSet<_>>()
    };
    let now = serving(truth.now());
    let (there, has) = (serving(&there), serving(&view.objects));
    there
        .intersection(&now)
        .filter(|service| !has.contains(*service))
        .copied()
        .collect()
}

/// Returns the Services of a family, each with the number of its endpoints.
pub(crate) fn names(side: &Side) -> String {
    let one = |((service, port), entry): (&Key, &Entry)| {
        let most = entry.places.iter().map(|(_, place)| place.endpoints.len()).max();
        format!("s{service}:{port}({})", most.unwrap_or(0))
    };
    let all: Vec<String> = side.iter().map(one).collect();
    format!("[{}]", all.join(" "))
}
