//! Tables of who talked to whom, and their graph.

use super::super::testing::{has, table, wide, words};
use super::*;

fn answer() -> pb::GraphAnswer {
    let client = |kind: ClientKind, address: &str, name: &str| pb::GraphClient {
        address: address.to_owned(),
        kind: kind.into(),
        name: name.to_owned(),
    };
    let endpoint = |address: &str, pod: &str, proxy| pb::GraphEndpoint {
        address: address.to_owned(),
        pod: pod.to_owned(),
        node: String::new(),
        proxy,
    };
    let edge = |client, endpoint, connections, failed| pb::GraphEdge {
        client,
        endpoint,
        connections,
        failed,
        seconds: 3_600,
        per_million_s: connections * 1_000_000 / 3_600,
        ..pb::GraphEdge::default()
    };
    pb::GraphAnswer {
        clients: vec![
            client(ClientKind::Pod, "10.244.1.9", "shop/cart-1"),
            client(ClientKind::Outside, "192.0.2.1", ""),
            pb::GraphClient::default(),
        ],
        ports: vec![kpctl_samples::key("shop/web", "http", pb::Family::Ipv4)],
        endpoints: vec![
            endpoint("10.244.2.7:8080", "shop/web-1", false),
            endpoint("10.244.2.8:8080", "", false),
            endpoint("169.254.107.112:4000", "", true),
        ],
        edges: vec![
            edge(1, 0, 60_000, 0),
            pb::GraphEdge {
                bytes_to_endpoint: 1_048_576,
                bytes_to_client: 3 << 20,
                reset: 5,
                ..edge(0, 0, 50_000, 7_000)
            },
            edge(0, 1, 20_000, 1),
            edge(2, 2, 9, 0),
            // Indexes that lead nowhere.
            edge(9, 0, 1, 0),
        ],
        nodes: Some(kpctl_samples::asked(2, 2)),
        ..pb::GraphAnswer::default()
    }
}

fn view(answer: pb::GraphAnswer) -> GraphView {
    let request = pb::GraphRequest {
        since_s: 3_600,
        ..pb::GraphRequest::default()
    };
    GraphView::new(&request, answer)
}

#[test]
fn edges_are_grouped_by_client_and_what_is_missing_is_said() {
    let answer = pb::GraphAnswer {
        more: 40,
        more_failed: 30,
        partial: vec![
            pb::GraphNode {
                node: "n1".to_owned(),
                seconds: 300,
                lost: 0,
            },
            pb::GraphNode {
                node: "n2".to_owned(),
                seconds: 3_600,
                lost: 2,
            },
        ],
        ..answer()
    };
    let view = view(answer);
    assert!(view.is_complete());
    let clients: Vec<_> = view.edges.iter().map(EdgeView::client_text).collect();
    let outside = "192.0.2.1 (outside)";
    assert_eq!(
        clients,
        ["shop/cart-1", "shop/cart-1", outside, "other clients"]
    );
    let text = table(&view);
    for part in [
        "130,049 began in 1h, 7,031 failed, from 3 clients to 1 Service",
        "shop/web http/TCP",
        "13.8",
        "7,000 (14%)",
        "1 (<1%)",
        "<0.01",
        "40 more connections and 30 more failures",
        "\"other clients\" are those",
        "n2: some connections are not counted",
        "n1: counts for less time, 5m at least",
        "userspace proxy: it takes",
        "Pods have no names here",
    ] {
        has(&text, part);
    }
    let text = wide(&view);
    has(&text, "4.0 MiB");
    has(&text, "10.244.2.8:8080");
}

#[test]
fn an_empty_answer_says_what_to_do() {
    let empty = pb::GraphAnswer {
        nodes: Some(kpctl_samples::asked(1, 0)),
        ..pb::GraphAnswer::default()
    };
    has(
        &words(&view(empty.clone())),
        "option --flows, in the chart agent.flows",
    );
    let counted = pb::GraphAnswer {
        nodes: Some(kpctl_samples::asked(1, 1)),
        ..empty
    };
    has(&words(&view(counted)), "Connections to a Pod's own address");
}

#[test]
fn a_graph_has_sums_between_clients_services_and_endpoints() {
    let graph = view(answer()).graph();
    let labels: Vec<_> = graph.nodes.iter().map(|node| node.label.as_str()).collect();
    let sum = |from: &str, to: &str| {
        let ends = |link: &&GraphLink| (labels[link.from], labels[link.to]) == (from, to);
        let link = graph.links.iter().find(ends).unwrap();
        (link.connections, link.failed, link.bytes)
    };
    assert_eq!(graph.nodes.len(), 3 + 1 + 3);
    assert_eq!(graph.links.len(), 3 + 3);
    let service = "shop/web http/TCP";
    assert_eq!(sum("shop/cart-1", service), (70_000, 7_001, 4 << 20));
    assert_eq!(sum(service, "shop/web-1"), (110_000, 7_000, 4 << 20));
    assert_eq!(sum("other clients", service).0, 9);
    assert_eq!(sum(service, "userspace proxy").0, 9);
}

#[test]
fn rates_of_nodes_that_counted_for_different_times_are_added() {
    let mut answer = answer();
    for (edge, seconds, per_million_s) in [(1, 60, 2_000_000), (2, 3_600, 1_000_000)] {
        let edge = &mut answer.edges[edge];
        (edge.seconds, edge.per_million_s) = (seconds, per_million_s);
    }
    let graph = view(answer).graph();
    let link = graph.links.iter().find(|link| link.failed == 7_001);
    assert_eq!(link.unwrap().text(), "3.00/s, 7,001 (10%) failed");
}

#[test]
fn rates_are_short() {
    for (per_million_seconds, text) in [
        (0, "0.00"),
        (278, "<0.01"),
        (500_000, "0.50"),
        (100_000_000, "100"),
        (12_500_000, "12.5"),
        (10_000_000_000, "10,000"),
    ] {
        assert_eq!(rate(per_million_seconds), text);
    }
    assert_eq!(failures(0, 0), "0");
    // They began before the time.
    assert_eq!(failures(3, 1), "3 (100%)");
}
