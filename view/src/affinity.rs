//! The clients that session affinity remembers.

use std::time::Duration;

use kplane_model::ServiceName;
use kplane_proto::v1 as pb;

use super::silent::AskedView;
use super::{KeyView, View};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, field, grouped, paragraph};
use crate::time::human;
use crate::wire::{FromWire, view_of};

view_of! {
    /// A client on a node.
    pub(crate) struct ClientView: NodeClient {
        client: String,
        node: String,
        port: Option<KeyView> = key,
        /// Address and port of its endpoint; empty while the kernel has only a part of it.
        endpoint: String,
        /// Time until the kernel forgets it; `null` if the kernel does not say it.
        expires_seconds: Option<u64> = expires_s,
    }

    /// The view of `kpctl get affinity`.
    pub struct AffinityView: AffinityAnswer as "Affinity" {
        namespace: String = _,
        name: String = _,
        clients: Vec<ClientView>,
        clients_omitted: u64 = more,
        /// Endpoints whose clients are not known of nodes in mode iptables: there are too many.
        endpoints_omitted: u64 = endpoints_left_out,
        #[serde(flatten)]
        asked: AskedView = _,
    }
}

impl AffinityView {
    /// Creates the view.
    pub fn new(of: &ServiceName, mut answer: pb::AffinityAnswer) -> Self {
        Self {
            asked: FromWire::from_wire(&mut answer),
            namespace: of.namespace.to_string(),
            name: of.name.to_string(),
            ..answer.into()
        }
    }

    /// Returns whether all nodes answered.
    pub fn is_complete(&self) -> bool {
        self.asked.is_complete()
    }

    fn summary(&self) -> Span {
        let nodes = self.asked.summary();
        let count = self.clients.len() as u64 + self.clients_omitted;
        Span::plain(format!("{} remembered; {nodes}", grouped(count)))
    }
}

impl View for AffinityView {
    fn text(&self, canvas: &Canvas) -> String {
        let service = Span::plain(format!("{}/{}", self.namespace, self.name));
        let mut out = field("Service", &[service], canvas);
        out.push_str(&field("Clients", &[self.summary()], canvas));
        if !self.clients.is_empty() {
            let table = Table::new(&self.clients)
                .text(Column::new("CLIENT"), |one| &one.client)
                .text(Column::new("NODE").elastic(12), |one| &one.node)
                .column(Column::new("PORT"), |one| {
                    let port = one.port.as_ref();
                    port.map_or_else(Span::none, |key| {
                        Span::plain(format!("{}/{}", key.port_name, key.protocol))
                    })
                })
                .text(Column::new("ENDPOINT"), |one| &one.endpoint)
                .column(Column::new("FORGOTTEN IN"), |one| {
                    one.expires_seconds.map_or_else(Span::none, |seconds| {
                        Span::plain(human(Duration::from_secs(seconds)))
                    })
                })
                .render(canvas);
            out.push('\n');
            out.push_str(&table);
        }
        if self.clients_omitted > 0 {
            let text = format!(
                "{} more clients: --client and --node ask for fewer",
                grouped(self.clients_omitted)
            );
            out.push_str(&paragraph(&Span::new(text, Tone::Warn), canvas, 0));
        }
        if self.endpoints_omitted > 0 {
            let text = format!(
                "Nodes in mode iptables were not asked for clients of {} endpoints: there are too many",
                grouped(self.endpoints_omitted)
            );
            out.push_str(&paragraph(&Span::new(text, Tone::Warn), canvas, 0));
        }
        out.push_str(&self.asked.text(canvas));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{has, table};
    use super::*;

    fn answer(silent: u64) -> pb::AffinityAnswer {
        pb::AffinityAnswer {
            clients: vec![pb::NodeClient {
                node: "n1".to_owned(),
                key: Some(pb::ServiceKey {
                    port_name: "http".to_owned(),
                    protocol: pb::Protocol::Tcp.into(),
                    ..pb::ServiceKey::default()
                }),
                client: "10.244.1.9".to_owned(),
                endpoint: "10.244.2.7:8080".to_owned(),
                expires_s: Some(600),
            }],
            asked: 2,
            answered: 2 - silent,
            silent: (0..silent)
                .map(|_| pb::SilentNode {
                    node: "n2".to_owned(),
                    reason: "its agent is not connected".to_owned(),
                })
                .collect(),
            ..pb::AffinityAnswer::default()
        }
    }

    #[test]
    fn clients_are_listed_and_missing_nodes_are_named() {
        let of = ServiceName::new("shop", "web");
        let view = AffinityView::new(&of, answer(1));
        assert!(!view.is_complete());
        let text = table(&view);
        for part in [
            "1 remembered; 1 of 2 nodes answered",
            "10.244.1.9  n1",
            "10.244.2.7:8080  10m",
            "Unknown: n2: its agent is not connected",
        ] {
            has(&text, part);
        }
        assert!(AffinityView::new(&of, answer(0)).is_complete());
    }
}
