//! The flows that lead to endpoints: what `kpctl drain-status` shows.

use std::time::Duration;

use kplane_proto::v1 as pb;
use serde::Serialize;

use super::silent::{AskedView, names};
use super::{API_VERSION, View, protocol};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, field, grouped, paragraph, plural};
use crate::time::human;
use crate::wire::{FromWire, view_of};

/// Whether endpoints may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum DrainVerdict {
    /// All nodes answered, and there are no flows.
    Safe,
    /// Nodes that answered have none, and some did not answer.
    Unknown,
    /// There are flows.
    Flows,
}

/// An endpoint with its flows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DrainEndpointView {
    /// Address and port, or an address if all ports count.
    address: String,
    /// `null` if all count.
    protocol: Option<&'static str>,
    node: String,
    terminating: bool,
    serving: bool,
    services: Vec<String>,
    /// Flows that nodes lead there, for a Service.
    flows: u64,
    /// Flows to its own address, through no Service.
    direct: u64,
    /// Nodes with flows, most flows first.
    nodes: Vec<DrainNodeView>,
    nodes_with_flows: u64,
    verdict: DrainVerdict,
}

view_of! {
    /// The flows of a node to an endpoint.
    pub(crate) struct DrainNodeView: DrainNode {
        node: String,
        flows: u64,
        /// Ages; `null` if the kernel keeps none.
        newest_seconds: Option<u64> = newest_s,
        oldest_seconds: Option<u64> = oldest_s,
        /// The kernel's table that has them.
        table: String,
    }
}

/// The view of `kpctl drain-status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DrainView {
    api_version: &'static str,
    kind: &'static str,
    subject: String,
    /// The answer for all endpoints together.
    pub verdict: DrainVerdict,
    endpoints: Vec<DrainEndpointView>,
    endpoints_omitted: u64,
    /// Endpoints that are not being shut down, and were not counted.
    others: u64,
    /// There may be flows on nodes that did not answer.
    #[serde(flatten)]
    asked: AskedView,
}

impl DrainView {
    /// Creates the view; `subject` names what was asked for. `terminating`: what is known of a Pod.
    pub fn new(subject: &str, mut status: pb::DrainStatus, terminating: Option<bool>) -> Self {
        let asked = AskedView::from_wire(&mut status);
        let unknown = status.more > 0 || !asked.is_complete();
        let endpoints: Vec<_> = status
            .endpoints
            .into_iter()
            .map(|endpoint| DrainEndpointView::new(endpoint, unknown, terminating))
            .collect();
        let verdicts = endpoints.iter().map(|endpoint| endpoint.verdict);
        Self {
            api_version: API_VERSION,
            kind: "DrainStatus",
            subject: subject.to_owned(),
            verdict: verdicts.max().unwrap_or(DrainVerdict::Safe),
            endpoints,
            endpoints_omitted: status.more,
            others: status.others,
            asked,
        }
    }

    /// Returns one line for a terminal, while `--wait` waits.
    pub fn short_line(&self) -> String {
        let flows: u64 = self.endpoints.iter().map(|endpoint| endpoint.flows).sum();
        format!(
            "{}: {} flows, {} of {} nodes answered",
            self.subject,
            grouped(flows),
            self.asked.nodes_answered,
            self.asked.nodes_asked
        )
    }

    /// Returns the line that says whether an endpoint may go.
    fn says(&self, endpoint: &DrainEndpointView) -> Span {
        let asked = grouped(self.asked.nodes_asked);
        let (text, tone) = match endpoint.verdict {
            DrainVerdict::Flows => {
                let named = endpoint.nodes.len() as u64;
                let omitted = endpoint.nodes_with_flows.saturating_sub(named);
                let nodes = endpoint.nodes.iter().map(|node| &*node.node);
                let text = format!(
                    "{} on {}: not yet",
                    plural_flows(endpoint.flows),
                    names(nodes, omitted)
                );
                (text, Tone::Warn)
            }
            DrainVerdict::Unknown => {
                let AskedView {
                    nodes_asked,
                    nodes_answered,
                    silent,
                    silent_omitted,
                    ..
                } = &self.asked;
                let answered = grouped(*nodes_answered);
                let named = silent.iter().map(|silent| &*silent.node);
                let who = match (silent.is_empty(), nodes_asked) {
                    (_, 0) => "no node is known".to_owned(),
                    (true, _) => "not everything was counted".to_owned(),
                    (false, _) => format!("{} did not answer", names(named, *silent_omitted)),
                };
                (
                    format!("0 flows on {answered} of {asked} nodes, and {who}: unknown"),
                    Tone::Bad,
                )
            }
            DrainVerdict::Safe if endpoint.terminating => (
                format!("0 flows on all {asked} nodes: safe to delete"),
                Tone::Good,
            ),
            DrainVerdict::Safe => (
                format!(
                    "0 flows on all {asked} nodes now; it is not being shut down, so new ones may come"
                ),
                Tone::Good,
            ),
        };
        let direct = match endpoint.direct {
            0 => String::new(),
            direct => format!(
                "; {} to its own address, through no Service",
                plural_flows(direct)
            ),
        };
        Span::new(text + &direct, tone)
    }
}

fn plural_flows(count: u64) -> String {
    let s = if count == 1 { "" } else { "s" };
    format!("{} flow{s}", grouped(count))
}

impl DrainEndpointView {
    fn new(endpoint: pb::DrainEndpoint, unknown: bool, terminating: Option<bool>) -> Self {
        let protocol = match endpoint.protocol() {
            pb::Protocol::Unspecified => None,
            named => Some(protocol(named)),
        };
        Self {
            verdict: match (endpoint.flows, unknown) {
                (1.., _) => DrainVerdict::Flows,
                (0, true) => DrainVerdict::Unknown,
                (0, false) => DrainVerdict::Safe,
            },
            protocol,
            address: endpoint.address,
            node: endpoint.node,
            terminating: terminating.unwrap_or(endpoint.terminating),
            serving: endpoint.serving,
            services: endpoint.services,
            flows: endpoint.flows,
            direct: endpoint.direct,
            nodes: FromWire::from_wire(endpoint.nodes),
            nodes_with_flows: endpoint.nodes_with_flows,
        }
    }

    fn place(&self) -> Span {
        match self.protocol {
            Some(protocol) => Span::plain(format!("{} {protocol}", self.address)),
            None => Span::plain(format!("{}, all ports", self.address)),
        }
    }

    fn ages(&self, of: fn(&DrainNodeView) -> Option<u64>, newest: bool) -> Span {
        let ages = self.nodes.iter().filter_map(of);
        let age = if newest { ages.min() } else { ages.max() };
        age.map_or_else(Span::none, |age| {
            Span::plain(human(Duration::from_secs(age)))
        })
    }
}

impl View for DrainView {
    fn text(&self, canvas: &Canvas) -> String {
        let mut out = field("Subject", &[Span::plain(&self.subject)], canvas);
        let (asked, answered) = (self.asked.nodes_asked, self.asked.nodes_answered);
        if !self.endpoints.is_empty() {
            let nodes = format!("{} of {} answered", grouped(answered), grouped(asked));
            let tone = if asked > answered {
                Tone::Bad
            } else {
                Tone::Plain
            };
            out.push_str(&field("Nodes", &[Span::new(nodes, tone)], canvas));
        }
        if self.endpoints.is_empty() {
            let others = usize::try_from(self.others).unwrap_or(usize::MAX);
            let text = match others {
                0 => "It has no endpoints.".to_owned(),
                others => format!(
                    "No endpoint is being shut down. --all counts the flows of {} as well.",
                    plural(others, "endpoint")
                ),
            };
            out.push_str(&paragraph(&Span::new(text, Tone::Good), canvas, 0));
            return out;
        }
        let table = Table::new(&self.endpoints)
            .column(Column::new("ENDPOINT"), DrainEndpointView::place)
            .text(Column::new("NODE").elastic(12), |one| &one.node)
            .text(Column::new("FLOWS"), |one| grouped(one.flows))
            .column(Column::new("NEWEST"), |one| {
                one.ages(|node| node.newest_seconds, true)
            })
            .column(Column::new("OLDEST"), |one| {
                one.ages(|node| node.oldest_seconds, false)
            })
            .text(Column::wide("SERVICES"), |one| one.services.join(", "))
            .notes(|one| vec![self.says(one)])
            .render(canvas);
        out.push('\n');
        out.push_str(&table);
        if self.endpoints_omitted > 0 {
            let text = format!(
                "{} more endpoints were not counted: ask for a Service of them",
                grouped(self.endpoints_omitted)
            );
            out.push_str(&paragraph(&Span::new(text, Tone::Bad), canvas, 0));
        }
        out.push_str(&self.asked.text(canvas));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::table;
    use super::*;

    fn status(flows: u64, answered: u64) -> pb::DrainStatus {
        let node = pb::DrainNode {
            node: "n2".to_owned(),
            flows,
            oldest_s: Some(90),
            ..pb::DrainNode::default()
        };
        pb::DrainStatus {
            endpoints: vec![pb::DrainEndpoint {
                address: "10.0.0.5:8080".to_owned(),
                protocol: pb::Protocol::Tcp.into(),
                node: "n1".to_owned(),
                terminating: true,
                flows,
                nodes: if flows > 0 { vec![node] } else { Vec::new() },
                nodes_with_flows: flows.min(1),
                ..pb::DrainEndpoint::default()
            }],
            asked: 3,
            answered,
            silent: (answered..3)
                .map(|n| pb::SilentNode {
                    node: format!("n{n}"),
                    reason: "its agent is not connected".to_owned(),
                })
                .collect(),
            ..pb::DrainStatus::default()
        }
    }

    #[test]
    fn a_node_without_an_answer_is_never_empty() {
        for (flows, answered, verdict, says) in [
            (
                0,
                3,
                DrainVerdict::Safe,
                "0 flows on all 3 nodes: safe to delete",
            ),
            (
                0,
                2,
                DrainVerdict::Unknown,
                "0 flows on 2 of 3 nodes, and n2 did not answer: unknown",
            ),
            (1, 3, DrainVerdict::Flows, "1 flow on n2: not yet"),
            (2, 2, DrainVerdict::Flows, "2 flows on n2: not yet"),
        ] {
            let view = DrainView::new("shop/web", status(flows, answered), None);
            assert_eq!(view.verdict, verdict);
            let text = table(&view);
            assert!(text.contains(says), "no {says:?}:\n{text}");
            let named = text.contains("Unknown: n2: its agent is not connected");
            assert_eq!(named, answered < 3, "{text}");
        }
        let nobody = pb::DrainStatus {
            asked: 0,
            ..status(0, 0)
        };
        let view = DrainView::new("shop/web", nobody, None);
        assert_eq!(view.verdict, DrainVerdict::Unknown);
    }

    #[test]
    fn a_service_without_terminating_endpoints_says_how_to_see_more() {
        let status = pb::DrainStatus {
            others: 2,
            ..pb::DrainStatus::default()
        };
        let view = DrainView::new("shop/web", status, None);
        assert_eq!(view.verdict, DrainVerdict::Safe);
        assert!(table(&view).contains("--all"));
    }
}
