//! Lists of connections, as people read them.

use super::super::testing::{has, table, wide, words};
use super::*;

fn flow(client: &str, kind: ClientKind, name: &str) -> pb::NodeFlow {
    pb::NodeFlow {
        node: "n1".to_owned(),
        key: Some(pb::ServiceKey {
            port_name: "http".to_owned(),
            protocol: pb::Protocol::Tcp.into(),
            ..pb::ServiceKey::default()
        }),
        client_kind: kind.into(),
        client_name: name.to_owned(),
        group: Some(pb::ConnectedGroup {
            client: client.to_owned(),
            endpoint: "10.244.2.7:8080".to_owned(),
            table: ConnectionTable::Conntrack.into(),
            established: 2,
            ..pb::ConnectedGroup::default()
        }),
        ..pb::NodeFlow::default()
    }
}

fn view(flows: Vec<pb::NodeFlow>, request: &pb::FlowsRequest, answered: u64) -> FlowsView {
    let answer = pb::FlowsAnswer {
        flows,
        has_endpoints: true,
        nodes: Some(pb::NodesAsked {
            silent: (answered..2)
                .map(|_| pb::SilentNode {
                    node: "n2".to_owned(),
                    reason: "its agent is not connected".to_owned(),
                })
                .collect(),
            ..kpctl_samples::asked(2, answered)
        }),
        ..pb::FlowsAnswer::default()
    };
    FlowsView::new(&ServiceName::new("shop", "web"), request, answer)
}

#[test]
fn clients_have_names_and_what_is_not_known_is_said() {
    let mut counted = flow("10.244.1.9", ClientKind::Pod, "shop/cart-1");
    counted.endpoint_pod = "shop/web-1".to_owned();
    let group = counted.group.as_mut().unwrap();
    group.unreplied = 1;
    group.oldest_s = Some(90);
    (group.bytes_to_endpoint, group.bytes_to_client) = (Some(3_000), Some(1_048_576));
    let flows = vec![
        counted,
        flow("172.18.0.2", ClientKind::Node, "n1"),
        flow("10.244.1.4", ClientKind::PodOnNode, "n1"),
        flow("192.0.2.1", ClientKind::Outside, ""),
    ];
    let view = view(flows, &pb::FlowsRequest::default(), 1);
    assert!(!view.is_complete());
    let text = table(&view);
    for part in [
        "9 open, from 4 clients to 1 endpoint; 1 of 2 nodes answered",
        "shop/cart-1 ",
        "node/n1 ",
        "n1: no bytes are counted: net.netfilter.nf_conntrack_acct is 0",
        "Pods have no names here",
        "Unknown: n2: its agent is not connected",
    ] {
        has(&text, part);
    }
    let text = wide(&view);
    for part in [
        "2 established, 1 unreplied",
        "10.244.1.4 (Pod on n1)",
        "192.0.2.1 (outside)",
        "1m30s",
        "2.9 KiB",
        "1.0 MiB",
        "10.244.2.7:8080",
    ] {
        has(&text, part);
    }
}

#[test]
fn an_empty_answer_says_why_and_what_to_do() {
    let empty = |request: &pb::FlowsRequest| words(&view(Vec::new(), request, 2));
    let all = empty(&pb::FlowsRequest::default());
    has(&all, "No client is connected; 2 of 2 nodes answered. Short");
    has(&all, "kpctl probe shop/web");
    let some = empty(&pb::FlowsRequest {
        from: "outside".to_owned(),
        ..pb::FlowsRequest::default()
    });
    has(&some, "Without --from, --to and --node");
    let mut none = view(Vec::new(), &pb::FlowsRequest::default(), 2);
    none.has_endpoints = false;
    has(&words(&none), "no endpoint that takes connections");
}

#[test]
fn connections_that_were_not_compared_are_not_counted() {
    let request = pb::FlowsRequest {
        from: "outside".to_owned(),
        ..pb::FlowsRequest::default()
    };
    let mut view = view(Vec::new(), &request, 2);
    view.connections_unchecked = 40;
    let text = table(&view);
    has(&text, "at least 0 open, from 0 clients");
    has(&text, "40 more connections were not compared with --from");
}

#[test]
fn sizes_are_short() {
    for (count, text) in [
        (0, "0 B"),
        (1_023, "1023 B"),
        (1_024, "1.0 KiB"),
        (150 << 20, "150 MiB"),
        (u64::MAX, "17179869183 GiB"),
    ] {
        assert_eq!(size(count), text);
    }
}
