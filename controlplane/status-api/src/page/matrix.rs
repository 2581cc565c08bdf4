//! Endpoints of a Service and nodes: which node leads to which endpoint, and whether its kernel holds that.

use std::collections::HashSet;

use kplane_proto::v1 as pb;
use kplane_view::text::plural;

use super::html::{Html, Section};
use super::terminal;

/// Nodes and endpoints that the picture has. The text below it has all.
const COLUMNS: usize = 40;
const ROWS: usize = 100;

/// A node, and the endpoints to which it shall lead.
struct Column<'a> {
    status: &'a pb::NodeServiceStatus,
    chosen: HashSet<(&'a pb::ServiceKey, &'a str)>,
}

/// What a node does with an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cell {
    /// It leads there, and its kernel holds the newest state.
    Held,
    /// It shall lead there, and its kernel holds an earlier state.
    Lagging,
    /// It shall lead there, and its kernel is not known to hold anything.
    Missing,
    /// It does not lead there.
    NotChosen,
    /// It shall not lead there, and its kernel holds an earlier state, which may.
    Unknown,
}

impl Cell {
    const ALL: [Self; 5] = [
        Self::Held,
        Self::Lagging,
        Self::Missing,
        Self::NotChosen,
        Self::Unknown,
    ];

    fn of(column: &Column<'_>, key: &pb::ServiceKey, address: &str) -> Self {
        let status = column.status;
        match (column.chosen.contains(&(key, address)), status.programmed) {
            (true, true) => Self::Held,
            (true, false) if status.applied_revision > 0 => Self::Lagging,
            (true, false) => Self::Missing,
            (false, true) => Self::NotChosen,
            (false, false) => Self::Unknown,
        }
    }

    /// Returns class, sign and word.
    fn look(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Held => ("good", "●", "held"),
            Self::Lagging => ("warn", "◐", "lagging"),
            Self::Missing => ("bad", "○", "missing"),
            Self::NotChosen => ("faint", "·", "not chosen"),
            Self::Unknown => ("warn", "?", "not known"),
        }
    }
}

/// Returns the section with the matrix; empty without nodes or endpoints.
pub(super) fn section(description: &pb::ServiceDescription) -> Section {
    let mut html = Html::default();
    let rows: Vec<_> = rows(description).collect();
    let columns = columns(description);
    if !rows.is_empty() && !columns.is_empty() {
        draw(&rows, &columns, &mut html);
        left_out(description, rows.len(), &mut html);
    }
    Section::new("matrix", "Endpoints and nodes", html)
}

type Row<'a> = (&'a pb::ServiceKey, &'a pb::EndpointView);

fn rows(description: &pb::ServiceDescription) -> impl Iterator<Item = Row<'_>> {
    description.ports.iter().flat_map(|port| {
        let key = port.key.iter();
        key.flat_map(|key| port.endpoints.iter().map(move |endpoint| (key, endpoint)))
    })
}

/// Returns the nodes with trouble, then others, as many as the picture has.
fn columns(description: &pb::ServiceDescription) -> Vec<Column<'_>> {
    let mut nodes: Vec<_> = description.nodes.iter().collect();
    nodes.sort_by_key(|node| node.programmed);
    nodes.truncate(COLUMNS);
    nodes
        .into_iter()
        .map(|status| {
            let held = status.endpoints.iter().filter_map(|held| Some((held.key.as_ref()?, held)));
            let chosen = held.flat_map(|(key, held)| {
                held.cluster
                    .iter()
                    .chain(&held.local)
                    .map(move |address| (key, address.as_str()))
            });
            Column {
                status,
                chosen: chosen.collect(),
            }
        })
        .collect()
}

fn draw(rows: &[Row<'_>], columns: &[Column<'_>], html: &mut Html) {
    html.element("h2", "", "Endpoints and nodes").raw("<p class=\"faint\">");
    for cell in Cell::ALL {
        let (class, sign, word) = cell.look();
        html.element("span", class, sign).raw(" ").text(word).raw(" &nbsp; ");
    }
    html.raw("</p><div class=\"scroll\" tabindex=\"0\"><table class=\"matrix\"><thead><tr>");
    for title in ["Port", "Endpoint"] {
        html.raw("<th scope=\"col\">").text(title).raw("</th>");
    }
    for column in columns {
        let name = &column.status.node;
        html.raw("<th scope=\"col\" class=\"upright\">")
            .link(terminal::node(name), name)
            .raw("</th>");
    }
    html.raw("</tr></thead><tbody>");
    for (key, endpoint) in rows.iter().take(ROWS) {
        let protocol = kplane_view::protocol(key.protocol());
        html.raw("<tr>")
            .element("td", "", format_args!("{} {protocol}", key.port_name))
            .raw("<th scope=\"row\">")
            .text(&endpoint.address)
            .raw("</th>");
        for column in columns {
            let (class, sign, word) = Cell::of(column, key, &endpoint.address).look();
            html.raw("<td")
                .attribute("class", class)
                .attribute("title", format_args!("{}: {word}", column.status.node))
                .raw(">")
                .text(sign)
                .raw("</td>");
        }
        html.raw("</tr>");
    }
    html.end_table();
}

/// Says what the picture does not have.
fn left_out(description: &pb::ServiceDescription, rows: usize, html: &mut Html) {
    let nodes = description.nodes.len().saturating_sub(COLUMNS);
    let lagging = description
        .nodes
        .iter()
        .filter(|node| !node.programmed)
        .count()
        .saturating_sub(COLUMNS);
    let mut parts = Vec::new();
    if nodes > 0 {
        let which = match lagging {
            0 => "which all hold the newest state".to_owned(),
            lagging => format!("of which {lagging} do not hold the newest state"),
        };
        parts.push(format!("{}, {which}", plural(nodes, "more node")));
    }
    if let more @ 1.. = rows.saturating_sub(ROWS) {
        parts.push(plural(more, "more endpoint"));
    }
    if !parts.is_empty() {
        html.element(
            "p",
            "faint",
            format_args!("Not drawn: {}.", parts.join("; ")),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> pb::ServiceKey {
        pb::ServiceKey {
            port_name: "http".to_owned(),
            ..pb::ServiceKey::default()
        }
    }

    fn node(name: &str, programmed: bool, applied_revision: u64) -> pb::NodeServiceStatus {
        pb::NodeServiceStatus {
            node: name.to_owned(),
            programmed,
            applied_revision,
            endpoints: vec![pb::NodeEndpoints {
                key: Some(key()),
                cluster: vec!["10.0.0.1:80".to_owned()],
                local: Vec::new(),
            }],
            ..pb::NodeServiceStatus::default()
        }
    }

    fn description(nodes: Vec<pb::NodeServiceStatus>) -> pb::ServiceDescription {
        let endpoint = |address: &str| pb::EndpointView {
            address: address.to_owned(),
            ..pb::EndpointView::default()
        };
        pb::ServiceDescription {
            ports: vec![pb::ServiceView {
                key: Some(key()),
                endpoints: vec![endpoint("10.0.0.1:80"), endpoint("10.0.0.2:80")],
                ..pb::ServiceView::default()
            }],
            nodes,
            ..pb::ServiceDescription::default()
        }
    }

    #[test]
    fn a_cell_says_what_the_kernel_holds() {
        let description = description(vec![
            node("good", true, 9),
            node("late", false, 8),
            node("none", false, 0),
        ]);
        let columns = columns(&description);
        let cells = |address| -> Vec<_> {
            let cell = |column| Cell::of(column, &key(), address);
            columns.iter().map(cell).collect()
        };
        // Trouble comes first.
        let chosen = [Cell::Lagging, Cell::Missing, Cell::Held];
        assert_eq!(cells("10.0.0.1:80"), chosen);
        let others = [Cell::Unknown, Cell::Unknown, Cell::NotChosen];
        assert_eq!(cells("10.0.0.2:80"), others);
        let section = section(&description);
        let html = section.html.as_str();
        assert!(html.contains("title=\"late: lagging\">◐</td>"), "{html}");
        assert!(!html.contains("Not drawn"), "{html}");
    }

    #[test]
    fn what_is_not_drawn_is_counted() {
        let nodes = (0..45).map(|number| node(&format!("n{number}"), number != 44, 1));
        let description = description(nodes.collect());
        let section = section(&description);
        let html = section.html.as_str();
        let text = "Not drawn: 5 more nodes, which all hold the newest state.";
        assert!(html.contains(text) && html.contains(">n44</a>"), "{html}");
        let empty = super::section(&pb::ServiceDescription::default());
        assert_eq!(empty.html, Html::default());
    }
}
