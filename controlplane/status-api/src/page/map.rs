//! The map: clients, Services and endpoints in three columns, with lines as wide as the connections a second between them.
//! The server draws it, so that it needs no script.

use std::cmp::Reverse;

use kplane_proto::ranking::by_turns;
use kplane_proto::v1 as pb;
use kplane_view::graph::{Graph, GraphLink, GraphNode, GraphView, NodeKind};

use super::html::{Html, Section};
use super::sheet::Filter;
use super::{lists, terminal};

/// Number of nodes in a column. The table below the picture has all.
const ROWS: usize = 60;
/// Distances in the picture.
const WIDTH: usize = 1_200;
const ROW: usize = 26;
const BOX: usize = 300;
/// Number of characters of a name that fit.
const NAME: usize = 40;
/// Widths of the thinnest and the widest line, in tenths.
const THIN: u64 = 12;
const WIDE: u64 = 140;

const COLUMNS: [(NodeKind, &str); 3] = [
    (NodeKind::Client, "Clients"),
    (NodeKind::Service, "Services"),
    (NodeKind::Endpoint, "Endpoints"),
];

/// Returns the request of a sheet.
pub(super) fn request(filter: &Filter) -> pb::GraphRequest {
    let (namespace, services) = match filter.service() {
        None => (filter.of.clone(), Vec::new()),
        Some(service) => (String::new(), vec![service]),
    };
    pb::GraphRequest {
        namespace,
        services,
        since_s: 3_600,
    }
}

/// Returns the sections of the map.
pub(super) fn sections(filter: &Filter, view: &GraphView) -> Vec<Section> {
    let graph = view.graph();
    let mut picture = Html::default();
    if !graph.links.is_empty() {
        draw(&graph, &mut picture);
    }
    vec![
        lists::by_namespace(filter, "map", "Service"),
        Section::new("map", "Map", picture),
        Section::new("table", "Connections", terminal::pre(view)),
    ]
}

/// A node's place: the column, and the row in it.
type Places = Vec<Option<(usize, usize)>>;

/// Finds places for the nodes with the most failures, and those with the most connections. Clients and endpoints are near their Services.
fn places(graph: &Graph) -> (Places, [usize; 3]) {
    let mut weight = vec![0_u64; graph.nodes.len()];
    let mut failed = weight.clone();
    for link in &graph.links {
        for end in [link.from, link.to] {
            weight[end] = weight[end].saturating_add(link.connections.max(link.failed));
            failed[end] = failed[end].saturating_add(link.failed);
        }
    }
    let of = |kind| (0..graph.nodes.len()).filter(move |at| graph.nodes[*at].kind == kind);
    let mut places: Places = vec![None; graph.nodes.len()];
    let mut hidden = [0; 3];
    // Services first: the rows of the others follow from theirs.
    for column in [1, 0, 2] {
        let mut shown: Vec<usize> = of(COLUMNS[column].0).collect();
        by_turns(&mut shown, |at| weight[*at], |at| failed[*at]);
        hidden[column] = shown.len().saturating_sub(ROWS);
        shown.truncate(ROWS);
        shown.sort_by_key(|at| Reverse(weight[*at]));
        if column != 1 {
            shown.sort_by_key(|at| (busiest_service(graph, &places, *at), Reverse(weight[*at])));
        }
        for (row, at) in shown.into_iter().enumerate() {
            places[at] = Some((column, row));
        }
    }
    (places, hidden)
}

/// Returns the row of the Service with which a node has the most connections.
fn busiest_service(graph: &Graph, places: &Places, at: usize) -> usize {
    let links = graph.links.iter().filter(|link| link.from == at || link.to == at);
    let busiest = links.max_by_key(|link| link.connections);
    let service = busiest.map(|link| if link.from == at { link.to } else { link.from });
    let place = service.and_then(|service| places[service]);
    place.map_or(usize::MAX, |(_, row)| row)
}

fn draw(graph: &Graph, html: &mut Html) {
    let (places, hidden) = places(graph);
    let rows = places.iter().flatten().map(|(_, row)| row + 1).max();
    let height = (rows.unwrap_or_default() + 1) * ROW + ROW / 2;
    let failing = graph.links.iter().filter(|link| link.failed > 0).count();
    let words = format!(
        "Clients, Services and endpoints, with {} lines between them, of which {failing} have failed connections",
        graph.links.len()
    );
    html.raw("<div class=\"scroll\" tabindex=\"0\"><svg class=\"map\" role=\"img\"")
        .attribute("viewBox", format_args!("0 0 {WIDTH} {height}"))
        .attribute("aria-label", words)
        .raw(">");
    // The widest lines come first, so that no other is hidden.
    let most = graph.links.iter().map(GraphLink::per_hour).max().unwrap_or_default();
    let mut links: Vec<&GraphLink> = graph.links.iter().collect();
    links.sort_by_key(|link| (link.failed > 0, Reverse(link.per_hour())));
    for link in links {
        if let (Some(from), Some(to)) = (places[link.from], places[link.to]) {
            line(graph, link, (from, to), most, html);
        }
    }
    for (column, (_, title)) in COLUMNS.into_iter().enumerate() {
        html.raw("<text class=\"title\"")
            .attribute("x", left(column) + 8)
            .attribute("y", ROW - 8)
            .raw(">")
            .text(title)
            .raw("</text>");
    }
    for (node, place) in graph.nodes.iter().zip(&places) {
        if let Some(place) = place {
            node_box(node, *place, html);
        }
    }
    html.raw("</svg></div>");
    let more: Vec<String> = hidden
        .into_iter()
        .zip(COLUMNS)
        .filter(|(hidden, _)| *hidden > 0)
        .map(|(hidden, (_, title))| format!("{hidden} more {}", title.to_lowercase()))
        .collect();
    if !more.is_empty() {
        let text = format!("Not drawn: {}. The table has them.", more.join(", "));
        html.element("p", "faint", text);
    }
}

/// Returns the left edge of a column's boxes.
fn left(column: usize) -> usize {
    column * (WIDTH - BOX) / 2
}

fn line(
    graph: &Graph,
    link: &GraphLink,
    (from, to): ((usize, usize), (usize, usize)),
    most: u64,
    html: &mut Html,
) {
    let middle = |(_, row): (usize, usize)| (row + 1) * ROW + ROW / 2;
    let (x1, x2) = (left(from.0) + BOX, left(to.0));
    let (y1, y2, half) = (middle(from), middle(to), x1.midpoint(x2));
    let share = u128::from(link.per_hour()) * u128::from(WIDE - THIN) / u128::from(most.max(1));
    let tenths = THIN + u64::try_from(share).unwrap_or(WIDE);
    let class = match link.failed {
        0 => "link",
        _ => "link failing",
    };
    html.raw("<path")
        .attribute("class", class)
        .attribute(
            "d",
            format_args!("M{x1} {y1}C{half} {y1} {half} {y2} {x2} {y2}"),
        )
        .attribute(
            "stroke-width",
            format_args!("{}.{}", tenths / 10, tenths % 10),
        )
        .raw("><title>")
        .text(format_args!(
            "{} to {}: {}",
            graph.nodes[link.from].label,
            graph.nodes[link.to].label,
            link.text()
        ))
        .raw("</title></path>");
}

fn node_box(node: &GraphNode, (column, row): (usize, usize), html: &mut Html) {
    let (x, y) = (left(column), (row + 1) * ROW + 2);
    let link = node.service.as_ref();
    if let Some((namespace, name)) = link {
        html.raw("<a").attribute("href", terminal::service(namespace, name)).raw(">");
    }
    html.raw("<g class=\"node\"><rect")
        .attribute("x", x)
        .attribute("y", y)
        .attribute("width", BOX)
        .attribute("height", ROW - 4)
        .raw("/><text")
        .attribute("x", x + 8)
        .attribute("y", y + ROW - 10)
        .raw(">")
        .text(short(&node.label))
        .raw("</text><title>")
        .text(&node.label)
        .raw("</title></g>");
    if link.is_some() {
        html.raw("</a>");
    }
}

/// Cuts a name that does not fit.
fn short(name: &str) -> String {
    if name.chars().count() > NAME {
        name.chars().take(NAME - 1).chain(['…']).collect()
    } else {
        name.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(clients: usize) -> Graph {
        let node = |kind, label: String| GraphNode {
            kind,
            label,
            service: (kind == NodeKind::Service).then(|| ("shop".to_owned(), "web".to_owned())),
        };
        let mut graph = Graph {
            nodes: vec![
                node(NodeKind::Service, "shop/web <http>".to_owned()),
                node(NodeKind::Endpoint, "shop/web-1".to_owned()),
            ],
            links: vec![GraphLink {
                from: 0,
                to: 1,
                connections: 3_600,
                failed: 2,
                bytes: 0,
                per_million_seconds: 1_000_000,
            }],
        };
        for number in 0..clients {
            graph.nodes.push(node(NodeKind::Client, format!("client-{number}")));
            graph.links.push(GraphLink {
                from: number + 2,
                to: 0,
                connections: 36 + u64::try_from(number).unwrap(),
                failed: 0,
                bytes: 0,
                per_million_seconds: 10_000,
            });
        }
        graph
    }

    #[test]
    fn lines_are_as_wide_as_their_connections_and_red_where_some_fail() {
        let mut html = Html::default();
        draw(&graph(2), &mut html);
        let text = html.as_str();
        assert_eq!(text.matches("<path").count(), 3, "{text}");
        assert!(text.contains("class=\"link failing\"") && text.contains("stroke-width=\"14.0\""));
        assert!(text.contains("shop/web &lt;http&gt; to shop/web-1: 1.00/s, 2 (&lt;1%) failed"));
        assert!(
            text.contains("href=\"service?namespace=shop&amp;name=web\""),
            "{text}"
        );
        assert!(!text.contains("Not drawn"));
    }

    #[test]
    fn the_busiest_are_drawn_and_the_others_counted() {
        let graph = graph(ROWS + 5);
        let (places, hidden) = places(&graph);
        assert_eq!(hidden, [5, 0, 0]);
        assert_eq!(places[2], None, "the least busy client");
        assert_eq!(places[ROWS + 6], Some((0, 0)), "the busiest client");
        let mut html = Html::default();
        draw(&graph, &mut html);
        assert!(html.as_str().contains("Not drawn: 5 more clients."));
        assert_eq!(html.as_str().matches("<path").count(), ROWS + 1);
    }

    #[test]
    fn a_client_whose_connections_fail_is_drawn() {
        let mut graph = graph(ROWS + 5);
        graph.links[1].failed = 1;
        let (places, hidden) = places(&graph);
        assert!(places[2].is_some() && hidden == [5, 0, 0]);
    }

    #[test]
    fn a_filter_names_a_service_or_a_namespace() {
        let of = |namespace: &str, name: &str| {
            let request = request(&Filter {
                of: namespace.to_owned(),
                name: name.to_owned(),
                ..Filter::default()
            });
            // The table says which nodes counted for less.
            assert_eq!(request.since_s, 3_600);
            (request.namespace, request.services)
        };
        assert_eq!(
            of("", "web"),
            (String::new(), vec!["default/web".to_owned()])
        );
        assert_eq!(of("shop", ""), ("shop".to_owned(), Vec::new()));
        assert_eq!(
            of("shop", "web"),
            (String::new(), vec!["shop/web".to_owned()])
        );
    }

    #[test]
    fn long_names_are_cut() {
        assert_eq!(short("web"), "web");
        assert_eq!(short(&"é".repeat(60)).chars().count(), NAME);
    }
}
