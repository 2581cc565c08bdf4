//! The fleet, in answers that stay below gRPC's usual limit of 4 MiB whatever the number of nodes.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use kplane_model::{NodeFacts, NodeName};
use kplane_proto::v1 as pb;
use prost::Message as _;

use super::views::{control_plane, node_state, node_status};
use crate::fleet::AgentRecord;
use crate::hub::Hub;

/// Size in bytes up to which nodes are added to an answer. The largest node may come on top: its report of 256 KiB
/// may be one text that appears twice. With 1 MiB of issues, an answer stays at 3 MiB.
const NODES_BYTES: usize = 3 << 19;

/// The fleet at one moment. It consists of pointers, so no stream waits while answers are built from it.
pub(super) struct Picture<'a> {
    hub: &'a Hub,
    /// Nodes that have an agent, had one, or exist as Node objects.
    nodes: BTreeMap<NodeName, Node>,
    /// Problem of agents whose nodes are unknown.
    called: Option<String>,
}

#[derive(Default)]
struct Node {
    record: Option<Arc<AgentRecord>>,
    facts: Option<Arc<NodeFacts>>,
}

impl<'a> Picture<'a> {
    pub(super) fn now(hub: &'a Hub) -> Self {
        let mut nodes = BTreeMap::<NodeName, Node>::new();
        for (name, record) in hub.fleet.records() {
            nodes.entry(name).or_default().record = Some(record);
        }
        let all: Vec<_> = hub.store.nodes().into_iter().collect();
        let called = nodes_are_called(hub, &all);
        for (name, facts) in all {
            // A deleted node without an agent is left out.
            if facts.known || nodes.contains_key(&name) {
                nodes.entry(name).or_default().facts = Some(facts);
            }
        }
        Self { hub, nodes, called }
    }

    /// Returns all nodes, sorted by name.
    pub(super) fn nodes(
        &self,
    ) -> impl Iterator<Item = (&NodeName, Option<&AgentRecord>, Option<Arc<NodeFacts>>)> {
        let nodes = self.nodes.iter();
        nodes.map(|(name, node)| (name, node.record.as_deref(), node.facts.clone()))
    }

    /// Returns the problem with the name of a node that has an agent, if the node is unknown.
    fn stranger(&self, facts: Option<&NodeFacts>) -> Option<&str> {
        let called = self.called.as_deref();
        called.filter(|_| !facts.is_some_and(|facts| facts.known))
    }

    /// Builds one answer: up to `most` of the nodes after the name `token`, as many as fit. The first one, whose
    /// token is empty, also has the control plane's status.
    pub(super) fn page(&self, token: &str, most: usize) -> pb::Fleet {
        let mut page = pb::Fleet::default();
        if token.is_empty() {
            page.control_plane = Some(control_plane(self.hub));
        }
        let behind = (Bound::Excluded(token), Bound::Unbounded);
        let mut nodes = self.nodes.range::<str, _>(behind).peekable();
        let mut bytes = 0;
        while page.nodes.len() < most && bytes < NODES_BYTES {
            let Some((name, node)) = nodes.next() else {
                return page;
            };
            let (record, facts) = (node.record.as_deref(), node.facts.as_deref());
            let stranger = self.stranger(facts);
            let status = node_status(self.hub, name, record, facts, stranger);
            bytes += status.encoded_len();
            page.nodes.push(status);
        }
        if nodes.peek().is_some() {
            let last = page.nodes.last();
            page.next_page_token = last.map(|node| node.name.clone()).unwrap_or_default();
        }
        page
    }
}

/// Lists the existing Node objects, for agents whose nodes are unknown. `None` before the source is complete. Also
/// `None` when a source of manifests names no nodes, as on a laptop; a cluster always has some.
fn nodes_are_called(hub: &Hub, facts: &[(NodeName, Arc<NodeFacts>)]) -> Option<String> {
    /// Maximum number of names that are listed.
    const TOLD: usize = 5;
    let known = facts.iter().filter(|(_, node)| node.known);
    let names: Vec<&str> = known.map(|(name, _)| &**name).collect();
    if !hub.store.head().borrow().synced || (names.is_empty() && hub.source != "kubernetes") {
        return None;
    }
    let told = names.iter().take(TOLD).copied().collect::<Vec<_>>();
    let called = match names.len().saturating_sub(TOLD) {
        0 if names.is_empty() => String::new(),
        0 => format!(" Known Nodes: {}", told.join(", ")),
        more => format!(" Known Nodes: {} and {more} more", told.join(", ")),
    };
    Some(format!(
        "no Node object has this name; check --node-name of its agent.{called}"
    ))
}

/// Returns the number of nodes by the state of their agent; every state has an entry.
pub(crate) fn node_states(hub: &Hub) -> BTreeMap<&'static str, usize> {
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
    let picture = Picture::now(hub);
    for (name, record, facts) in picture.nodes() {
        let stranger = picture.stranger(facts.as_deref());
        let state = node_state(hub, name, record, hub.store.wanted(name), stranger).state;
        *states.entry(name_of(state)).or_default() += 1;
    }
    states
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
        pb::NodeState::NoAgent | pb::NodeState::Unspecified => "no_agent",
    }
}
