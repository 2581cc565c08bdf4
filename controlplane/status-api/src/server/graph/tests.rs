//! Sums of agents' answers, within bounds.

use prost::Message as _;

use super::*;

fn reported(edges: Vec<pb::Edge>) -> pb::Edges {
    pb::Edges {
        ports: vec![(&ServiceKey::sample("shop", "web")).into()],
        edges,
        covered_s: 3_600,
        ..pb::Edges::default()
    }
}

fn edge(client: &str, endpoint: &str, begun: u64) -> pb::Edge {
    pb::Edge {
        client: client.to_owned(),
        endpoint: endpoint.to_owned(),
        begun,
        failed: 1,
        ..pb::Edge::default()
    }
}

#[test]
fn edges_of_several_nodes_are_one() {
    let mut sums = Sums::default();
    let (n1, n2) = (NodeName::from("n1"), NodeName::from("n2"));
    let one = edge("192.0.2.7", "10.244.1.5:80", 5);
    sums.add(
        &n1,
        &reported(vec![one.clone(), edge("", "10.244.1.5:80", 9)]),
        10,
        3_600,
    );
    let young = pb::Edges {
        covered_s: 60,
        lost: 2,
        more: 4,
        more_failed: 3,
        ..reported(vec![pb::Edge { age_s: 50, ..one }])
    };
    sums.add(&n2, &young, 10, 3_600);
    // The first connection of a client is the oldest of all nodes.
    assert_eq!(sums.ages, HashMap::from([([192, 0, 2, 7].into(), 50)]));
    let edges = sums.largest();
    let [(both, of_both), (others, _)] = edges.as_slice() else {
        panic!("{edges:?}");
    };
    assert_eq!(
        (both.client, others.client),
        (Some([192, 0, 2, 7].into()), None)
    );
    assert_eq!(
        (of_both.connections, of_both.failed, of_both.seconds),
        (10, 2, 3_600)
    );
    // Five in an hour, and five in a minute.
    assert_eq!(of_both.per_million_s, 1_389 + 83_334);
    assert_eq!((sums.more, sums.more_failed), (4, 3));
    let [partial] = sums.partial.as_slice() else {
        panic!("{:?}", sums.partial);
    };
    assert_eq!(
        (&*partial.node, partial.seconds, partial.lost),
        ("n2", 60, 2)
    );
}

#[test]
fn failing_edges_are_among_those_that_fit() {
    let mut sums = Sums::default();
    let many = (0..EDGES + 9).map(|n| {
        let client = std::net::Ipv4Addr::from(u32::try_from(n).unwrap()).to_string();
        let edge = edge(&client, "10.244.1.5:80", if n == 0 { 1 } else { 100 });
        let failed = u64::from(n == 0) * 7 + u64::from(n > EDGES);
        pb::Edge { failed, ..edge }
    });
    sums.add(&"n1".into(), &reported(many.collect()), EDGES + 9, 3_600);
    let edges = sums.largest();
    assert_eq!(edges.len(), EDGES);
    assert_eq!(edges[0].1.failed, 7);
    let failed: u64 = edges.iter().map(|(_, edge)| edge.failed).sum();
    assert_eq!((failed, sums.more, sums.more_failed), (15, 900, 0));
}

#[test]
fn what_makes_no_sense_is_left_out_and_what_is_too_much_is_not_read() {
    let node = NodeName::from("n1");
    let good = || edge("192.0.2.7", "10.244.1.5:80", 1);
    let wrong = [
        edge("rubbish", "10.244.1.5:80", 1),
        edge("192.0.2.7", "10.244.1.5", 1),
        pb::Edge { port: 1, ..good() },
    ];
    let mut sums = Sums::default();
    sums.add(&node, &reported(wrong.into()), 10, 60);
    assert!(sums.edges.is_empty());
    let unknown = pb::Edges {
        ports: vec![pb::ServiceKey::default()],
        ..reported(vec![good()])
    };
    sums.add(&node, &unknown, 10, 60);
    assert!(sums.edges.is_empty());
    let many = (0..100_u8).map(|n| edge(&format!("192.0.2.{n}"), "10.244.1.5:80", u64::MAX));
    sums.add(&node, &reported(many.collect()), 10, 60);
    assert_eq!(sums.edges.len(), 10);
}

#[test]
fn an_answer_fits_into_a_message_and_the_rest_is_counted() {
    let names = Names::new(None, [].into_iter());
    let mut builder = Builder::default();
    let mut endpoints = Endpoints::new();
    for n in 0..EDGES {
        let id = EdgeId {
            port: ServiceKey::sample("shop", &format!("{}-{n}", "n".repeat(200))),
            client: Some(IpAddr::from((u128::MAX - n as u128).to_be_bytes())),
            endpoint: (IpAddr::from([0xffff_u16; 8]), 80).into(),
        };
        let pod = "p".repeat(300);
        endpoints.insert((id.port.clone(), id.endpoint), (pod.clone(), pod));
        let edge = pb::GraphEdge {
            connections: 3,
            failed: 1,
            bytes_to_client: u64::MAX,
            ..pb::GraphEdge::default()
        };
        builder.add(&id, &edge, &names, &endpoints);
    }
    let (shown, more) = (builder.edges.len() as u64, builder.more);
    assert!(shown > 1_000 && more > 0, "{shown}, {more}");
    assert_eq!(3 * shown + more, 3 * EDGES as u64);
    assert_eq!(shown + builder.more_failed, EDGES as u64);
    let answer = pb::GraphAnswer {
        clients: builder.clients.values,
        ports: builder.ports.values,
        endpoints: builder.endpoints.values,
        edges: builder.edges,
        ..pb::GraphAnswer::default()
    };
    let bytes = answer.encoded_len();
    assert!(bytes < 15 << 18, "{bytes}");
}

#[test]
fn questions_have_bounds() {
    let request = |services: Vec<String>| pb::GraphRequest {
        services,
        ..pb::GraphRequest::default()
    };
    assert!(check(&request(vec!["shop/web".to_owned(); SERVICES])).is_ok());
    for wrong in [
        vec!["shop/web".to_owned(); SERVICES + 1],
        vec!["web".to_owned()],
        vec![format!("shop/{}", "n".repeat(MAX_NAME + 1))],
    ] {
        assert!(check(&request(wrong)).is_err());
    }
    let text = audited(&request(vec!["shop/web".to_owned(), "shop/api".to_owned()]));
    assert_eq!(text, "read who talked to shop/web, shop/api on all nodes");
}
