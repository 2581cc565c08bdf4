//! The fleet as squares: one a node, by zone, in the colour of its state or of what its agent reports besides.

use std::fmt;

use kplane_view::nodes::state::NodeStateView;
use kplane_view::style::Tone;
use kplane_view::text::plural;

use super::html::{Html, Section, class};
use super::terminal;
use crate::findings::Remarks;
use crate::server::Overview;

/// Most squares on the sheet: those of 5,000 nodes fit on a screen.
const SQUARES: usize = 5_000;

/// Most codes of reasons in a square's title.
const CODES: usize = 4;

/// A node of a zone.
struct Square<'a> {
    node: &'a str,
    state: NodeStateView,
    remarks: &'a Remarks,
}

impl Square<'_> {
    fn tone(&self) -> Tone {
        tone(self.state, self.remarks)
    }

    /// Returns the urgency of the state: nodes that are not as they should be come before those that are.
    fn urgency(&self) -> (u8, u8) {
        let tone = match self.tone() {
            Tone::Bad => 0,
            Tone::Good => 2,
            _ => 1,
        };
        (tone, self.state.urgency())
    }

    fn title(&self) -> String {
        let codes = self.remarks.codes.iter().take(CODES).map(String::as_str);
        let parts = [self.state.word()].into_iter().chain(codes);
        format!("{}: {}", self.node, parts.collect::<Vec<_>>().join(", "))
    }
}

/// Returns the tone of a node in a state, of which its agent has reported something besides.
pub(super) fn tone(state: NodeStateView, remarks: &Remarks) -> Tone {
    match state.tone() {
        Tone::Bad => Tone::Bad,
        _ if remarks.has_error => Tone::Bad,
        Tone::Good if !remarks.codes.is_empty() => Tone::Warn,
        tone => tone,
    }
}

/// Nodes with the same zone, those that need an operator soonest first.
struct Zone<'a> {
    name: &'a str,
    squares: Vec<Square<'a>>,
}

impl Zone<'_> {
    fn urgency(&self) -> (u8, u8) {
        let first = self.squares.first();
        first.map_or((u8::MAX, u8::MAX), Square::urgency)
    }
}

impl fmt::Display for Zone<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name {
            "" => f.write_str("No zone"),
            name => f.write_str(name),
        }
    }
}

/// Returns the section with all zones, those with the worst trouble first.
pub(super) fn section(overview: &Overview) -> Section {
    let mut html = Html::default();
    let zones = zones(overview);
    if !zones.is_empty() {
        html.element("h2", "", "Nodes by zone");
    }
    let mut left = SQUARES;
    for zone in &zones {
        let drawn = zone.squares.len().min(left);
        left -= drawn;
        draw(zone, drawn, &mut html);
    }
    Section::new("zones", "Nodes by zone", html)
}

fn zones(overview: &Overview) -> Vec<Zone<'_>> {
    let mut zones: Vec<_> = overview
        .zones
        .iter()
        .map(|(name, nodes)| {
            let mut squares: Vec<_> = nodes
                .iter()
                .map(|(node, state, remarks)| Square {
                    node,
                    state: NodeStateView::from(*state),
                    remarks,
                })
                .collect();
            squares.sort_by_key(Square::urgency);
            Zone { name, squares }
        })
        .collect();
    zones.sort_by_key(Zone::urgency);
    zones
}

fn draw(zone: &Zone<'_>, drawn: usize, html: &mut Html) {
    let all = zone.squares.len();
    let good = |square: &&Square<'_>| square.state == NodeStateView::InSync;
    let trouble = all - zone.squares.iter().filter(good).count();
    let mut count = match trouble {
        0 => format!("{}, all in sync", plural(all, "node")),
        trouble => format!("{}, {trouble} not in sync", plural(all, "node")),
    };
    let remarked = |square: &&Square<'_>| !square.remarks.codes.is_empty();
    match zone.squares.iter().filter(remarked).count() {
        0 => {}
        some => count.push_str(&format!(", {some} with findings")),
    }
    html.raw("<p class=\"zone\"><strong>")
        .text(zone)
        .raw("</strong> <span class=\"faint\">")
        .text(count)
        .raw("</span></p><p class=\"squares\">");
    for square in &zone.squares[..drawn] {
        html.raw("<a")
            .attribute("class", class(square.tone()))
            .attribute("href", terminal::node(square.node));
        if square.tone() == Tone::Good {
            // The keyboard goes from one trouble to the next.
            html.raw(" tabindex=\"-1\"");
        }
        html.attribute("title", square.title()).raw("></a>");
    }
    html.raw("</p>");
    if drawn < all {
        let more = format!("{} not drawn", plural(all - drawn, "more node"));
        html.element("p", "faint", more);
    }
}

#[cfg(test)]
mod tests {
    use kplane_proto::v1 as pb;

    use super::*;

    fn overview(zones: &[(&str, &[(&str, pb::NodeState)])]) -> Overview {
        let mut overview = Overview::default();
        for (zone, nodes) in zones {
            let nodes =
                nodes.iter().map(|(name, state)| ((*name).into(), *state, Remarks::default()));
            overview.zones.insert((*zone).to_owned(), nodes.collect());
        }
        overview
    }

    #[test]
    fn the_worst_zone_and_the_worst_node_come_first() {
        use pb::NodeState::{Failing, InSync, Syncing};
        let overview = overview(&[
            ("a", &[("a-1", InSync), ("a-2", Syncing)]),
            ("b", &[("b-1", InSync), ("b-2<", Failing)]),
        ]);
        let section = section(&overview);
        let html = section.html.as_str();
        let places = [
            "<strong>b",
            "b-2&lt;: Failing",
            "b-1: InSync",
            "<strong>a",
            "a-2",
            "a-1",
        ]
        .map(|part| html.find(part).unwrap_or_else(|| panic!("{part}: {html}")));
        assert!(places.is_sorted(), "{html}");
        assert_eq!(html.matches("2 nodes, 1 not in sync").count(), 2, "{html}");
        assert_eq!(html.matches("tabindex").count(), 2);
    }

    #[test]
    fn without_nodes_there_is_nothing_and_too_many_are_counted() {
        assert_eq!(section(&Overview::default()).html, Html::default());
        let names: Vec<String> = (0..SQUARES + 3).map(|n| format!("n{n}")).collect();
        let nodes: Vec<_> =
            names.iter().map(|name| (name.as_str(), pb::NodeState::InSync)).collect();
        let section = section(&overview(&[("", &nodes)]));
        let html = section.html.as_str();
        assert_eq!(html.matches("<a").count(), SQUARES);
        assert!(html.contains("3 more nodes not drawn") && html.contains("No zone"));
        // A fleet of that size stays a page that a browser loads at once.
        assert!(html.len() < 500_000, "{}", html.len());
    }
}
