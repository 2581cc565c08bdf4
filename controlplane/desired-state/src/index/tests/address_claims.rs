//! Places that no Service gets, and what one Service may cost.

use std::collections::BTreeMap;

use kplane_model::{Family, Reason};
use proptest::prelude::*;
use proptest::sample::select;

use super::*;
use crate::admission::Reserved;

/// A Service at an address and port, with a node port.
fn at_address(name: &str, external: &str, port: u16, node_port: u16) -> Value {
    let mut service = service(name, "10.96.0.1");
    service["spec"]["externalIPs"] = json!([external]);
    service["spec"]["ports"] = json!([
        {"name": "http", "port": port, "nodePort": node_port},
        {"name": "other", "port": 9999},
    ]);
    service
}

fn node(addresses: &[&str], pod_cidr: &str) -> Value {
    let addresses: Vec<Value> = addresses
        .iter()
        .map(|ip| json!({"type": "InternalIP", "address": ip}))
        .collect();
    json!({"kind": "Node", "metadata": {"name": "n1"}, "spec": {"podCIDR": pod_cidr},
           "status": {"addresses": addresses}})
}

/// Ports that are served at an external address, and node ports.
fn served(publication: &Publication) -> Vec<String> {
    let mut ports: Vec<_> = publication
        .services
        .iter()
        .filter_map(|(_, published)| {
            let port = &published.as_ref()?.port;
            let node_port = port.node_port.map_or(String::new(), |n| format!(" node port {n}"));
            let external: Vec<_> =
                port.external_ips.iter().map(|ip| format!("{ip}:{}", port.port)).collect();
            Some(format!("{}{node_port}", external.join(" ")))
        })
        .filter(|text| !text.is_empty())
        .collect();
    ports.sort();
    ports
}

fn reasons(index: &Index) -> Vec<String> {
    index.issues().iter().map(|issue| issue.reason.clone()).collect()
}

#[test]
fn no_service_gets_a_port_of_the_clusters_programs_on_a_node() {
    for (port, node_port, refused) in [
        (7465, 0, "7465/TCP is where kplane's control plane listens"),
        (10256, 0, "10256/TCP is where kplane's node agent listens"),
        (10250, 0, "10250/TCP is where kubelet listens"),
        (
            8080,
            10250,
            "node port 10250/TCP (IPv4) is where kubelet listens",
        ),
    ] {
        let hijacker = at_address("hijacker", "192.0.2.1", port, node_port);
        let (index, first) = index(&[hijacker, node(&["192.0.2.1"], "")]);
        let expected = match node_port {
            0 => vec!["192.0.2.1:9999".to_owned()],
            _ => vec!["192.0.2.1:8080".to_owned(), "192.0.2.1:9999".to_owned()],
        };
        assert_eq!(served(&first), expected, "the rest is served");
        let issues = index.issues();
        let errors: Vec<_> =
            issues.iter().filter(|issue| issue.severity == Severity::Error).collect();
        assert_eq!((issues.len(), errors.len()), (2, 1), "{issues:?}");
        let reason = &errors[0].reason;
        assert!(reason.contains(refused), "{reason}");
        assert!(reason.ends_with("use another port or another address"));
    }
}

#[test]
fn other_ports_and_protocols_of_a_node_are_a_services_to_take_with_a_warning() {
    let mut balancer = at_address("traefik", "192.0.2.1", 8443, 443);
    balancer["spec"]["ports"][1] = json!({"name": "other", "port": 10250, "protocol": "UDP"});
    let (index, first) = index(&[balancer, node(&["192.0.2.1", "192.0.2.2"], "")]);
    assert_eq!(
        served(&first),
        ["192.0.2.1:10250", "192.0.2.1:8443 node port 443"]
    );
    let issues = index.issues();
    assert_eq!(issues.len(), 1);
    assert_eq!(
        (issues[0].severity, issues[0].code),
        (Severity::Warning, Reason::NodeAddress)
    );
}

/// External and load-balancer addresses alike; what the node's own programs have is not a Service's to take.
#[test]
fn the_usual_ports_of_nodes_are_refused_unless_the_operator_lists_them() {
    let ports = [22, 53, 179, 2379, 2380, 6443, 9100, 10257, 10259, 8080];
    let mut greedy = service("greedy", "10.96.0.1");
    greedy["spec"]["externalIPs"] = json!(["192.0.2.1"]);
    greedy["spec"]["type"] = json!("LoadBalancer");
    greedy["status"] = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.2"}]}});
    greedy["spec"]["ports"] = ports
        .iter()
        .map(|port| json!({"name": format!("p{port}"), "port": port}))
        .collect();
    let on_nodes = |excepted: &str| {
        let excepted: Vec<_> = excepted.split(',').map(|p| p.parse().unwrap()).collect();
        let mut index = Index::new(Admission {
            reserved: Reserved::default().except(&excepted),
            ..Admission::default()
        });
        let objects = [greedy.clone(), node(&["192.0.2.1", "192.0.2.2"], "")];
        let publication = index.apply(lists(&objects)).publication.unwrap();
        let published = publication.services.iter().filter_map(|(_, new)| new.as_ref());
        let mut at = Vec::new();
        for port in published.map(|published| &published.port) {
            let ips = port.external_ips.iter().chain(&port.load_balancer_ips);
            at.extend(ips.map(|ip| format!("{ip}:{}", port.port)));
        }
        at.sort();
        (at, index.issues())
    };
    let (served, issues) = on_nodes("1");
    assert_eq!(served, ["192.0.2.1:8080", "192.0.2.2:8080"]);
    let warned: Vec<_> = issues
        .iter()
        .filter(|issue| issue.code == Reason::NodeAddress)
        .map(|issue| &*issue.reason)
        .collect();
    assert!(
        warned[0].contains("192.0.2.1 is that of a node, and 1 more"),
        "{warned:?}"
    );
    let mut reasons = issues.iter().map(|issue| &*issue.reason);
    assert!(
        reasons.any(|reason| reason.contains("192.0.2.1:2379/TCP is where etcd listens (--allow-"))
    );
    let (served, _) = on_nodes("53,192.0.2.2:2379");
    let expected = [
        "192.0.2.1:53",
        "192.0.2.1:8080",
        "192.0.2.2:2379",
        "192.0.2.2:53",
        "192.0.2.2:8080",
    ];
    assert_eq!(served, expected);
}

#[test]
fn a_node_that_comes_and_goes_takes_its_ports_and_gives_them_back() {
    let (mut index, first) = index(&[
        at_address("web", "192.0.2.1", 10250, 0),
        service("bystander", "10.96.0.9"),
    ]);
    assert_eq!(served(&first), ["192.0.2.1:10250", "192.0.2.1:9999"]);
    let change = apply(&mut index, &node(&["192.0.2.1"], ""));
    assert_eq!(served(&change), ["192.0.2.1:9999"]);
    assert_eq!(reasons(&index).len(), 2);
    // No other Service is recomputed.
    assert!(change.services.iter().all(|(key, _)| &*key.service.name == "web"));
    let change = apply(&mut index, &node(&["192.0.2.2"], ""));
    assert_eq!(served(&change), ["192.0.2.1:10250", "192.0.2.1:9999"]);
    assert_eq!(index.issues(), []);
    let change = apply(&mut index, &node(&["192.0.2.3"], ""));
    assert!(change.services.is_empty());
}

#[test]
fn nobody_but_its_own_service_gets_the_api_servers_place() {
    let mut api = service("kubernetes", "10.96.0.1");
    api["metadata"]["namespace"] = json!("default");
    api["spec"]["externalIPs"] = json!(["192.0.2.9"]);
    api["spec"]["ports"] = json!([{"name": "http", "port": 6443}]);
    let mut endpoints = slice("kubernetes", "kubernetes", &["192.0.2.9"]);
    endpoints["metadata"]["namespace"] = json!("default");
    endpoints["ports"] = json!([{"name": "http", "port": 6443}]);
    let mut hijacker = at_address("hijacker", "192.0.2.9", 6443, 0);
    hijacker["spec"]["clusterIP"] = json!("10.96.0.2");
    hijacker["spec"]["clusterIPs"] = json!(["10.96.0.2"]);
    hijacker["metadata"]["creationTimestamp"] = json!("2020-01-01T00:00:00Z");
    let (mut index, first) = index(&[hijacker.clone(), endpoints.clone()]);
    assert_eq!(served(&first), ["192.0.2.9:9999"]);
    assert!(reasons(&index)[0].contains("192.0.2.9:6443/TCP is where the Kubernetes API server"));
    // The address at which this process reaches the API server is reserved, like those of its
    // endpoints.
    let change = delete(&mut index, &endpoints);
    assert_eq!(served(&change), ["192.0.2.9:6443", "192.0.2.9:9999"]);
    let server = "192.0.2.9:6443".parse().unwrap();
    let reported = Event::ApiServer(BTreeSet::from([server]));
    let change = index.apply(batch(vec![reported])).publication.unwrap();
    assert_eq!(served(&change), ["192.0.2.9:9999"]);
    delete(&mut index, &hijacker);
    assert_eq!(served(&apply(&mut index, &api)), ["192.0.2.9:6443"]);
}

#[test]
fn what_the_operator_lists_and_where_the_control_plane_listens_is_reserved() {
    let listeners = ["198.51.100.1:9443".parse().unwrap()];
    let listed = ["22".parse().unwrap(), "203.0.113.1:443".parse().unwrap()];
    for (address, port, refused) in [
        ("198.51.100.1", 9443, true),
        ("198.51.100.1", 22, false),
        ("192.0.2.1", 22, true),
        ("192.0.2.1", 7465, false),
        ("203.0.113.1", 443, true),
        ("203.0.113.2", 443, false),
    ] {
        let mut index = Index::new(Admission {
            reserved: Reserved::new(&listeners, &[]).with_listed(&listed),
            ..Admission::default()
        });
        let objects = [
            at_address("web", address, port, 0),
            node(&["192.0.2.1"], ""),
        ];
        index.apply(lists(&objects));
        let issues = index.issues();
        let is_refused = issues.iter().any(|issue| issue.severity == Severity::Error);
        assert_eq!(is_refused, refused, "{address}:{port}");
    }
}

#[test]
fn addresses_in_the_clusters_own_ranges_are_served_and_named() {
    let cidr = json!({"kind": "ServiceCIDR", "metadata": {"name": "c"}, "spec": {"cidrs": ["10.98.0.0/16"]}});
    let in_pods = at_address("pods", "10.244.1.7", 80, 0);
    let (mut index, first) = index(&[in_pods.clone(), node(&["192.0.2.1"], "10.244.1.0/24")]);
    assert_eq!(served(&first), ["10.244.1.7:80", "10.244.1.7:9999"]);
    assert!(reasons(&index)[0].contains("10.244.1.7 is in the pod range 10.244.1.0/24"));
    assert_eq!(index.issues()[0].severity, Severity::Warning);
    apply(&mut index, &node(&["192.0.2.1"], "10.244.2.0/24"));
    assert_eq!(index.issues(), []);
    apply(&mut index, &at_address("pods", "10.98.3.4", 80, 0));
    assert_eq!(index.issues(), []);
    apply(&mut index, &cidr);
    assert!(reasons(&index)[0].contains("10.98.3.4 is in the range 10.98.0.0/16 of ClusterIPs"));
    delete(&mut index, &cidr);
    assert_eq!(index.issues(), []);
    assert_eq!(index.address_claims.users().count(), 1);
    delete(&mut index, &in_pods);
    assert_eq!(index.address_claims.users().count(), 0);
}

#[test]
fn ports_times_addresses_are_cut_and_all_others_are_served() {
    let mut hostile = service("hostile", "10.96.0.1");
    let ports: Vec<Value> =
        (1..=1_000).map(|n| json!({"name": format!("p{n}"), "port": n})).collect();
    let ips: Vec<String> =
        (0..1_000).map(|n| format!("198.18.{}.{}", n / 250, n % 250 + 1)).collect();
    hostile["spec"]["ports"] = json!(ports);
    hostile["spec"]["externalIPs"] = json!(ips);
    let (mut index, first) = index(&[hostile, service("good", "10.96.0.2")]);
    assert_eq!(first.services.len(), 1_001);
    let address_claims = |publication: &Publication| -> usize {
        publication
            .services
            .iter()
            .filter_map(|(_, p)| p.as_ref())
            .map(|p| 1 + p.port.external_ips.len())
            .sum()
    };
    assert_eq!(address_claims(&first), 16_000 + 1);
    assert_eq!(reasons(&index).len(), 1);
    assert!(
        reasons(&index)[0]
            .starts_with("spec.externalIPs has 1000 addresses, which with 1000 ports")
    );
    // A Service that loses all places to another one does not get an issue for each of them.
    let mut twin = service("twin", "10.96.0.3");
    twin["spec"]["ports"] = json!(ports);
    twin["spec"]["externalIPs"] = json!(ips);
    apply(&mut index, &twin);
    assert_eq!(reasons(&index).len(), 1 + 1 + 20);
}

#[test]
fn endpoints_times_places_are_cut_and_every_port_keeps_some() {
    let mut wide = service("wide", "10.96.0.1");
    let ports = |from: u16| -> Vec<Value> {
        (0..100).map(|n| json!({"name": format!("p{n}"), "port": from + n})).collect()
    };
    wide["spec"]["ports"] = json!(ports(1_000));
    let ips: Vec<String> = (0..5_000).map(|n| format!("10.1.{}.{}", n / 250, n % 250)).collect();
    let ips: Vec<&str> = ips.iter().map(String::as_str).collect();
    let mut slice = slice("wide-1", "wide", &ips);
    slice["ports"] = json!(ports(8_000)[..50]);
    let (mut index, first) = index(&[wide.clone(), slice.clone()]);
    let endpoints = |publication: &Publication| -> Vec<usize> {
        publication
            .services
            .iter()
            .filter_map(|(_, p)| p.as_ref())
            .map(|p| p.variants.default.len())
            .collect()
    };
    let all: usize = endpoints(&first).iter().sum();
    assert_eq!(all, 50 * (262_144 / 100));
    assert!(reasons(&index)[0].starts_with("5000 endpoints on 100 ports with 1 addresses each"));
    wide["spec"]["ports"] = json!(ports(1_000)[..10]);
    let change = apply(&mut index, &wide);
    assert_eq!(endpoints(&change).iter().sum::<usize>(), 50_000);
    assert_eq!(index.issues(), []);
}

#[test]
fn services_that_do_not_fit_into_their_namespace_are_refused_and_all_others_served() {
    let mut index = Index::new(Admission {
        namespace_elements: 4,
        ..Admission::default()
    });
    let mut elsewhere = service("c", "10.96.0.3");
    elsewhere["metadata"]["namespace"] = json!("other");
    let objects = [
        service("a", "10.96.0.1"),
        slice("a-1", "a", &["10.244.1.1", "10.244.1.2", "10.244.1.3"]),
        service("b", "10.96.0.2"),
        elsewhere,
    ];
    index.apply(lists(&objects));
    assert_eq!(index.issues(), []);
    assert_eq!(index.totals().services, 3);
    // With one more endpoint of the first Service, the second one no longer fits.
    let more = ["10.244.1.1", "10.244.1.2", "10.244.1.3", "10.244.1.4"];
    let publication = apply(&mut index, &slice("a-1", "a", &more));
    let gone = publication.services.iter().filter(|(_, new)| new.is_none());
    assert_eq!(gone.count(), 1);
    assert!(reasons(&index)[0].contains("exceeds the limit of its namespace: it needs 1"));
    // With a single endpoint both fit again.
    apply(&mut index, &slice("a-1", "a", &more[..1]));
    assert_eq!(index.issues(), []);
    assert_eq!(index.totals().services, 3);
}

/// A node port of two protocols counts once, as does a ClusterIP of two ports, and the counts follow each change.
#[test]
fn what_services_have_taken_of_ranges_is_counted() {
    let mut dns = service("dns", "10.96.0.1");
    dns["spec"]["type"] = json!("NodePort");
    let port = |name, protocol| json!({"name": name, "port": 53, "protocol": protocol, "nodePort": 30_053});
    dns["spec"]["ports"] = json!([port("a", "TCP"), port("b", "UDP")]);
    let (mut index, _) = index(slice::from_ref(&dns));
    assert_eq!(index.totals().taken.node_ports, 1);
    assert_eq!(index.totals().taken.cluster_ips.of(Family::V4), 1);
    dns["spec"]["ports"][1]["nodePort"] = json!(30_054);
    apply(&mut index, &dns);
    assert_eq!(index.totals().taken.node_ports, 2);
    assert_eq!(index.totals().taken.cluster_ips.of(Family::V4), 1);
    delete(&mut index, &dns);
    assert_eq!(index.totals(), Totals::default());
    // A range inside another one adds no addresses.
    let cidrs = ["10.98.0.0/16", "10.98.1.0/24", "fd00::/112"];
    let ranges =
        json!({"kind": "ServiceCIDR", "metadata": {"name": "c"}, "spec": {"cidrs": cidrs}});
    apply(&mut index, &ranges);
    let addresses = index.totals().service_addresses;
    let addresses = Family::ALL.map(|family| addresses.of(family));
    assert_eq!(addresses, [(1 << 16) - 2, (1 << 16) - 1]);
}

/// An object of two Services, three Nodes and a range, in one of its states; `false` = it is gone.
fn any_change() -> impl Strategy<Value = (Value, bool)> {
    const IPS: [&str; 4] = ["192.0.2.1", "192.0.2.2", "10.244.1.7", "10.98.3.4"];
    let web = (
        select(&["1", "2"][..]),
        select(&IPS[..]),
        select(vec![80, 10250]),
        select(vec![0, 443, 10250]),
    );
    let web = web.prop_map(|(number, external, port, node_port)| {
        let mut web = at_address(&format!("web{number}"), external, port, node_port);
        web["spec"]["clusterIP"] = json!(format!("10.96.0.{number}"));
        web["spec"]["clusterIPs"] = json!([web["spec"]["clusterIP"]]);
        web
    });
    let addresses = prop::collection::btree_set(select(&IPS[..2]), 0..3);
    let ranges = select(&["", "10.244.1.0/24", "10.244.0.0/16"][..]);
    let names = select(&["n1", "n2", "n3"][..]);
    let of_node = (names, addresses, ranges).prop_map(|(name, addresses, range)| {
        let mut node = node(&Vec::from_iter(addresses), range);
        node["metadata"]["name"] = json!(name);
        node
    });
    let cidr = json!({"kind": "ServiceCIDR", "metadata": {"name": "c"}, "spec": {"cidrs": ["10.98.0.0/16"]}});
    let object = prop_oneof![3 => web, 5 => of_node, 1 => Just(cidr)];
    (object, prop::bool::weighted(0.6))
}

/// Follows what is published of Services: the addresses and node ports of each port.
fn follow(published: &mut BTreeMap<ServiceKey, String>, publication: Publication) {
    for (key, new) in publication.services {
        match new {
            Some(of) => {
                let served = (&of.port.external_ips, of.port.node_port);
                published.insert(key, format!("{served:?}"))
            }
            None => published.remove(&key),
        };
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Whatever Nodes, Services and ranges went through, an index serves and says what a new one does.
    #[test]
    fn places_do_not_depend_on_what_was_before(
        changes in prop::collection::vec(any_change(), 1..30),
    ) {
        let (mut index, _) = index(&[]);
        let (mut world, mut published) = (BTreeMap::new(), BTreeMap::new());
        for (object, there) in changes {
            let name = format!("{} {}", object["kind"], object["metadata"]["name"]);
            let event = if there {
                world.insert(name, object.clone());
                Event::Apply(self::object(&object))
            } else {
                world.remove(&name);
                Event::Delete(self::object(&object).object.id())
            };
            let publication = index.apply(batch(vec![event])).publication;
            publication.into_iter().for_each(|publication| follow(&mut published, publication));
            let (fresh, publication) = self::index(&Vec::from_iter(world.values().cloned()));
            let mut afresh = BTreeMap::new();
            follow(&mut afresh, publication);
            prop_assert_eq!(&published, &afresh);
            prop_assert_eq!(index.issues(), fresh.issues());
        }
    }
}
