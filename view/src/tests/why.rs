//! The fate of a packet.

use expect_test::expect;
use kpctl_samples as samples;
use kplane_proto::v1 as pb;

use super::super::testing::{has, table};
use super::super::why::WhyView;

fn view(reported: pb::Explanation) -> WhyView {
    let reported = pb::TryResponse {
        explanation: Some(reported),
        ..pb::TryResponse::default()
    };
    WhyView::new("shop", "web", "a pod".to_owned(), reported)
}

#[test]
fn what_came_back_stands_below_the_endpoints() {
    let tried = |through_service, address: &str, node: &str, outcome: pb::AttemptOutcome| {
        pb::TriedConnection {
            through_service,
            node: node.to_owned(),
            attempt: Some(pb::Attempt {
                address: address.to_owned(),
                outcome: outcome.into(),
                took_us: 412,
                error: String::new(),
            }),
        }
    };
    let reported = pb::TryResponse {
        explanation: Some(samples::explanation()),
        attempts: vec![
            tried(true, "203.0.113.1:80", "", pb::AttemptOutcome::Connected),
            tried(
                false,
                "10.244.2.7:8080",
                "node-b",
                pb::AttemptOutcome::Refused,
            ),
            tried(
                false,
                "10.244.1.12:8080",
                "node-a",
                pb::AttemptOutcome::Silent,
            ),
        ],
        error: String::new(),
    };
    let view = WhyView::new("shop", "web", "a pod".to_owned(), reported);
    let text = table(&view);
    for part in [
        "the Service 203.0.113.1:80  -       connected in 412us",
        "endpoint 10.244.2.7:8080    node-b  refused",
        "endpoint 10.244.1.12:8080   node-a  no answer within 1s",
    ] {
        has(&text, part);
    }
    let reported = pb::TryResponse {
        explanation: Some(samples::explanation()),
        error: "only TCP connections can be tried".to_owned(),
        ..pb::TryResponse::default()
    };
    let view = WhyView::new("shop", "web", "a pod".to_owned(), reported);
    assert!(table(&view).contains("Not tried: only TCP"));
}

#[test]
fn a_packet_that_arrives() {
    expect![[r#"
        Packet          from a pod to 203.0.113.1:80, handled by node-b
        Service         shop/web
        Fate
          10.244.2.7:8080 gets the packet
        Kernel of node-b
          has acknowledged this state, and has not been read back since
          asked just now: does the same: it chooses one of 1 endpoint (places)

        Why
          1. 203.0.113.1:80/TCP is an address of the load balancer of shop/web, port
            http
          2. externalTrafficPolicy is Local: only endpoints on node-b may be chosen
          3. 1 of 2 endpoints are chosen: those that are ready
          4. the endpoint sees the sender's address

        ENDPOINT          NODE    CHOSEN  REASON
        10.244.2.7:8080   node-b  Yes     ready
        10.244.1.12:8080  node-a  No      on another node, and the policy is Local

        FINDING  REASON
        Info     ExternalPolicyLocal
          externalTrafficPolicy is Local, and 90 of 100 nodes have no endpoint
          on node-10, node-11, node-12, node-13, node-14, node-15, node-16, node-17 and
            82 more
    "#]]
    .assert_eq(&table(&view(samples::explanation())));
}

#[test]
fn a_packet_that_is_dropped_on_a_node_that_lags() {
    let reported = pb::Explanation {
        outcome: pb::PacketOutcome::Dropped.into(),
        summary: "the packet is dropped: other nodes have endpoints".to_owned(),
        programmed: false,
        lag: "applied revision 5 of 7".to_owned(),
        steps: Vec::new(),
        candidates: Vec::new(),
        findings: Vec::new(),
        ..samples::explanation()
    };
    expect![[r#"
        Packet          from a pod to 203.0.113.1:80, handled by node-b
        Service         shop/web
        Fate
          the packet is dropped: other nodes have endpoints
        Kernel of node-b
          does not hold this state: applied revision 5 of 7
          asked just now: does the same: it chooses one of 1 endpoint (places)
    "#]]
    .assert_eq(&table(&view(reported)));
}

#[test]
fn a_packet_that_nobody_touches() {
    let reported = pb::Explanation {
        node: "node-b".to_owned(),
        outcome: pb::PacketOutcome::NotProxied.into(),
        summary: "the packet goes on as it is: the Service is headless".to_owned(),
        ..pb::Explanation::default()
    };
    expect![[r#"
        Packet          from a pod, handled by node-b
        Service         shop/web
        Fate
          the packet goes on as it is: the Service is headless
    "#]]
    .assert_eq(&table(&view(reported)));
}
