//! Decides when to announce a problem: once at its start, again while it lasts, and at its end. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use kplane_desired_state::k8s::Kind;
use kplane_model::NodeName;

use super::problems::{Key, Problem, problems};
use super::{Event, Object, Reason, Snapshot};

/// Interval at which a lasting problem is announced again: API servers forget events after an hour, by default.
const REFRESH: Duration = Duration::from_secs(30 * 60);
/// Maximum number of problems that are followed at once; further ones are not announced. About 1 kB each.
const MAX_STANDING: usize = 10_000;

/// Minimum time between two events about repairs of one node's rules: another program may undo each repair.
const REPAIRS: Duration = Duration::from_secs(5 * 60);

/// The announcements made so far.
#[derive(Debug)]
pub(super) struct Announcer {
    /// This process announces problems of the input.
    with_input: bool,
    standing: BTreeMap<Key, Standing>,
    /// The process of each node's agent.
    agents: HashMap<NodeName, u64>,
    /// Number of the last Pod that waited to end and was announced.
    departed: u64,
    /// Repairs of each node's rules that were announced.
    repairs: HashMap<NodeName, Repaired>,
}

/// Known repairs of one node's rules.
#[derive(Clone, Copy, Debug)]
struct Repaired {
    /// Process of the agent that made them.
    instance: u64,
    count: u64,
    reported: Option<Instant>,
}

#[derive(Debug)]
struct Standing {
    since: Instant,
    announced: Option<Instant>,
}

impl Announcer {
    /// Creates an announcer that has announced nothing. `with_input`: it announces problems of the input.
    pub(super) fn new(with_input: bool) -> Self {
        Self {
            with_input,
            standing: BTreeMap::new(),
            agents: HashMap::new(),
            departed: 0,
            repairs: HashMap::new(),
        }
    }

    /// Returns the events that are due now.
    pub(super) fn step(&mut self, snapshot: &Snapshot, now: Instant) -> Vec<Event> {
        let mut events = self.starts(snapshot);
        self.repairs(snapshot, now, &mut events);
        self.departures(snapshot, &mut events);
        let current = problems(snapshot, self.with_input);
        self.ends(&current, &mut events);
        for (key, problem) in &current {
            self.follow(key, problem, now, &mut events);
        }
        events
    }

    /// Announces the start of agents (J1). An agent that already holds objects when the control plane
    /// first sees it has not just started.
    fn starts(&mut self, snapshot: &Snapshot) -> Vec<Event> {
        let mut events = Vec::new();
        for (name, node) in &snapshot.nodes {
            let Some(agent) = &node.agent else {
                continue;
            };
            let before = self.agents.insert(name.clone(), agent.instance);
            if before == Some(agent.instance) || !agent.began_empty {
                continue;
            }
            let note = format!("kplane agent {} with {}", agent.version, agent.backend);
            // D1, K21.
            let default = format!(
                "kube-proxy's file names no mode, so kplane uses {}; kube-proxy itself uses iptables, and nftables \
                 from v1.40 on. Name the mode in the file, or give the agent --backend",
                agent.backend
            );
            let reported = [
                (Reason::Starting, note.as_str(), true),
                (
                    Reason::IpvsDeprecation,
                    &agent.backend_deprecation,
                    !agent.backend_deprecation.is_empty(),
                ),
                (Reason::DefaultMode, &default, agent.mode_unset),
            ]
            .into_iter()
            .filter(|(_, _, applies)| *applies);
            events.extend(reported.map(|(reason, note, _)| {
                let mut event = Event::new(Object::node(name), reason, note);
                event.instance = agent.instance;
                event
            }));
        }
        self.agents.retain(|name, _| snapshot.nodes.contains_key(name));
        events
    }

    /// Announces repairs of rules that another program changed. A repair is complete, so no event follows at an
    /// end.
    fn repairs(&mut self, snapshot: &Snapshot, now: Instant, events: &mut Vec<Event>) {
        for (name, node) in &snapshot.nodes {
            let agent = node.agent.as_ref();
            let Some((agent, report)) = agent.and_then(|a| Some((a, a.report.as_ref()?))) else {
                continue;
            };
            let count = report.families.iter().map(|family| family.repairs).sum();
            let instance = agent.instance;
            let first = Repaired {
                instance,
                // Repairs from before this control plane knew the agent are not announced.
                count: if agent.began_empty { 0 } else { count },
                reported: None,
            };
            let known = self.repairs.entry(name.clone()).or_insert(first);
            if known.instance != instance {
                *known = Repaired {
                    instance,
                    count: 0,
                    ..*known
                };
            }
            let quiet = |at| now.saturating_duration_since(at) >= REPAIRS;
            if count <= known.count || !known.reported.is_none_or(quiet) {
                continue;
            }
            (known.count, known.reported) = (count, Some(now));
            let last = report.families.iter().max_by_key(|family| family.last_repair_ms);
            let what = last.map_or("", |family| &family.last_repair);
            let note = format!(
                "another program changed the node's rules, and the agent repaired them ({count} \
                 times since it started), last: {what}"
            );
            let mut event = Event::new(Object::node(name), Reason::RulesRepaired, &note);
            event.instance = count;
            events.push(event);
        }
        self.repairs.retain(|name, _| snapshot.nodes.contains_key(name));
    }

    /// Announces Pods that ended because the time was over.
    fn departures(&mut self, snapshot: &Snapshot, events: &mut Vec<Event>) {
        for (number, departure) in &snapshot.departures {
            if *number <= self.departed {
                continue;
            }
            self.departed = *number;
            if departure.reason.is_empty() || departure.pod.is_empty() {
                continue;
            }
            let object = Object {
                kind: Kind::Pod,
                namespace: departure.namespace.as_str().into(),
                name: departure.pod.as_str().into(),
            };
            let waited = Duration::from_millis(departure.waited_ms).as_secs_f64();
            let note = format!("ended after {waited:.0} s: {}", departure.reason);
            events.push(Event::new(object, Reason::EndedEarly, &note));
        }
    }

    fn follow(&mut self, key: &Key, problem: &Problem, now: Instant, events: &mut Vec<Event>) {
        if self.standing.len() >= MAX_STANDING && !self.standing.contains_key(key) {
            return;
        }
        let standing = self.standing.entry(key.clone()).or_insert(Standing {
            since: problem.since.unwrap_or(now),
            announced: None,
        });
        let passed = |since: Instant| now.saturating_duration_since(since);
        let due = match standing.announced {
            None => passed(standing.since) >= problem.after,
            Some(at) => passed(at) >= REFRESH,
        };
        if due {
            standing.announced = Some(now);
            events.push(Event::new(key.object.clone(), key.reason, &problem.note));
        }
    }

    /// Forgets problems that are over, and announces the end where no problem of the kind is left.
    fn ends(&mut self, current: &BTreeMap<Key, Problem>, events: &mut Vec<Event>) {
        let mut over = BTreeSet::new();
        let mut lasting = BTreeSet::new();
        self.standing.retain(|key, standing| {
            let lasts = current.contains_key(key);
            let ended = (key.object.clone(), key.reason.recovery(key.object.kind));
            match (lasts, standing.announced) {
                (true, _) => drop(lasting.insert(ended)),
                (false, Some(_)) => drop(over.insert(ended)),
                (false, None) => {}
            }
            lasts
        });
        for (object, recovery) in over.difference(&lasting) {
            if let Some((reason, note)) = recovery {
                events.push(Event::new(object.clone(), *reason, note));
            }
        }
    }
}
