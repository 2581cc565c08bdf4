//! A Service in the userspace proxies of nodes.

use std::collections::BTreeMap;
use std::time::Duration;

use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use serde::Serialize;

use super::silent::{AskedView, names};
use super::{KeyView, View};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, field, grouped, paragraph, plural};
use crate::time::human;
use crate::wire::{FromWire, view_of};

/// Maximum number of endpoints that are named because nodes avoid them.
const AVOIDED: usize = 20;

view_of! {
    /// An endpoint in the proxy of one node.
    pub(crate) struct EndpointView: ProxiedEndpoint {
        address: String,
        open: u32,
        /// Time for which new connections still avoid it; `null` if they do not.
        avoided_seconds: Option<u64> = avoided_ms => |ms: Option<u64>| ms.map(|ms| ms.div_ceil(1_000)),
    }
}

/// A ServicePort in the proxy of one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ProxiedPortView {
    node: String,
    port: KeyView,
    open: u64,
    opened: u64,
    /// Number of clients that reached no endpoint, by reason.
    failed: BTreeMap<String, u64>,
    retries: u64,
    bytes_to_endpoints: u64,
    bytes_to_clients: u64,
    /// Mean time until an endpoint had answered, in microseconds; `null` without connections.
    connect_microseconds: Option<u64>,
    endpoints: Vec<EndpointView>,
    endpoints_omitted: u64,
}

view_of! {
    /// The view of `kpctl get proxied`.
    pub struct ProxiedView: ProxiedAnswer as "Proxied" {
        namespace: String = _,
        name: String = _,
        ports: Vec<ProxiedPortView> => |ports| ports.into_iter().filter_map(port).collect(),
        ports_omitted: u64 = more,
        nodes: AskedView,
    }
}

fn port(of: pb::NodeProxied) -> Option<ProxiedPortView> {
    let port = of.port?;
    let failed = port.failed.into_iter();
    Some(ProxiedPortView {
        node: of.node,
        port: KeyView::from(port.key?),
        open: port.open,
        opened: port.opened,
        failed: failed.map(|failed| (failed.reason, failed.count)).collect(),
        retries: port.retries,
        bytes_to_endpoints: port.bytes_to_endpoints,
        bytes_to_clients: port.bytes_to_clients,
        connect_microseconds: port.connect_us.checked_div(port.opened),
        endpoints: FromWire::from_wire(port.endpoints),
        endpoints_omitted: port.more_endpoints,
    })
}

impl ProxiedView {
    /// Creates the view.
    pub fn new(of: &ServiceName, answer: pb::ProxiedAnswer) -> Self {
        Self {
            namespace: of.namespace.to_string(),
            name: of.name.to_string(),
            ..answer.into()
        }
    }

    /// Returns whether all nodes answered.
    pub fn is_complete(&self) -> bool {
        self.nodes.is_complete()
    }

    pub(crate) fn summary(&self) -> Span {
        let answered = self.nodes.summary();
        if self.ports.is_empty() {
            return Span::plain(format!(
                "No node's userspace proxy serves it; {answered}. The annotation kplane.io/data-path asks for it"
            ));
        }
        let open: u64 = self.ports.iter().map(|port| port.open).sum();
        let failed: u64 = self.ports.iter().flat_map(|port| port.failed.values()).sum();
        let tone = if failed > 0 { Tone::Warn } else { Tone::Plain };
        let text = format!(
            "{} open, {} failed; {answered}",
            grouped(open),
            grouped(failed)
        );
        Span::new(text, tone)
    }

    /// Returns the endpoints that new connections avoid, with the nodes; those of most nodes first.
    fn avoided(&self) -> Vec<(&str, Vec<&str>)> {
        let mut avoided: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for port in &self.ports {
            for endpoint in
                port.endpoints.iter().filter(|endpoint| endpoint.avoided_seconds.is_some())
            {
                let nodes = avoided.entry(&endpoint.address).or_default();
                if nodes.last() != Some(&port.node.as_str()) {
                    nodes.push(&port.node);
                }
            }
        }
        let mut avoided: Vec<_> = avoided.into_iter().collect();
        avoided.sort_by_key(|(_, nodes)| std::cmp::Reverse(nodes.len()));
        avoided
    }

    pub(crate) fn avoided_text(&self, canvas: &Canvas) -> String {
        let avoided = self.avoided();
        let lines = avoided.iter().take(AVOIDED).map(|(endpoint, nodes)| {
            let on = names(nodes.iter().copied().take(AVOIDED), 0);
            let text = format!(
                "{endpoint} fails: {} avoid{} it ({on})",
                plural(nodes.len(), "node"),
                if nodes.len() == 1 { "s" } else { "" }
            );
            paragraph(&Span::new(text, Tone::Warn), canvas, 0)
        });
        let mut out: String = lines.collect();
        if let Some(more @ 1..) = avoided.len().checked_sub(AVOIDED) {
            let text = format!("{} more are avoided", plural(more, "endpoint"));
            out.push_str(&paragraph(&Span::new(text, Tone::Warn), canvas, 0));
        }
        out
    }
}

impl View for ProxiedView {
    fn text(&self, canvas: &Canvas) -> String {
        let service = Span::plain(format!("{}/{}", self.namespace, self.name));
        let mut out = field("Service", &[service], canvas);
        out.push_str(&field("Connections", &[self.summary()], canvas));
        if !self.ports.is_empty() {
            out.push('\n');
            out.push_str(&table(&self.ports, canvas));
        }
        if self.ports_omitted > 0 {
            let more = grouped(self.ports_omitted);
            let text = format!("{more} more lines: --node asks for fewer");
            out.push_str(&paragraph(&Span::new(text, Tone::Warn), canvas, 0));
        }
        out.push_str(&self.avoided_text(canvas));
        out.push_str(&self.nodes.text(canvas));
        out
    }
}

fn table(ports: &[ProxiedPortView], canvas: &Canvas) -> String {
    let number = |number: u64| Span::plain(grouped(number));
    Table::new(ports)
        .column(Column::new("PORT"), |one| {
            let key = &one.port;
            Span::plain(format!("{}/{} {}", key.port_name, key.protocol, key.family))
        })
        .text(Column::new("NODE").elastic(12), |one| &one.node)
        .column(Column::new("OPEN"), |one| number(one.open))
        .column(Column::new("OPENED"), |one| number(one.opened))
        .column(Column::new("FAILED"), |one| {
            let parts: Vec<_> = one
                .failed
                .iter()
                .map(|(reason, count)| format!("{} {reason}", grouped(*count)))
                .collect();
            if parts.is_empty() {
                number(0)
            } else {
                Span::new(parts.join(", "), Tone::Warn)
            }
        })
        .column(Column::new("RETRIES"), |one| number(one.retries))
        .column(Column::new("CONNECT"), |one| {
            one.connect_microseconds.map_or_else(Span::none, |us| {
                Span::plain(human(Duration::from_micros(us)))
            })
        })
        .column(Column::wide("TO ENDPOINTS"), |one| {
            number(one.bytes_to_endpoints)
        })
        .column(Column::wide("TO CLIENTS"), |one| {
            number(one.bytes_to_clients)
        })
        .column(Column::wide("ENDPOINTS"), |one| {
            let each: Vec<_> = one
                .endpoints
                .iter()
                .map(|endpoint| format!("{} ({})", endpoint.address, endpoint.open))
                .collect();
            Span::plain(each.join(", "))
        })
        .render(canvas)
}

#[cfg(test)]
mod tests {
    use super::super::describe::DescriptionView;
    use super::super::testing::{has, table, wide};
    use super::*;

    fn of_node(node: &str, avoided_ms: Option<u64>) -> pb::NodeProxied {
        pb::NodeProxied {
            node: node.to_owned(),
            port: Some(pb::ProxiedPort {
                key: Some(pb::ServiceKey {
                    port_name: "http".to_owned(),
                    protocol: pb::Protocol::Tcp.into(),
                    family: pb::Family::Ipv4.into(),
                    ..pb::ServiceKey::default()
                }),
                open: 12,
                opened: 4_000,
                failed: vec![pb::ProxiedFailure {
                    reason: "silent".to_owned(),
                    count: 3,
                }],
                retries: 7,
                connect_us: 4_000 * 350,
                endpoints: vec![pb::ProxiedEndpoint {
                    address: "10.244.2.7:8080".to_owned(),
                    open: 12,
                    avoided_ms,
                }],
                ..pb::ProxiedPort::default()
            }),
        }
    }

    fn answer(ports: Vec<pb::NodeProxied>) -> pb::ProxiedAnswer {
        pb::ProxiedAnswer {
            ports,
            nodes: Some(kpctl_samples::asked(2, 2)),
            ..pb::ProxiedAnswer::default()
        }
    }

    #[test]
    fn an_endpoint_that_nodes_avoid_is_named_with_them() {
        let of = ServiceName::new("shop", "web");
        let ports = vec![of_node("n1", Some(11_200)), of_node("n2", Some(900))];
        let view = ProxiedView::new(&of, answer(ports));
        assert!(view.is_complete());
        let text = table(&view);
        for part in [
            "24 open, 6 failed; 2 of 2 nodes answered",
            "http/TCP IPv4  n1    12    4,000   3 silent  7        350us",
            "10.244.2.7:8080 fails: 2 nodes avoid it (n1, n2)",
        ] {
            has(&text, part);
        }
        assert!(wide(&view).contains("10.244.2.7:8080 (12)"));
        let json = serde_json::to_value(&view).unwrap();
        assert_eq!(json["ports"][0]["endpoints"][0]["avoidedSeconds"], 12);
        assert_eq!(json["ports"][0]["failed"]["silent"], 3);
    }

    #[test]
    fn u56_the_description_of_a_service_that_asks_sums_up() {
        let of = ServiceName::new("shop", "web");
        let mut description = DescriptionView::new("shop", "web", kpctl_samples::description());
        assert!(description.asks_for_proxy());
        let ports = vec![of_node("n1", Some(11_200)), of_node("n2", None)];
        description.set_proxied(Ok(ProxiedView::new(&of, answer(ports))));
        let text = table(&description);
        for part in [
            "Proxies         24 open, 6 failed; 2 of 2 nodes answered\n",
            "10.244.2.7:8080 fails: 1 node avoids it (n1)\n",
        ] {
            has(&text, part);
        }
        let mut description = DescriptionView::new("shop", "web", kpctl_samples::description());
        description.set_proxied(Err("no such method".to_owned()));
        let text = table(&description);
        has(&text, "Proxies         not known: no such method; try");
    }

    #[test]
    fn a_service_of_the_kernel_is_said_to_be_one() {
        let of = ServiceName::new("shop", "web");
        let text = table(&ProxiedView::new(&of, answer(Vec::new())));
        has(&text, "No node's userspace proxy serves it");
    }
}
