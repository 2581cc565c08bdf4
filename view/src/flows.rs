//! Who is connected to a Service: what `kpctl get flows` shows.

use std::collections::BTreeSet;
use std::time::Duration;

use kplane_model::ServiceName;
use kplane_proto::v1::{self as pb, ClientKind, ConnectionTable};
use serde::Serialize;

use super::silent::{AskedView, names};
use super::{KeyView, View};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, field, grouped, paragraph, plural};
use crate::time::human;
use crate::wire::{FromWire, known_name, view_of};

/// The line below lists whose Pods have no names.
pub(crate) const NO_PODS: &str = "Pods have no names here: nodes enforce no NetworkPolicies, so the control plane does not watch Pods";

/// The connections of one client through one port to one endpoint, on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct FlowView {
    /// The node whose rules lead them.
    node: String,
    port: KeyView,
    /// Address of the client.
    client: String,
    #[serde(serialize_with = "known_name")]
    client_kind: ClientKind,
    /// The Pod as NAMESPACE/NAME, or the node; `null` = not known.
    client_name: Option<String>,
    /// Address and port.
    endpoint: String,
    endpoint_pod: Option<String>,
    endpoint_node: Option<String>,
    #[serde(serialize_with = "known_name")]
    table: ConnectionTable,
    connections: u64,
    established: u64,
    unreplied: u64,
    handshake: u64,
    closing: u64,
    /// Ages; `null` if the table keeps no times.
    newest_seconds: Option<u64>,
    oldest_seconds: Option<u64>,
    /// Counts of what is open now; `null` if the table keeps none.
    bytes_to_endpoint: Option<u64>,
    bytes_to_client: Option<u64>,
    packets_to_endpoint: Option<u64>,
    packets_to_client: Option<u64>,
}

impl FromWire<pb::NodeFlow> for FlowView {
    fn from_wire(flow: pb::NodeFlow) -> Self {
        let client_kind = flow.client_kind();
        let group = flow.group.unwrap_or_default();
        let counts = [
            group.established,
            group.unreplied,
            group.handshake,
            group.closing,
        ];
        Self {
            table: group.table(),
            node: flow.node,
            port: FromWire::from_wire(flow.key),
            client: group.client,
            client_kind,
            client_name: FromWire::from_wire(flow.client_name),
            endpoint: group.endpoint,
            endpoint_pod: FromWire::from_wire(flow.endpoint_pod),
            endpoint_node: FromWire::from_wire(flow.endpoint_node),
            connections: counts.into_iter().fold(0, u64::saturating_add),
            established: group.established,
            unreplied: group.unreplied,
            handshake: group.handshake,
            closing: group.closing,
            newest_seconds: group.newest_s,
            oldest_seconds: group.oldest_s,
            bytes_to_endpoint: group.bytes_to_endpoint,
            bytes_to_client: group.bytes_to_client,
            packets_to_endpoint: group.packets_to_endpoint,
            packets_to_client: group.packets_to_client,
        }
    }
}

view_of! {
    /// The view of `kpctl get flows`.
    pub struct FlowsView: FlowsAnswer as "Flows" {
        namespace: String = _,
        name: String = _,
        /// The clients, endpoints and node that were asked for; `null` = all.
        from: Option<String> = _,
        to: Option<String> = _,
        only_node: Option<String> = _,
        /// Those with the most connections first.
        flows: Vec<FlowView>,
        /// Number of connections that are not listed.
        connections_omitted: u64 = more,
        /// Number of connections that are not listed, and may not be of these clients and endpoints.
        connections_unchecked: u64 = unchecked,
        /// Number of the Service's ports that were not asked for.
        ports_omitted: u64 = ports_left_out,
        has_endpoints: bool,
        knows_pods: bool,
        nodes: AskedView,
    }
}

impl FlowsView {
    /// Creates the view of an answer.
    pub fn new(of: &ServiceName, request: &pb::FlowsRequest, answer: pb::FlowsAnswer) -> Self {
        let asked = |text: &String| FromWire::from_wire(text.clone());
        Self {
            namespace: of.namespace.to_string(),
            name: of.name.to_string(),
            from: asked(&request.from),
            to: asked(&request.to),
            only_node: asked(&request.node),
            ..answer.into()
        }
    }

    /// Returns whether all nodes answered.
    pub fn is_complete(&self) -> bool {
        self.nodes.is_complete()
    }

    fn summary(&self) -> Span {
        let connections = self
            .flows
            .iter()
            .map(|flow| flow.connections)
            .fold(self.connections_omitted, u64::saturating_add);
        let distinct = |of: fn(&FlowView) -> &str| {
            let all: BTreeSet<&str> = self.flows.iter().map(of).collect();
            all.len()
        };
        let (all, ends) = match (self.connections_unchecked, self.connections_omitted) {
            (0, 0) => ("", ""),
            (0, _) => ("", "at least "),
            _ => ("at least ", ""),
        };
        Span::plain(format!(
            "{all}{} open, from {ends}{} to {}; {}",
            grouped(connections),
            plural(distinct(|flow| &flow.client), "client"),
            plural(distinct(|flow| &flow.endpoint), "endpoint"),
            self.nodes.summary()
        ))
    }

    /// Returns why the list is empty, and what to do next.
    fn nothing(&self) -> String {
        let of = format!("{}/{}", self.namespace, self.name);
        let answered = self.nodes.summary();
        let asked = [&self.from, &self.to, &self.only_node];
        let next = if !self.has_endpoints {
            format!(
                "The Service has no endpoint that takes connections: kpctl describe service {of} says why."
            )
        } else if asked.iter().any(|of| of.is_some()) {
            "Without --from, --to and --node all connections are listed.".to_owned()
        } else {
            format!(
                "Short connections may be over before a question: -w asks again every 2 s. kpctl probe {of} lets all nodes \
                 connect. Connections to a Pod's own address are not of the Service."
            )
        };
        format!("No client is connected; {answered}. {next}")
    }

    /// Returns what is missing in the list, and why.
    fn missing(&self) -> Vec<(String, Tone)> {
        let mut lines = Vec::new();
        if self.connections_omitted > 0 {
            let connections = grouped(self.connections_omitted);
            lines.push((
                format!("{connections} more connections: --from, --to and --node ask for fewer"),
                Tone::Warn,
            ));
        }
        if self.connections_unchecked > 0 {
            let connections = grouped(self.connections_unchecked);
            let text = format!(
                "{connections} more connections were not compared with --from and --to: ask single nodes, with --node"
            );
            lines.push((text, Tone::Warn));
        }
        if self.ports_omitted > 0 {
            let ports = grouped(self.ports_omitted);
            let text = format!("{ports} ports were not asked for: there are too many");
            lines.push((text, Tone::Warn));
        }
        let without = |table: ConnectionTable, lacks: fn(&FlowView) -> bool| {
            let flows = self.flows.iter().filter(|flow| flow.table == table);
            let nodes: BTreeSet<&str> =
                flows.filter(|flow| lacks(flow)).map(|flow| flow.node.as_str()).collect();
            (!nodes.is_empty()).then(|| names(nodes, 0))
        };
        let no_bytes = |flow: &FlowView| flow.bytes_to_endpoint.is_none();
        let no_ages = |flow: &FlowView| flow.oldest_seconds.is_none();
        for (nodes, text) in [
            (
                without(ConnectionTable::Conntrack, no_bytes),
                "no bytes are counted: net.netfilter.nf_conntrack_acct is 0, or was when connections began",
            ),
            (
                without(ConnectionTable::Conntrack, no_ages),
                "no ages are kept: net.netfilter.nf_conntrack_timestamp is 0, or was when connections began",
            ),
            (
                without(ConnectionTable::Ipvs, |_| true),
                "IPVS keeps neither ages nor bytes of connections",
            ),
        ] {
            lines.extend(nodes.map(|nodes| (format!("{nodes}: {text}"), Tone::Plain)));
        }
        if !self.knows_pods {
            lines.push((NO_PODS.to_owned(), Tone::Plain));
        }
        lines
    }
}

impl FlowView {
    fn client(&self) -> Span {
        let name = self.client_name.as_deref();
        Span::plain(client(self.client_kind, name, &self.client))
    }

    fn endpoint(&self) -> Span {
        Span::plain(self.endpoint_pod.as_deref().unwrap_or(&self.endpoint))
    }

    fn port(&self) -> Span {
        Span::plain(port_text(&self.port))
    }

    fn state(&self) -> Span {
        let states = [
            (self.established, "established"),
            (self.unreplied, "unreplied"),
            (self.handshake, "handshake"),
            (self.closing, "closing"),
        ];
        let some: Vec<_> = states.iter().filter(|(count, _)| *count > 0).collect();
        let text = match some.as_slice() {
            [(_, only)] => (*only).to_owned(),
            some => some
                .iter()
                .map(|(count, state)| format!("{} {state}", grouped(*count)))
                .collect::<Vec<_>>()
                .join(", "),
        };
        let tone = match self.unreplied {
            0 => Tone::Plain,
            _ => Tone::Warn,
        };
        Span::new(text, tone)
    }

    fn table(&self) -> &'static str {
        match self.table {
            ConnectionTable::Conntrack => "conntrack",
            ConnectionTable::Ipvs => "IPVS",
            ConnectionTable::Proxy => "proxy",
            ConnectionTable::Unspecified => "unknown",
        }
    }
}

/// Returns a client as people name it.
pub(crate) fn client(kind: ClientKind, name: Option<&str>, address: &str) -> String {
    let name = name.unwrap_or_default();
    match kind {
        ClientKind::Pod => name.to_owned(),
        ClientKind::Node => format!("node/{name}"),
        ClientKind::PodOnNode => format!("{address} (Pod on {name})"),
        ClientKind::Outside => format!("{address} (outside)"),
        ClientKind::Unspecified => address.to_owned(),
    }
}

/// Returns a port of a Service within it, such as `http/TCP`.
pub(crate) fn port_text(key: &KeyView) -> String {
    match key.port_name.as_str() {
        "" => key.protocol.to_owned(),
        name => format!("{name}/{}", key.protocol),
    }
}

fn age(seconds: Option<u64>) -> Span {
    seconds.map_or_else(Span::none, |seconds| {
        Span::plain(human(Duration::from_secs(seconds)))
    })
}

pub(crate) fn bytes(count: Option<u64>) -> Span {
    count.map_or_else(Span::none, |count| Span::plain(size(count)))
}

/// Returns a number of bytes for a narrow column.
fn size(count: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = units.iter().find(|(_, bits)| count >> bits > 0);
    match unit {
        None => format!("{count} B"),
        Some((unit, bits)) => {
            let tenths = (u128::from(count) * 10) >> bits;
            match tenths {
                0..1_000 => format!("{}.{} {unit}", tenths / 10, tenths % 10),
                _ => format!("{} {unit}", tenths / 10),
            }
        }
    }
}

impl View for FlowsView {
    fn text(&self, canvas: &Canvas) -> String {
        let service = Span::plain(format!("{}/{}", self.namespace, self.name));
        let mut out = field("Service", &[service], canvas);
        if self.flows.is_empty() && self.connections_omitted.max(self.connections_unchecked) == 0 {
            out.push_str(&paragraph(&Span::plain(self.nothing()), canvas, 0));
            out.push_str(&self.nodes.text(canvas));
            return out;
        }
        out.push_str(&field("Connections", &[self.summary()], canvas));
        let both = |one: Option<u64>, other: Option<u64>| Some(one?.saturating_add(other?));
        let packets =
            |count: Option<u64>| count.map_or_else(Span::none, |count| Span::plain(grouped(count)));
        let table = Table::new(&self.flows)
            .column(Column::new("CLIENT").elastic(16), FlowView::client)
            .column(Column::new("ENDPOINT").elastic(16), FlowView::endpoint)
            .column(Column::new("PORT").optional(2), FlowView::port)
            .text(Column::new("OPEN"), |one| grouped(one.connections))
            .column(Column::new("STATE").elastic(11), FlowView::state)
            .column(Column::new("OLDEST").optional(1), |one| {
                age(one.oldest_seconds)
            })
            .column(Column::new("BYTES").optional(3), |one| {
                bytes(both(one.bytes_to_endpoint, one.bytes_to_client))
            })
            .text(Column::new("NODE").elastic(10), |one| &one.node)
            .text(Column::wide("CLIENT ADDRESS"), |one| &one.client)
            .text(Column::wide("ENDPOINT ADDRESS"), |one| &one.endpoint)
            .column(Column::wide("NEWEST"), |one| age(one.newest_seconds))
            .column(Column::wide("TO ENDPOINT"), |one| {
                bytes(one.bytes_to_endpoint)
            })
            .column(Column::wide("TO CLIENT"), |one| bytes(one.bytes_to_client))
            .column(Column::wide("PACKETS TO ENDPOINT"), |one| {
                packets(one.packets_to_endpoint)
            })
            .column(Column::wide("PACKETS TO CLIENT"), |one| {
                packets(one.packets_to_client)
            })
            .text(Column::wide("TABLE"), FlowView::table)
            .render(canvas);
        out.push('\n');
        out.push_str(&table);
        out.push_str(&self.nodes.below(&self.missing(), canvas));
        out
    }
}

#[cfg(test)]
mod tests;
