//! Endpoints, usable or not.

use std::collections::HashSet;

use kplane_proto::v1 as pb;
use serde::Serialize;

use super::{API_VERSION, KeyView, List, View};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, none_text};

/// The conditions of an endpoint, as in an EndpointSlice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ConditionsView {
    pub(crate) ready: bool,
    pub(crate) serving: bool,
    pub(crate) terminating: bool,
}

/// One endpoint of one port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointView {
    /// Address and port.
    pub(crate) address: String,
    pub(crate) node: String,
    pub(crate) conditions: ConditionsView,
    pub(crate) zone_hints: Vec<String>,
    pub(crate) node_hints: Vec<String>,
}

impl EndpointView {
    /// Returns the conditions as one word.
    pub fn state(&self) -> Span {
        let conditions = self.conditions;
        match (conditions.ready, conditions.serving, conditions.terminating) {
            (true, true, false) => Span::new("Ready", Tone::Good),
            (true, _, _) => Span::new("Published", Tone::Warn),
            (false, true, true) => Span::new("Draining", Tone::Warn),
            (false, false, true) => Span::new("Terminating", Tone::Warn),
            (false, _, false) => Span::new("NotReady", Tone::Bad),
        }
    }

    /// Returns the hints for which clients should use the endpoint: `zone a,b` or `node n`.
    pub fn hints(&self) -> Span {
        let hints: Vec<_> = [("zone", &self.zone_hints), ("node", &self.node_hints)]
            .into_iter()
            .filter(|(_, names)| !names.is_empty())
            .map(|(kind, names)| format!("{kind}={}", names.join(",")))
            .collect();
        Span::plain(hints.join(" "))
    }
}

impl From<pb::EndpointView> for EndpointView {
    fn from(endpoint: pb::EndpointView) -> Self {
        Self {
            address: endpoint.address,
            node: endpoint.node,
            conditions: ConditionsView {
                ready: endpoint.ready,
                serving: endpoint.serving,
                terminating: endpoint.terminating,
            },
            zone_hints: endpoint.zone_hints,
            node_hints: endpoint.node_hints,
        }
    }
}

/// An endpoint with the port to which it belongs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OwnedEndpointView {
    #[serde(flatten)]
    pub(crate) key: KeyView,
    #[serde(flatten)]
    pub(crate) endpoint: EndpointView,
}

/// The view of `kpctl get endpoints`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointListView {
    api_version: &'static str,
    kind: &'static str,
    items: Vec<OwnedEndpointView>,
    /// The namespace, if the user asked for a single one.
    #[serde(skip)]
    namespace: Option<String>,
}

impl EndpointListView {
    /// Creates the view from the ports of all Services, or of those in one namespace.
    pub fn new(ports: Vec<pb::ServiceView>, namespace: Option<&str>) -> Self {
        let items = ports.into_iter().flat_map(|port| {
            let key = KeyView::from(port.key.unwrap_or_default());
            port.endpoints.into_iter().map(move |endpoint| OwnedEndpointView {
                key: key.clone(),
                endpoint: endpoint.into(),
            })
        });
        Self {
            api_version: API_VERSION,
            kind: "EndpointList",
            items: items.collect(),
            namespace: namespace.map(str::to_owned),
        }
    }
}

impl EndpointListView {
    /// Keeps the endpoints on a node.
    pub fn only_on(&mut self, node: &str) {
        self.items.retain(|item| item.endpoint.node == node);
    }
}

impl List for EndpointListView {
    type Item = OwnedEndpointView;

    fn items(&mut self) -> &mut Vec<OwnedEndpointView> {
        &mut self.items
    }
}

impl View for EndpointListView {
    fn names(&self) -> Option<Vec<String>> {
        let mut names: Vec<String> = self
            .items
            .iter()
            .map(|of| format!("endpoints/{}/{}", of.key.namespace, of.key.service))
            .collect();
        let mut seen = HashSet::new();
        names.retain(|name| seen.insert(name.clone()));
        Some(names)
    }

    fn text(&self, canvas: &Canvas) -> String {
        if self.items.is_empty() {
            return none_text("endpoints", self.namespace.as_deref());
        }
        let mut table = Table::new(&self.items);
        if self.namespace.is_none() {
            table = table.text(Column::new("NAMESPACE").elastic(9), |item| {
                &item.key.namespace
            });
        }
        table
            .text(Column::new("SERVICE").elastic(14), |item| &item.key.service)
            .column(
                Column::new("PORT").elastic(6).optional(1),
                |item| match item.key.port_name.as_str() {
                    "" => Span::plain(item.key.protocol),
                    name => Span::plain(name),
                },
            )
            .text(Column::new("ADDRESS"), |item| &item.endpoint.address)
            .text(
                Column::new("NODE").elastic(12).optional(2).names(),
                |item| &item.endpoint.node,
            )
            .column(Column::new("STATE"), |item| item.endpoint.state())
            .column(Column::wide("HINTS"), |item| item.endpoint.hints())
            .render(canvas)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_that_is_deleted_is_not_ready_although_its_address_is_published() {
        let state = |ready, serving, terminating| {
            let endpoint = EndpointView {
                address: String::new(),
                node: String::new(),
                conditions: ConditionsView {
                    ready,
                    serving,
                    terminating,
                },
                zone_hints: Vec::new(),
                node_hints: Vec::new(),
            };
            endpoint.state().text
        };
        assert_eq!(state(true, true, false), "Ready");
        assert_eq!(state(true, true, true), "Published");
        assert_eq!(state(true, false, false), "Published");
        assert_eq!(state(false, true, true), "Draining");
    }
}
