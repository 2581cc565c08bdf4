//! The fleet, in answers that stay below gRPC's usual limit of 4 MiB whatever the number of nodes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kplane_agents::fleet::{AgentRecord, Durations, has_servers};
use kplane_agents::hub::Hub;
use kplane_agents::peers::{Answer, Claim, Collected};
use kplane_desired_state::publish::Store;
use kplane_model::{NodeFacts, NodeName, Reason, ServiceName};
use kplane_proto::v1 as pb;
use prost::Message as _;

use super::views::{State, control_plane, node_state, node_status};
use crate::findings::Remarks;

/// Size in bytes up to which nodes are added to an answer. The largest node may come on top: its report of 256 KiB
/// may be one text that appears twice. With 1 MiB of issues, an answer stays at 3 MiB.
const NODES_BYTES: usize = 3 << 19;

/// The reason why nothing is known of a node.
pub(super) const MAY_BE_ELSEWHERE: &str =
    "not known: a replica of the control plane that did not answer may serve the node";

/// The fleet at one moment. It consists of pointers, so no stream waits while answers are built from it.
pub(super) struct Snapshot<'a> {
    hub: &'a Hub,
    /// What other replicas tell.
    others: &'a Collected,
    /// Nodes that have an agent, had one, or exist as Node objects.
    nodes: BTreeMap<NodeName, Node<'a>>,
    /// Problem of agents whose nodes are unknown.
    called: Option<String>,
}

/// One node.
#[derive(Default)]
pub(super) struct Node<'a> {
    /// What this replica knows of the agent.
    pub(super) record: Option<Arc<AgentRecord>>,
    pub(super) facts: Option<Arc<NodeFacts>>,
    /// The agent at another replica, if what this one knows is older, or nothing.
    pub(super) elsewhere: Option<Elsewhere<'a>>,
}

/// An agent at another replica.
#[derive(Clone, Copy)]
pub(super) struct Elsewhere<'a> {
    pub(super) answer: &'a Answer,
    pub(super) agent: &'a pb::PeerAgent,
}

impl Node<'_> {
    /// Returns whether an agent is connected to any replica that is known.
    pub(super) fn is_connected(&self) -> bool {
        self.claim().is_some_and(|claim| claim.connected)
    }

    /// Returns whether an agent is connected, or was so within this time.
    pub(super) fn was_connected_within(&self, time: Duration) -> bool {
        self.claim().is_some_and(|claim| claim.connected || claim.age < time)
    }

    /// Returns a time of the report by this machine's clock, in milliseconds since 1970. Another replica has translated its own.
    pub(super) fn local_ms(&self, ms: u64) -> u64 {
        match (&self.elsewhere, &self.record) {
            (None, Some(record)) => record.local_ms(ms),
            _ => ms,
        }
    }

    /// Returns the latest report of an agent that is connected.
    pub(super) fn report(&self) -> Option<&pb::Report> {
        let report = match &self.elsewhere {
            Some(Elsewhere { agent, .. }) => agent.status.as_ref()?.report.as_ref(),
            None => self.record.as_deref()?.report.as_deref(),
        };
        if self.is_connected() { report } else { None }
    }

    /// Returns whether the agent is connected and has virtual servers, which may be those of a Service.
    pub(super) fn has_servers(&self, service: &ServiceName) -> bool {
        let has = match &self.elsewhere {
            Some(Elsewhere { answer, agent }) => {
                let index = answer.index_of(service);
                let service_on_node = index.and_then(|index| agent.services.get(index));
                service_on_node.is_some_and(|service_on_node| service_on_node.has_servers)
            }
            None => self.record.as_deref().is_some_and(has_servers),
        };
        has && self.is_connected()
    }

    /// Returns whether no replica has had a stream of the node's agent.
    pub(super) fn is_unheard(&self) -> bool {
        self.claim().is_none()
    }

    /// Returns the newest claim to the node.
    fn claim(&self) -> Option<Claim> {
        let elsewhere = self.elsewhere;
        elsewhere.map(|elsewhere| elsewhere.answer.claim(elsewhere.agent)).or_else(|| {
            let record = self.record.as_ref()?;
            Some(Claim {
                connected: record.connected,
                age: record.since.elapsed(),
            })
        })
    }
}

/// The answers of no replica.
static NO_OTHERS: Collected = Collected {
    answers: Vec::new(),
    missing: Vec::new(),
};

impl<'a> Snapshot<'a> {
    /// Returns what this replica knows.
    pub(super) fn now(hub: &'a Hub) -> Self {
        Self::with(hub, &NO_OTHERS)
    }

    /// Returns what all replicas know. Of several that know an agent, the one with the newest connection counts.
    pub(super) fn with(hub: &'a Hub, others: &'a Collected) -> Self {
        let mut nodes = BTreeMap::<NodeName, Node<'a>>::new();
        for (name, record) in hub.agents().records() {
            nodes.entry(name).or_default().record = Some(record);
        }
        for answer in &others.answers {
            for (name, agent) in &answer.agents {
                let node = nodes.entry(name.clone()).or_default();
                let claim = answer.claim(agent);
                if node.claim().is_none_or(|before| claim.beats(before)) {
                    node.elsewhere = Some(Elsewhere { answer, agent });
                }
            }
        }
        let all: Vec<_> = hub.store().nodes().into_iter().collect();
        let called = nodes_are_called(hub, &all);
        for (name, facts) in all {
            // A deleted node without an agent is left out.
            if facts.known || nodes.contains_key(&name) {
                nodes.entry(name).or_default().facts = Some(facts);
            }
        }
        Self {
            hub,
            others,
            nodes,
            called,
        }
    }

    /// Keeps the nodes in the states and the zone that a request names.
    pub(super) fn only_those(mut self, request: &pb::GetFleetRequest) -> Self {
        if request.states.is_empty() && request.zone.is_empty() {
            return self;
        }
        let nodes = std::mem::take(&mut self.nodes);
        let mut kept = BTreeMap::new();
        for (name, node) in nodes {
            let status = self.status(&name, &node);
            let in_zone = request.zone.is_empty() || request.zone == status.zone;
            let in_state = request.states.is_empty() || request.states.contains(&status.state);
            if in_zone && in_state {
                kept.insert(name, node);
            }
        }
        self.nodes = kept;
        self
    }

    /// Returns all nodes, sorted by name.
    pub(super) fn nodes(&self) -> impl Iterator<Item = (&NodeName, &Node<'a>)> {
        self.nodes.iter()
    }

    /// Returns the node with a name, if agents of it are known.
    pub(super) fn node(&self, name: &NodeName) -> Option<&Node<'a>> {
        self.nodes.get(name)
    }

    /// Returns the problem with the name of a node that has an agent, if the node is unknown.
    pub(super) fn stranger(&self, facts: Option<&NodeFacts>) -> Option<&str> {
        let called = self.called.as_deref();
        if facts.is_some_and(|facts| facts.known) { None } else { called }
    }

    /// Builds one answer: up to `most` of the nodes after the name `token`, as many as fit. The first one, whose
    /// token is empty, also has the control plane's status.
    pub(super) fn page(&self, token: &str, most: usize) -> pb::Fleet {
        let mut page = pb::Fleet::default();
        if token.is_empty() {
            page.control_plane = Some(control_plane(self.hub, self.others));
            page.missing_replicas.clone_from(&self.others.missing);
            let answered = self.others.answers.len();
            if self.others.replicas() > 0 {
                page.replicas = u32::try_from(answered + 1).unwrap_or(u32::MAX);
            }
        }
        let behind = (Bound::Excluded(token), Bound::Unbounded);
        let mut nodes = self.nodes.range::<str, _>(behind).peekable();
        let mut bytes = 0;
        while page.nodes.len() < most && bytes < NODES_BYTES {
            let Some((name, node)) = nodes.next() else {
                return page;
            };
            let status = self.status(name, node);
            bytes += status.encoded_len();
            page.nodes.push(status);
        }
        if nodes.peek().is_some() {
            let last = page.nodes.last();
            page.next_page_token = last.map(|node| node.name.clone()).unwrap_or_default();
        }
        page
    }

    /// Returns the first page, with this node only; without a node if it is not known.
    pub(super) fn only(&self, node: &str) -> pb::Fleet {
        let found = self.nodes.get_key_value(node);
        let status = found.map(|(name, node)| self.status(name, node));
        pb::Fleet {
            nodes: status.into_iter().collect(),
            ..self.page("", 0)
        }
    }

    /// Returns whether a replica that did not answer may serve a node.
    fn may_be_elsewhere(&self, node: &Node<'_>) -> bool {
        !self.others.missing.is_empty() && !node.is_connected()
    }

    /// Returns the state of a node, as [`Snapshot::status`] has it, without what its neighbours say.
    pub(super) fn state(&self, name: &NodeName, node: &Node<'_>) -> State {
        if self.may_be_elsewhere(node) {
            return State {
                state: pb::NodeState::Unknown,
                since_ms: 0,
                last_error: MAY_BE_ELSEWHERE.to_owned(),
            };
        }
        let elsewhere = node.elsewhere.and_then(|elsewhere| elsewhere.agent.status.as_ref());
        if let Some(status) = elsewhere {
            return State {
                state: status.state(),
                since_ms: status.since_ms,
                last_error: status.last_error.clone(),
            };
        }
        let stranger = self.stranger(node.facts.as_deref());
        let wanted = self.hub.store().wanted(name);
        node_state(self.hub, name, node.record.as_deref(), wanted, stranger)
    }

    /// Returns the status of a node, as the replica sees it that serves the agent.
    pub(super) fn status(&self, name: &NodeName, node: &Node<'_>) -> pb::NodeStatus {
        let elsewhere = node.elsewhere.and_then(|elsewhere| elsewhere.agent.status.clone());
        let mut status = elsewhere.unwrap_or_else(|| {
            let (record, facts) = (node.record.as_deref(), node.facts.as_deref());
            node_status(self.hub, name, record, facts, self.stranger(facts))
        });
        if self.may_be_elsewhere(node) {
            status.state = pb::NodeState::Unknown.into();
            MAY_BE_ELSEWHERE.clone_into(&mut status.last_error);
        }
        status
    }
}

/// Lists the existing Node objects, for agents whose nodes are unknown. `None` before the source is complete. Also
/// `None` when a source of manifests names no nodes, as on a laptop; a cluster always has some.
fn nodes_are_called(hub: &Hub, facts: &[(NodeName, Arc<NodeFacts>)]) -> Option<String> {
    /// Maximum number of names that are listed.
    const EVERYTHING: usize = 5;
    let known = facts.iter().filter(|(_, node)| node.known);
    let names: Vec<&str> = known.map(|(name, _)| &**name).collect();
    if !hub.store().head().borrow().synced || (names.is_empty() && !hub.replica().names_are_nodes())
    {
        return None;
    }
    let announced = names.iter().take(EVERYTHING).copied().collect::<Vec<_>>();
    let called = match names.len().saturating_sub(EVERYTHING) {
        0 if names.is_empty() => String::new(),
        0 => format!(" Known Nodes: {}", announced.join(", ")),
        more => format!(" Known Nodes: {} and {more} more", announced.join(", ")),
    };
    Some(format!(
        "no Node object has this name; check --node-name of its agent.{called}"
    ))
}

/// Most nodes out of sync that an [`Overview`] names.
const NAMED_OUT_OF_SYNC: usize = 500;

/// The fleet in numbers, and the nodes that are out of sync.
#[derive(Debug, Default)]
pub(crate) struct Overview {
    pub(crate) control_plane: pb::ControlPlaneStatus,
    /// Number of nodes by state.
    pub(crate) states: HashMap<pb::NodeState, usize>,
    /// All nodes with their states and what their agents report besides, by zone; an empty name = no zone.
    pub(crate) zones: BTreeMap<String, Vec<(NodeName, pb::NodeState, Remarks)>>,
    /// Nodes out of sync, 500 at most.
    pub(crate) out_of_sync: Vec<pb::NodeStatus>,
    /// Number of further ones.
    pub(crate) more: usize,
    /// Number of replicas that answered; 0 = this one asks no other.
    pub(crate) replicas: usize,
    pub(crate) missing: Vec<pb::MissingReplica>,
}

impl Overview {
    /// Counts all nodes, and builds the status of those out of sync only.
    pub(crate) fn of(hub: &Hub, others: &Collected) -> Self {
        let snapshot = Snapshot::with(hub, others);
        let mut overview = Self {
            control_plane: control_plane(hub, others),
            replicas: match others.replicas() {
                0 => 0,
                _ => others.answers.len() + 1,
            },
            missing: others.missing.clone(),
            ..Self::default()
        };
        for (name, node) in snapshot.nodes() {
            let state = snapshot.state(name, node).state;
            *overview.states.entry(state).or_default() += 1;
            let zone = node.facts.as_ref().and_then(|facts| facts.zone.as_deref());
            let zone = overview.zones.entry(zone.unwrap_or_default().to_owned());
            let remarks = node.report().map(Remarks::of).unwrap_or_default();
            zone.or_default().push((name.clone(), state, remarks));
            match state {
                pb::NodeState::InSync => {}
                _ if overview.out_of_sync.len() < NAMED_OUT_OF_SYNC => {
                    overview.out_of_sync.push(snapshot.status(name, node));
                }
                _ => overview.more += 1,
            }
        }
        overview
    }

    /// Returns the numbers of nodes of whose agents report something besides a state, and of those with an error.
    pub(crate) fn remarked(&self) -> (usize, usize) {
        let nodes = || self.zones.values().flatten();
        let remarked = nodes().filter(|(_, _, remarks)| !remarks.codes.is_empty());
        let errors = nodes().filter(|(_, _, remarks)| remarks.has_error);
        (remarked.count(), errors.count())
    }

    /// Returns the number of nodes in a state.
    pub(crate) fn count(&self, state: pb::NodeState) -> usize {
        self.states.get(&state).copied().unwrap_or_default()
    }
}

/// The fleet in numbers.
#[derive(Debug)]
pub struct Census {
    /// Nodes by the state of their agent; every state has an entry.
    pub states: BTreeMap<&'static str, usize>,
    /// Connected agents.
    pub connected: usize,
    /// For each connected agent that should follow, the time for which its kernel has lacked a change.
    pub lags: Durations,
    /// Nodes of connected agents by the reasons of findings about them; every reason has an entry.
    pub findings: BTreeMap<&'static str, usize>,
}

/// Counts the fleet, as far as this replica knows it.
pub fn census(hub: &Hub) -> Census {
    let names = [
        "conflict",
        "disconnected",
        "failing",
        "frozen",
        "holding",
        "in_sync",
        "no_agent",
        "syncing",
        "unverified",
    ];
    let mut states = BTreeMap::from(names.map(|name| (name, 0)));
    let (mut connected, mut lags) = (0, Durations::default());
    let reasons = Reason::of_nodes().map(|reason| (reason.code(), 0));
    let mut findings: BTreeMap<_, _> = reasons.collect();
    let (snapshot, now) = (Snapshot::now(hub), Instant::now());
    for (name, node) in snapshot.nodes() {
        let stranger = snapshot.stranger(node.facts.as_deref());
        let record = node.record.as_deref();
        let wanted = hub.store().wanted(name);
        let state = node_state(hub, name, record, wanted, stranger).state;
        *states.entry(name_of(state)).or_default() += 1;
        let record = record.filter(|record| record.connected);
        connected += usize::from(record.is_some());
        let report = record.and_then(|record| record.report.as_deref());
        let announced = report.map_or_else(BTreeSet::new, |report| {
            report.findings.iter().map(|finding| finding.code.as_str()).collect()
        });
        for code in announced {
            // A code that this version does not know makes no series.
            if let Some(count) = findings.get_mut(code) {
                *count += 1;
            }
        }
        if state != pb::NodeState::Frozen
            && let Some(record) = record
        {
            lags.add(lag(hub.store(), record, wanted, now));
        }
    }
    Census {
        states,
        connected,
        lags,
        findings,
    }
}

/// Returns the time for which a node's kernel has lacked a change up to revision `wanted`.
fn lag(store: &Store, record: &AgentRecord, wanted: u64, now: Instant) -> Duration {
    let report = record.report.as_deref();
    let since = match report.filter(|report| report.epoch == store.epoch()) {
        Some(report) if report.applied_revision >= wanted => return Duration::ZERO,
        Some(report) => store.changed_after(report.applied_revision),
        None => None,
    };
    // An agent that has just come may not have had the time to report.
    let since = since.map_or(record.since, |since| since.max(record.since));
    now.saturating_duration_since(since)
}

fn name_of(state: pb::NodeState) -> &'static str {
    match state {
        pb::NodeState::InSync => "in_sync",
        pb::NodeState::Syncing => "syncing",
        pb::NodeState::Failing => "failing",
        pb::NodeState::Frozen => "frozen",
        pb::NodeState::Disconnected => "disconnected",
        pb::NodeState::Unverified => "unverified",
        pb::NodeState::Holding => "holding",
        pb::NodeState::Conflict => "conflict",
        // Only answers with other replicas have unknown nodes.
        pb::NodeState::NoAgent | pb::NodeState::Unknown | pb::NodeState::Unspecified => "no_agent",
    }
}
