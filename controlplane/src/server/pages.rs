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

/// Nodes are added to an answer until they have so many bytes. With the largest one on top, whose report
/// of 256 KiB may be one text that is told twice, and a MiB of issues an answer stays at 3 MiB.
const NODES_BYTES: usize = 3 << 19;

/// The fleet at a moment. Made of pointers: nobody waits while answers are built from it.
pub(super) struct Picture<'a> {
    hub: &'a Hub,
    /// Nodes that have an agent, had one, or exist as Node objects.
    nodes: BTreeMap<NodeName, Node>,
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
        for (name, facts) in hub.store.nodes() {
            // A node that was deleted and has no agent is history.
            if facts.known || nodes.contains_key(&name) {
                nodes.entry(name).or_default().facts = Some(facts);
            }
        }
        Self { hub, nodes }
    }

    /// All nodes, sorted by name.
    pub(super) fn nodes(
        &self,
    ) -> impl Iterator<Item = (&NodeName, Option<&AgentRecord>, Option<Arc<NodeFacts>>)> {
        let nodes = self.nodes.iter();
        nodes.map(|(name, node)| (name, node.record.as_deref(), node.facts.clone()))
    }

    /// One answer: up to `most` of the nodes behind the name `token`, as many as fit. The first one,
    /// whose token is empty, has the control plane as well.
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
            let status = node_status(self.hub, name, record, facts);
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

/// Nodes by the state of their agent; every state is there.
pub(crate) fn node_states(hub: &Hub) -> BTreeMap<&'static str, usize> {
    let names = [
        "conflict",
        "disconnected",
        "failing",
        "holding",
        "in_sync",
        "no_agent",
        "syncing",
        "unverified",
    ];
    let mut states = BTreeMap::from(names.map(|name| (name, 0)));
    for (name, record, _) in Picture::now(hub).nodes() {
        let state = node_state(hub, record, hub.store.wanted(name)).state;
        *states.entry(name_of(state)).or_default() += 1;
    }
    states
}

fn name_of(state: pb::NodeState) -> &'static str {
    match state {
        pb::NodeState::InSync => "in_sync",
        pb::NodeState::Syncing => "syncing",
        pb::NodeState::Failing => "failing",
        pb::NodeState::Disconnected => "disconnected",
        pb::NodeState::Unverified => "unverified",
        pb::NodeState::Holding => "holding",
        pb::NodeState::Conflict => "conflict",
        pb::NodeState::NoAgent | pb::NodeState::Unspecified => "no_agent",
    }
}
