//! The Services with the most connections through userspace proxies, as a part of `kpctl top`.

use kplane_proto::v1 as pb;
use serde::Serialize;

use super::replicas::{MissingReplicaView, missing_text};
use super::silent::{self, SilentView};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, grouped, paragraph, plural};

/// A Service in the proxies of all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct ServiceView {
    namespace: String,
    name: String,
    open: u64,
    opened: u64,
    failed: u64,
    retries: u64,
    bytes_to_endpoints: u64,
    bytes_to_clients: u64,
    /// The number of nodes whose proxies serve it.
    nodes: u64,
}

/// The Services of all userspace proxies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct BusiestView {
    /// The Services, with the most open connections first.
    services: Vec<ServiceView>,
    services_omitted: u64,
    /// The number of nodes that have more ServicePorts than they name, so that sums may be too low.
    nodes_cut: u64,
    nodes_asked: u64,
    nodes_answered: u64,
    silent: Vec<SilentView>,
    silent_omitted: u64,
    missing_replicas: Vec<MissingReplicaView>,
}

impl From<pb::TopProxied> for BusiestView {
    fn from(top: pb::TopProxied) -> Self {
        let services = top.services.into_iter().map(|sum| ServiceView {
            namespace: sum.namespace,
            name: sum.name,
            open: sum.open,
            opened: sum.opened,
            failed: sum.failed,
            retries: sum.retries,
            bytes_to_endpoints: sum.bytes_to_endpoints,
            bytes_to_clients: sum.bytes_to_clients,
            nodes: sum.nodes,
        });
        Self {
            services: services.collect(),
            services_omitted: top.more,
            nodes_cut: top.cut,
            nodes_asked: top.asked,
            nodes_answered: top.answered,
            silent: SilentView::list(top.silent),
            silent_omitted: top.more_silent,
            missing_replicas: MissingReplicaView::list(top.missing_replicas),
        }
    }
}

impl BusiestView {
    /// Returns the table after an empty line, and the nodes that did not answer. Without any Service, there is no table,
    /// and at most one line about nodes without an answer.
    pub(crate) fn text(&self, canvas: &Canvas) -> String {
        let faint = |text: String| paragraph(&Span::new(text, Tone::Faint), canvas, 0);
        if self.services.is_empty() {
            let silent = self.nodes_asked.saturating_sub(self.nodes_answered);
            return match usize::try_from(silent).unwrap_or(usize::MAX) {
                0 => String::new(),
                silent => faint(format!(
                    "Userspace proxies of {} are unknown: -o json names the reasons.",
                    plural(silent, "node")
                )),
            };
        }
        let mut out = format!("\n{}", self.table(canvas));
        if self.nodes_cut > 0 {
            let nodes = plural(
                usize::try_from(self.nodes_cut).unwrap_or(usize::MAX),
                "node",
            );
            out.push_str(&faint(format!(
                "The sums may be too low: {nodes} named their busiest ports only."
            )));
        }
        out.push_str(&silent::text(&self.silent, self.silent_omitted, canvas));
        out.push_str(&missing_text(&self.missing_replicas, canvas));
        out
    }

    fn table(&self, canvas: &Canvas) -> String {
        let number = |number: u64| Span::plain(grouped(number));
        Table::new(&self.services)
            .column(Column::new("PROXIED SERVICE").elastic(12), |sum| {
                Span::plain(format!("{}/{}", sum.namespace, sum.name))
            })
            .column(Column::new("OPEN"), |sum| number(sum.open))
            .column(Column::new("OPENED"), |sum| number(sum.opened))
            .column(Column::new("FAILED"), |sum| {
                let tone = match sum.failed {
                    0 => Tone::Plain,
                    _ => Tone::Warn,
                };
                Span::new(grouped(sum.failed), tone)
            })
            .column(Column::new("RETRIES"), |sum| number(sum.retries))
            .column(Column::new("BYTES"), |sum| {
                number(sum.bytes_to_endpoints.saturating_add(sum.bytes_to_clients))
            })
            .column(Column::wide("TO ENDPOINTS"), |sum| {
                number(sum.bytes_to_endpoints)
            })
            .column(Column::wide("TO CLIENTS"), |sum| {
                number(sum.bytes_to_clients)
            })
            .column(Column::new("NODES"), |sum| number(sum.nodes))
            .render(canvas)
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::super::testing::{table, wide};
    use super::super::top::TopView;
    use super::*;

    fn service(name: &str, open: u64, failed: u64) -> pb::ProxiedService {
        pb::ProxiedService {
            namespace: "shop".to_owned(),
            name: name.to_owned(),
            open,
            opened: 40_000,
            failed,
            retries: 7,
            bytes_to_endpoints: 1_000,
            bytes_to_clients: 2_000_000,
            nodes: 3,
        }
    }

    fn top(proxied: pb::TopProxied) -> TopView {
        TopView::new(pb::Top {
            proxied: Some(proxied),
            ..pb::Top::default()
        })
    }

    #[test]
    fn u56_the_busiest_services_of_the_proxies_are_a_table_of_their_own() {
        let view = top(pb::TopProxied {
            services: vec![service("web", 1_200, 3), service("api", 1, 0)],
            cut: 2,
            asked: 4,
            answered: 3,
            silent: vec![pb::SilentNode {
                node: "n4".to_owned(),
                reason: "its agent is not connected".to_owned(),
            }],
            ..pb::TopProxied::default()
        });
        let text = table(&view);
        let start = text.find("PROXIED").unwrap();
        expect![[r#"
            PROXIED SERVICE  OPEN   OPENED  FAILED  RETRIES  BYTES      NODES
            shop/web         1,200  40,000  3       7        2,001,000  3
            shop/api         1      40,000  0       7        2,001,000  3
            The sums may be too low: 2 nodes named their busiest ports only.

            Unknown: n4: its agent is not connected
        "#]]
        .assert_eq(&text[start..]);
        let text = wide(&view);
        assert!(text.contains("TO ENDPOINTS"), "{text}");
        let json = serde_json::to_value(&view).unwrap();
        assert_eq!(json["proxied"]["services"][0]["open"], 1_200);
        assert_eq!(json["proxied"]["silent"][0]["node"], "n4");
    }

    #[test]
    fn without_a_proxy_that_serves_anything_there_is_no_table() {
        let nothing = pb::TopProxied {
            asked: 2,
            answered: 2,
            ..pb::TopProxied::default()
        };
        let text = table(&top(nothing.clone()));
        assert!(
            !text.contains("PROXIED") && !text.contains("unknown"),
            "{text}"
        );
        let text = table(&top(pb::TopProxied {
            answered: 1,
            ..nothing
        }));
        assert!(
            text.contains("Userspace proxies of 1 node are unknown"),
            "{text}"
        );
        let older = serde_json::to_value(TopView::new(pb::Top::default())).unwrap();
        assert!(older["proxied"].is_null());
    }
}
