//! Who talked to whom through Services: what `kpctl get graph` shows.

mod dot;
mod model;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kplane_proto::v1::{self as pb, ClientKind};
use serde::Serialize;

pub use self::model::{Graph, GraphLink, GraphNode, NodeKind};
use super::silent::{AskedView, names};
use super::{KeyView, View};
use crate::flows::{bytes, client, port_text};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, grouped, long_field, paragraph, plural};
use crate::time::human;
use crate::wire::{FromWire, known, known_name, view_of};

/// The connections of one client through one port to one endpoint, on all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct EdgeView {
    /// Address; `null` = clients for which agents had no room.
    client: Option<String>,
    #[serde(serialize_with = "known_name")]
    client_kind: ClientKind,
    /// The Pod as NAMESPACE/NAME, or the node; `null` = not known.
    client_name: Option<String>,
    port: KeyView,
    /// Address and port.
    endpoint: String,
    endpoint_pod: Option<String>,
    endpoint_node: Option<String>,
    /// The endpoint is the userspace proxy of nodes.
    proxy: bool,
    /// Connections that began.
    connections: u64,
    /// Connections that ended without being established.
    failed: u64,
    /// Established connections that one side ended by RST.
    reset: u64,
    /// Bytes of connections that ended; `null` if none did, or kernels count none.
    bytes_to_endpoint: Option<u64>,
    bytes_to_client: Option<u64>,
    /// The time in which they were counted.
    seconds: u64,
    /// Connections in a million seconds. Nodes may have counted for different times.
    per_million_seconds: u64,
}

view_of! {
    /// A node whose counts lack something.
    pub(crate) struct PartialView: GraphNode {
        node: String,
        /// The time for which it counted.
        seconds: u64,
        /// Times when reports were lost.
        lost: u64,
    }

    /// The view of `kpctl get graph`.
    pub struct GraphView: GraphAnswer as "Graph" {
        /// What was asked for; `null` or empty = all.
        namespace: Option<String> = _,
        services: Vec<String> = _,
        since_seconds: u64 = _,
        /// The edges of the client with the most connections first.
        edges: Vec<EdgeView> = _,
        /// Number of connections that are not listed.
        connections_omitted: u64 = more,
        /// Number of failed connections that are not listed.
        failed_omitted: u64 = more_failed,
        partial: Vec<PartialView>,
        knows_pods: bool,
        nodes: AskedView,
    }
}

impl GraphView {
    /// Creates the view of an answer.
    pub fn new(request: &pb::GraphRequest, answer: pb::GraphAnswer) -> Self {
        Self {
            namespace: FromWire::from_wire(request.namespace.clone()),
            services: request.services.clone(),
            since_seconds: request.since_s.into(),
            edges: edges(&answer),
            ..answer.into()
        }
    }

    /// Returns whether all nodes answered.
    pub fn is_complete(&self) -> bool {
        self.nodes.is_complete()
    }

    /// Returns the nodes and edges to draw.
    pub fn graph(&self) -> Graph {
        Graph::of(&self.edges)
    }

    fn has_omitted(&self) -> bool {
        self.connections_omitted > 0 || self.failed_omitted > 0
    }

    fn summary(&self) -> Span {
        let sum = |of: fn(&EdgeView) -> u64| self.edges.iter().map(of).fold(0, u64::saturating_add);
        let distinct = |of: fn(&EdgeView) -> String| {
            let all: BTreeSet<String> = self.edges.iter().map(of).collect();
            all.len()
        };
        let begun = sum(|edge| edge.connections).saturating_add(self.connections_omitted);
        // Agents count by the minute, and may have begun to count a moment ago.
        let seconds =
            self.edges.iter().map(|edge| edge.seconds).max().unwrap_or(self.since_seconds);
        Span::plain(format!(
            "{} began in {}, {} failed, from {} to {}; {}",
            grouped(begun),
            human(Duration::from_secs(seconds)),
            grouped(sum(|edge| edge.failed).saturating_add(self.failed_omitted)),
            plural(distinct(EdgeView::client_text), "client"),
            plural(distinct(EdgeView::service_text), "Service port"),
            self.nodes.summary()
        ))
    }

    /// Returns why the list is empty, and what to do next.
    fn nothing(&self) -> String {
        let next = match self.nodes.answered {
            0 => "Agents count connections with the option --flows, in the chart agent.flows.",
            _ => {
                "Connections to a Pod's own address are not of a Service, nor are those that rules refuse for lack of an endpoint."
            }
        };
        let answered = self.nodes.summary();
        format!("No connection through these Services began or ended; {answered}. {next}")
    }

    /// Returns what is missing, and why.
    fn missing(&self) -> Vec<(String, Tone)> {
        let mut lines = Vec::new();
        let mut line = |text: String, tone| lines.push((text, tone));
        if self.has_omitted() {
            let [connections, failed] =
                [self.connections_omitted, self.failed_omitted].map(grouped);
            let text = format!(
                "{connections} more connections and {failed} more failures are not listed: name Services, -n or a shorter --since"
            );
            line(text, Tone::Warn);
        }
        if self.edges.iter().any(|edge| edge.client.is_none()) {
            let text = "\"other clients\" are those for which agents had no room: each remembers 9,000 edges";
            line(text.to_owned(), Tone::Warn);
        }
        let lossy: Vec<&str> = self
            .partial
            .iter()
            .filter(|of| of.lost > 0)
            .map(|of| of.node.as_str())
            .collect();
        if !lossy.is_empty() {
            let text = "some connections are not counted: the kernel reported more than the agent could read or has room for, or \
                 net.netfilter.nf_conntrack_events was 0";
            line(format!("{}: {text}", names(lossy, 0)), Tone::Warn);
        }
        let is_young = |of: &&PartialView| of.seconds + 60 < self.since_seconds;
        let young: Vec<_> = self.partial.iter().filter(is_young).collect();
        if let Some(least) = young.iter().map(|of| of.seconds).min() {
            let nodes = names(young.iter().map(|of| of.node.as_str()), 0);
            let least = human(Duration::from_secs(least));
            let text = format!("{nodes}: counts for less time, {least} at least");
            line(text, Tone::Plain);
        }
        if self.edges.iter().any(|edge| edge.proxy) {
            let text = "userspace proxy: it takes these connections itself, so neither their endpoints nor their failures are known";
            line(text.to_owned(), Tone::Plain);
        }
        if !self.edges.is_empty() && self.edges.iter().all(|edge| edge.bytes_to_endpoint.is_none())
        {
            let text = "No bytes are known: net.netfilter.nf_conntrack_acct is 0 on nodes, or no connection has ended";
            line(text.to_owned(), Tone::Plain);
        }
        if !self.knows_pods {
            line(super::flows::NO_PODS.to_owned(), Tone::Plain);
        }
        lines
    }
}

/// Returns the edges of an answer, by client. An index that leads nowhere leaves its edge out.
fn edges(answer: &pb::GraphAnswer) -> Vec<EdgeView> {
    fn at<T>(all: &[T], index: u32) -> Option<&T> {
        all.get(usize::try_from(index).ok()?)
    }
    let edge = |edge: &pb::GraphEdge| {
        let client = at(&answer.clients, edge.client)?;
        let endpoint = at(&answer.endpoints, edge.endpoint)?;
        Some(EdgeView {
            client: FromWire::from_wire(client.address.clone()),
            client_kind: known(client.kind),
            client_name: FromWire::from_wire(client.name.clone()),
            port: at(&answer.ports, edge.port)?.clone().into(),
            endpoint: endpoint.address.clone(),
            endpoint_pod: FromWire::from_wire(endpoint.pod.clone()),
            endpoint_node: FromWire::from_wire(endpoint.node.clone()),
            proxy: endpoint.proxy,
            connections: edge.connections,
            failed: edge.failed,
            reset: edge.reset,
            bytes_to_endpoint: FromWire::from_wire(edge.bytes_to_endpoint),
            bytes_to_client: FromWire::from_wire(edge.bytes_to_client),
            seconds: edge.seconds,
            per_million_seconds: edge.per_million_s,
        })
    };
    let mut edges: Vec<EdgeView> = answer.edges.iter().filter_map(edge).collect();
    let mut of_clients = BTreeMap::<String, u64>::new();
    for edge in &edges {
        let sum = of_clients.entry(edge.client_text()).or_default();
        *sum = sum.saturating_add(edge.connections);
    }
    edges.sort_by_cached_key(|edge| {
        let client = edge.client_text();
        (
            Reverse(of_clients[&client]),
            client,
            Reverse(edge.connections),
        )
    });
    edges
}

impl EdgeView {
    fn client_text(&self) -> String {
        match &self.client {
            Some(address) => client(self.client_kind, self.client_name.as_deref(), address),
            None => "other clients".to_owned(),
        }
    }

    fn service_text(&self) -> String {
        let KeyView {
            namespace, service, ..
        } = &self.port;
        format!("{namespace}/{service} {}", port_text(&self.port))
    }

    fn endpoint_text(&self) -> String {
        match (self.proxy, &self.endpoint_pod) {
            (true, _) => "userspace proxy".to_owned(),
            (false, Some(pod)) => pod.clone(),
            (false, None) => self.endpoint.clone(),
        }
    }

    fn bytes(&self) -> Span {
        let ways = [self.bytes_to_endpoint, self.bytes_to_client];
        let sum = ways.into_iter().flatten().reduce(u64::saturating_add);
        bytes(sum)
    }
}

/// Returns connections a second, for a narrow column.
fn rate(per_million_seconds: u64) -> String {
    let hundredths = per_million_seconds / 10_000;
    match hundredths {
        0 if per_million_seconds > 0 => "<0.01".to_owned(),
        0..1_000 => format!("{}.{:02}", hundredths / 100, hundredths % 100),
        1_000..10_000 => format!("{}.{}", hundredths / 100, hundredths % 100 / 10),
        _ => grouped(hundredths / 100),
    }
}

/// Returns failures and their share. More may end than begin in a time.
fn failures(failed: u64, connections: u64) -> String {
    if failed == 0 {
        return "0".to_owned();
    }
    let percent = u128::from(failed) * 100 / u128::from(connections.max(failed));
    match percent {
        0 => format!("{} (<1%)", grouped(failed)),
        percent => format!("{} ({percent}%)", grouped(failed)),
    }
}

fn alarming(count: u64, text: String) -> Span {
    let tone = if count == 0 { Tone::Plain } else { Tone::Bad };
    Span::new(text, tone)
}

impl View for GraphView {
    fn text(&self, canvas: &Canvas) -> String {
        if self.edges.is_empty() && !self.has_omitted() {
            let nothing = paragraph(&Span::plain(self.nothing()), canvas, 0);
            return nothing + &self.nodes.text(canvas);
        }
        let mut out = long_field("Connections", &self.summary(), canvas);
        let table = Table::new(&self.edges)
            .text(Column::new("CLIENT").elastic(16), EdgeView::client_text)
            .text(Column::new("SERVICE").elastic(16), EdgeView::service_text)
            .text(Column::new("ENDPOINT").elastic(16), |one| {
                one.endpoint_text()
            })
            .text(Column::new("CONN/S"), |one| rate(one.per_million_seconds))
            .column(Column::new("FAILED"), |one| {
                alarming(one.failed, failures(one.failed, one.connections))
            })
            .column(Column::new("BYTES").optional(1), EdgeView::bytes)
            .text(Column::wide("CONNECTIONS"), |one| grouped(one.connections))
            .text(Column::wide("RESET"), |one| grouped(one.reset))
            .column(Column::wide("TO ENDPOINT"), |one| {
                bytes(one.bytes_to_endpoint)
            })
            .column(Column::wide("TO CLIENT"), |one| bytes(one.bytes_to_client))
            .text(Column::wide("CLIENT ADDRESS"), |one| {
                one.client.as_deref().unwrap_or_default()
            })
            .text(Column::wide("ENDPOINT ADDRESS"), |one| &one.endpoint)
            .text(Column::wide("ENDPOINT NODE"), |one| {
                one.endpoint_node.as_deref().unwrap_or_default()
            })
            .render(canvas);
        out.push('\n');
        out.push_str(&table);
        out.push_str(&self.nodes.below(&self.missing(), canvas));
        out
    }

    fn dot(&self) -> Option<String> {
        Some(self.graph().dot(&self.summary().text))
    }
}

#[cfg(test)]
mod tests;
