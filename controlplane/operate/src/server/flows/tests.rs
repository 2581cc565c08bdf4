//! Names of ends, and what agents say, within bounds.

use std::collections::HashMap;
use std::sync::Arc;

use kplane_model::NodeFacts;

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
        (ip("10.244.1.9"), PodName::new("shop", "cart-1")),
        // A Pod on its node's network has the node's address.
        (ip("172.18.0.3"), PodName::new("kube-system", "proxy")),
    ]);
    let names = Names::new(Some(pods), nodes());
    for (address, kind, name) in [
        ("10.244.1.9", Pod, "shop/cart-1"),
        ("172.18.0.3", Node, "n2"),
        ("10.244.2.7", PodOnNode, "n2"),
        ("192.0.2.1", Outside, ""),
    ] {
        let name = name.to_owned();
        assert_eq!(names.get(ip(address)), Named { kind, name }, "{address}");
    }
    let unnamed = Names::new(None, nodes());
    assert_eq!(unnamed.get(ip("10.244.1.9")).kind, PodOnNode);
    // Missing facts never say that a client is outside.
    let nothing = Names::new(None, [].into_iter());
    assert_eq!(nothing.get(ip("192.0.2.1")).kind, Unspecified);
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
    let found = ToldGroup::read(&n1, &good, 1).unwrap();
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
        assert!(ToldGroup::read(&n1, &wrong, 1).is_none(), "{wrong:?}");
    }
}
