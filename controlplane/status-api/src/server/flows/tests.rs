//! Names of ends, and what agents say, within bounds.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use kplane_desired_state::publish::Publication;
use kplane_model::NodeFacts;
use kplane_util::clock::millis;
use kplane_view::time::Time;

use super::*;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn ends_are_read_as_people_write_them() {
    assert_eq!(End::read(""), Some(End::Any));
    assert_eq!(End::read("outside"), Some(End::Outside));
    assert_eq!(End::read("fd00::1"), Some(End::Address(ip("fd00::1"))));
    assert_eq!(End::read("node/n1"), Some(End::Node("n1".to_owned())));
    let pod = PodName::new("shop", "web-1");
    assert_eq!(End::read("pod/shop/web-1"), Some(End::Pod(pod)));
    for wrong in ["web", "pod/web", "pod//web", "node/", "pod/a/b/c", "10.0.0"] {
        assert_eq!(End::read(wrong), None, "{wrong}");
    }
    assert_eq!(End::read(&format!("node/{}", "n".repeat(MAX_END))), None);
}

fn node(name: &str, address: &str, pods: &str) -> Arc<NodeFacts> {
    Arc::new(NodeFacts {
        addresses: vec![ip(address)],
        pod_cidrs: vec![pods.parse().unwrap()],
        ..NodeFacts::sample(name)
    })
}

#[test]
fn clients_are_pods_nodes_or_outside() {
    use pb::ClientKind::{Node, Outside, Pod, PodOnNode, Unspecified};

    let nodes = || {
        let n1 = node("n1", "172.18.0.2", "10.244.1.0/24");
        [n1, node("n2", "172.18.0.3", "10.244.2.0/24")].into_iter()
    };
    let pods = HashMap::from([
        (ip("10.244.1.9"), holder("cart-1", 1_000)),
        // A Pod on its node's network has the node's address.
        (ip("172.18.0.3"), holder("proxy", 1_000)),
    ]);
    let names = Names::new(Some(pods.clone()), nodes());
    for (address, kind, name) in [
        ("10.244.1.9", Pod, "shop/cart-1"),
        ("172.18.0.3", Node, "n2"),
        ("10.244.2.7", PodOnNode, "n2"),
        ("192.0.2.1", Outside, ""),
        ("127.0.0.1", Unspecified, ""),
        ("169.254.1.1", Unspecified, ""),
        ("fe80::1", Unspecified, ""),
    ] {
        let name = name.to_owned();
        assert_eq!(
            names.get(ip(address), 60),
            Named { kind, name },
            "{address}"
        );
    }
    let unnamed = Names::new(None, nodes());
    assert_eq!(unnamed.get(ip("10.244.1.9"), 60).kind, PodOnNode);
    // Missing facts never say that a client is outside: the address may be that of a Pod which has ended.
    for pods in [None, Some(pods)] {
        let nothing = Names::new(pods, [].into_iter());
        assert_eq!(nothing.get(ip("192.0.2.1"), 60).kind, Unspecified);
        assert!(!nothing.knows_outside());
    }
}

fn holder(name: &str, age_s: u64) -> names::Holder {
    let now_ms = millis(SystemTime::now());
    let created = Time::from_wire((now_ms / 1_000 - age_s) * 1_000).unwrap();
    names::Holder {
        pod: PodName::new("shop", name),
        created: Some(created.to_string().into()),
    }
}

#[test]
fn connections_from_before_a_pod_are_not_called_its_own() {
    use pb::ClientKind::{Pod, PodOnNode, Unspecified};

    let pods = HashMap::from([
        (ip("10.244.1.9"), holder("cart-1", 1_000)),
        (ip("10.0.0.9"), holder("cart-2", 1_000)),
    ]);
    let n1 = node("n1", "172.18.0.2", "10.244.1.0/24");
    let names = Names::new(Some(pods), [n1].into_iter());
    for (address, age_s, kind) in [
        ("10.244.1.9", 0, Pod),
        ("10.244.1.9", 900, Pod),
        ("10.244.1.9", 1_100, PodOnNode),
        ("10.0.0.9", 1_100, Unspecified),
    ] {
        assert_eq!(names.get(ip(address), age_s).kind, kind, "{address}");
    }
}

#[test]
fn agents_select_a_few_addresses_and_nothing_else() {
    let of = |count: u8, outside| Selection {
        clients: Some((0..count).map(|n| [10, 0, 0, n].into()).collect()),
        outside,
        ..Selection::default()
    };
    assert!(Selection::default().is_of_agents() && of(32, false).is_of_agents());
    assert!(!of(33, false).is_of_agents() && !of(1, true).is_of_agents());
}

#[tokio::test]
async fn nodes_without_agents_so_far_have_their_share() {
    let hub = Hub::sample(1, "test");
    assert_eq!(share(&hub, None), OF_AGENT);
    let nodes = (0..1_000).map(|n| NodeFacts::sample(&format!("n{n}")));
    hub.store().publish(Publication::sample(vec![], nodes.collect()));
    assert_eq!(share(&hub, None), 64);
}

#[test]
fn an_answer_fits_into_a_message_and_the_rest_is_counted() {
    let flow = |size| pb::NodeFlow {
        node: "n".repeat(size),
        ..pb::NodeFlow::default()
    };
    let (fit, rest) = fitting((0..FLOWS + 2).map(|_| (flow(1), 3)));
    assert_eq!((fit.len(), rest), (FLOWS, 6));
    let (flows, rest) = fitting((0..FLOWS).map(|_| (flow(2_000), 3)));
    let shown = flows.len();
    assert!(rest > 0 && shown > 1_000, "{shown}");
    assert_eq!(3 * shown as u64 + rest, 3 * FLOWS as u64);
    let answer = pb::FlowsAnswer {
        flows,
        ..pb::FlowsAnswer::default()
    };
    assert!(answer.encoded_len() < 15 << 18);
}

#[test]
fn the_audit_log_names_the_ends() {
    let mut request = pb::FlowsRequest::default();
    assert_eq!(ends(&request), "");
    (request.from, request.to) = ("outside".to_owned(), "node/n1\n".to_owned());
    assert_eq!(ends(&request), ", from outside, to node/n1");
}

#[test]
fn what_makes_no_sense_in_an_answer_is_left_out() {
    let n1 = NodeName::from("n1");
    let good = pb::ConnectedGroup {
        client: "10.244.1.9".to_owned(),
        endpoint: "10.244.2.7:8080".to_owned(),
        established: u64::MAX,
        closing: 1,
        ..pb::ConnectedGroup::default()
    };
    let found = ReportedGroup::read(&n1, &good, 1).unwrap();
    assert_eq!(found.connections, u64::MAX);
    for wrong in [
        pb::ConnectedGroup {
            port: 1,
            ..good.clone()
        },
        pb::ConnectedGroup {
            client: "rubbish".to_owned(),
            ..good.clone()
        },
        pb::ConnectedGroup {
            endpoint: "10.244.2.7".to_owned(),
            ..good.clone()
        },
        pb::ConnectedGroup {
            established: 0,
            closing: 0,
            ..good.clone()
        },
    ] {
        assert!(ReportedGroup::read(&n1, &wrong, 1).is_none(), "{wrong:?}");
    }
}
