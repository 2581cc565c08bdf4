//! The nodes and edges of a graph, for drawings. Pure.

use std::collections::{BTreeMap, HashMap};

use super::{EdgeView, failures, rate};
use crate::KeyView;

/// The kind of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NodeKind {
    /// A client, which begins connections.
    Client,
    /// A port of a Service.
    Service,
    /// Where connections lead.
    Endpoint,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphNode {
    /// The kind.
    pub kind: NodeKind,
    /// The human-readable name. Two nodes of a kind have different names.
    pub label: String,
    /// Namespace and name of a Service.
    pub service: Option<(String, String)>,
}

/// The connections between a client and a Service, or between a Service and an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphLink {
    /// Index of the node at which connections come from.
    pub from: usize,
    /// Index of the node to which they lead.
    pub to: usize,
    /// Connections that began.
    pub connections: u64,
    /// Connections that ended without being established.
    pub failed: u64,
    /// Bytes of both directions, of connections that ended.
    pub bytes: u64,
    /// Connections in a million seconds: the sum of the rates of edges.
    pub per_million_seconds: u64,
}

/// Nodes, and the links between them: from clients to Services, and from Services to endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Graph {
    /// The nodes.
    pub nodes: Vec<GraphNode>,
    /// The links, sorted by their ends.
    pub links: Vec<GraphLink>,
}

impl Graph {
    /// Returns the graph of edges.
    pub(super) fn of(edges: &[EdgeView]) -> Self {
        let mut nodes = Vec::new();
        let mut known = HashMap::<(NodeKind, String), usize>::new();
        let mut node = |kind, label: String, service: Option<&KeyView>| {
            *known.entry((kind, label.clone())).or_insert_with(|| {
                let service = service.map(|key| (key.namespace.clone(), key.service.clone()));
                nodes.push(GraphNode {
                    kind,
                    label,
                    service,
                });
                nodes.len() - 1
            })
        };
        let mut links = BTreeMap::<(usize, usize), GraphLink>::new();
        for edge in edges {
            let client = node(NodeKind::Client, edge.client_text(), None);
            let service = node(NodeKind::Service, edge.service_text(), Some(&edge.port));
            let endpoint = node(NodeKind::Endpoint, edge.endpoint_text(), None);
            for (from, to) in [(client, service), (service, endpoint)] {
                links.entry((from, to)).or_default().add(edge);
            }
        }
        let links = links
            .into_iter()
            .map(|((from, to), link)| GraphLink { from, to, ..link })
            .collect();
        Self { nodes, links }
    }
}

impl GraphLink {
    /// Returns connections a second and failures, human-readable.
    pub fn text(&self) -> String {
        let mut text = format!("{}/s", rate(self.per_million_seconds));
        if self.failed > 0 {
            let failed = failures(self.failed, self.connections);
            text.push_str(&format!(", {failed} failed"));
        }
        text
    }

    /// Returns connections an hour.
    pub fn per_hour(&self) -> u64 {
        self.per_million_seconds.saturating_mul(3_600) / 1_000_000
    }

    fn add(&mut self, edge: &EdgeView) {
        let bytes = [edge.bytes_to_endpoint, edge.bytes_to_client];
        for more in bytes.into_iter().flatten() {
            self.bytes = self.bytes.saturating_add(more);
        }
        self.connections = self.connections.saturating_add(edge.connections);
        self.failed = self.failed.saturating_add(edge.failed);
        let rates = [self.per_million_seconds, edge.per_million_seconds];
        self.per_million_seconds = rates.into_iter().fold(0, u64::saturating_add);
    }
}
