//! Scenarios picked by hand, by section: Services and their addresses (a), endpoints (b), what is no
//! Service's at all.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use kplane_model::{Family, Protocol};
use serde_json::{Value, json};

use crate::conformance::scenario::Scenario;
use kplane_tests::support::model::SECOND_TARGET;
use kplane_tests::support::objects::{
    self, addresses, draining_in, ready_in, slices, with_endpoints, with_pods,
};
use kplane_tests::support::{At, Client, Question, TARGET, ep, node_ip, node_name, second_ip, svc};

pub(crate) fn scenarios() -> Vec<Scenario> {
    let sections = [
        not_ours(),
        families_and_protocols(),
        external(),
        source_ranges(),
        affinity(),
        policies(),
        kinds_of_endpoints(),
        unused(),
        node_ports(),
        odd_slices(),
        hints(),
        strangers(),
    ];
    sections.into_iter().flatten().collect()
}

/// A ClusterIP Service with the same port in TCP and UDP, in both families.
pub(crate) fn service(number: u16) -> Value {
    with_udp(objects::service(number))
}

/// The same of type LoadBalancer with a node port and an external IP.
pub(crate) fn everywhere(number: u16) -> Value {
    let mut service = with_udp(objects::load_balancer(number));
    service["spec"]["externalIPs"] = json!(addresses(number, At::ExternalIp));
    service
}

fn with_udp(mut service: Value) -> Value {
    let mut tcp = service["spec"]["ports"][0].take();
    tcp["name"] = json!("tcp");
    let mut udp = tcp.clone();
    udp["name"] = json!("udp");
    udp["protocol"] = json!("UDP");
    service["spec"]["ports"] = json!([tcp, udp]);
    service
}

/// Something is different in a Service.
pub(crate) fn with(mut service: Value, path: &str, value: Value) -> Value {
    let (parent, field) = path.rsplit_once('/').unwrap_or(("", path));
    if let Some(parent) = service.pointer_mut(parent) {
        parent[field] = value;
    }
    service
}

/// A Service that is reached everywhere, with an external policy.
fn with_policy(number: u16, policy: &str) -> Value {
    let path = "/spec/externalTrafficPolicy";
    with(everywhere(number), path, json!(policy))
}

fn entries(list: &mut Value) -> impl Iterator<Item = &mut Value> {
    list.as_array_mut().into_iter().flatten()
}

fn clients_and_families() -> impl Iterator<Item = (Client, Family)> {
    let clients = Client::ALL.into_iter();
    clients.flat_map(|client| Family::ALL.map(|family| (client, family)))
}

/// A1
fn not_ours() -> Vec<Scenario> {
    let label = json!({"service.kubernetes.io/service-proxy-name": "another"});
    let mut name = service(601);
    name["spec"] = json!({
        "type": "ExternalName", "externalName": "example.org", "ports": name["spec"]["ports"],
        "externalIPs": addresses(601, At::ExternalIp),
    });
    let mut headless = service(602);
    headless["spec"]["clusterIP"] = json!("None");
    headless["spec"]["clusterIPs"] = json!(["None"]);
    headless["spec"]["externalIPs"] = json!(addresses(602, At::ExternalIp));
    vec![
        Scenario::new("A1 a Service of another proxy")
            .objects(with_pods(
                with(everywhere(600), "/metadata/labels", label),
                &["a", "c"],
            ))
            .everybody(600, &At::ALL),
        Scenario::new("A1 an ExternalName Service with external IPs")
            .objects(with_pods(name, &["a", "c"]))
            .everybody(601, &[At::ExternalIp]),
        Scenario::new("A1 a headless Service with external IPs")
            .objects(with_pods(headless, &["a", "c"]))
            .everybody(602, &[At::ExternalIp]),
    ]
}

/// A2, A3
fn families_and_protocols() -> Vec<Scenario> {
    let single = |number: u16, family: usize| {
        let mut single = everywhere(number);
        let ip = &addresses(number, At::ClusterIp)[family];
        single["spec"]["clusterIP"] = json!(ip);
        single["spec"]["clusterIPs"] = json!([ip]);
        single["spec"]["ipFamilies"] = json!([Family::ALL[family].to_string()]);
        with_pods(single, &["a", "c"])
    };
    let mut apart = with(service(605), "/spec/type", json!("NodePort"));
    for port in entries(&mut apart["spec"]["ports"]) {
        port["nodePort"] = json!(svc(605).node_port());
    }
    let mut objects = vec![apart.clone()];
    for (index, pod) in ["a", "c"].into_iter().enumerate() {
        for mut slice in slices(&apart, &[(pod, json!({}))]) {
            slice["ports"] = json!([slice["ports"][index]]);
            let name = format!(
                "{}-{pod}",
                slice["metadata"]["name"].as_str().unwrap_or_default()
            );
            slice["metadata"]["name"] = json!(name);
            objects.push(slice);
        }
    }
    vec![
        Scenario::new("A2 only IPv4").objects(single(603, 0)).everybody(603, &At::ALL),
        Scenario::new("A2 only IPv6").objects(single(604, 1)).everybody(604, &At::ALL),
        Scenario::new("A3 a port is one Service port in TCP and another in UDP")
            .objects(objects)
            .everybody(605, &[At::ClusterIp, At::NodePort]),
    ]
}

/// A5, A6, A7
fn external() -> Vec<Scenario> {
    let mut own = service(607);
    own["spec"]["externalIPs"] = json!([
        node_ip(1, Family::V4).to_string(),
        node_ip(2, Family::V6).to_string()
    ]);
    // Below 1024 kplane serves nothing at a node's address, on purpose.
    own["spec"]["ports"][0]["port"] = json!(6070);
    own["spec"]["ports"][1]["port"] = json!(6070);
    let mut at_nodes = Scenario::new("A5 an external IP that is a node's own")
        .objects(with_pods(own, &["a", "c"]));
    for client in Client::ALL {
        for ip in [node_ip(1, Family::V4), node_ip(2, Family::V6)] {
            let to = SocketAddr::new(ip, 6070);
            at_nodes = at_nodes
                .packet(Question::new(client, Protocol::Tcp, to))
                .packet(Question::new(client, Protocol::Udp, to));
        }
    }
    let ingress = |number, ingress: &dyn Fn(&str) -> Value| {
        let entries: Vec<Value> =
            addresses(number, At::LoadBalancer).iter().map(|ip| ingress(ip)).collect();
        let service = with(
            everywhere(number),
            "/status/loadBalancer/ingress",
            json!(entries),
        );
        with_pods(service, &["a", "c"])
    };
    let mut both = everywhere(611);
    let more: Vec<Value> = [611, 1611]
        .iter()
        .flat_map(|n| addresses(*n, At::LoadBalancer))
        .map(|ip| json!({"ip": ip}))
        .collect();
    both["status"]["loadBalancer"]["ingress"] = json!(more);
    let mut none = everywhere(612);
    entries(&mut none["spec"]["ports"]).for_each(|port| port["nodePort"] = Value::Null);
    let external_ips = json!(addresses(606, At::ExternalIp));
    vec![
        Scenario::new("A5 a ClusterIP Service with external IPs")
            .objects(with_pods(
                with(service(606), "/spec/externalIPs", external_ips),
                &["a", "c"],
            ))
            .everybody(606, &[At::ClusterIp, At::ExternalIp])
            .always(),
        at_nodes,
        Scenario::new("A6 ipMode Proxy")
            .objects(ingress(608, &|ip| json!({"ip": ip, "ipMode": "Proxy"})))
            .everybody(608, &At::ALL),
        Scenario::new("A6 ipMode VIP")
            .objects(ingress(609, &|ip| json!({"ip": ip, "ipMode": "VIP"})))
            .everybody(609, &At::ALL),
        Scenario::new("A6 a host name only")
            .objects(ingress(610, &|_| json!({"hostname": "lb.example.org"})))
            .everybody(610, &At::ALL),
        Scenario::new("A6 several load-balancer IPs")
            .objects(with_pods(both, &["a", "c"]))
            .everybody(611, &[At::LoadBalancer])
            .everybody(1611, &[At::LoadBalancer]),
        Scenario::new("A7 no node ports are allocated")
            .objects(with_pods(none, &["a", "c"]))
            .everybody(612, &At::ALL),
        shared_address(),
    ]
}

/// A3, A8: two Services at one load-balancer address.
fn shared_address() -> Scenario {
    let mut other = everywhere(614);
    other["spec"]["externalIPs"] = Value::Null;
    other["status"]["loadBalancer"]["ingress"] =
        everywhere(613)["status"]["loadBalancer"]["ingress"].clone();
    for port in entries(&mut other["spec"]["ports"]) {
        port["port"] = json!(81);
    }
    other["spec"]["externalTrafficPolicy"] = json!("Local");
    other["spec"]["loadBalancerSourceRanges"] = json!(["172.30.0.3/32", "fd30::3/128"]);
    let mut scenario = Scenario::new("A3 A8 two Services at one load-balancer address")
        .objects(with_pods(everywhere(613), &["a", "c"]))
        .objects(with_pods(other, &["b", "c"]))
        .everybody(613, &At::ALL);
    for client in Client::ALL {
        for family in Family::ALL {
            let mut to = svc(613).address(At::LoadBalancer, family, 1);
            to.set_port(81);
            scenario = scenario.packet(Question::new(client, Protocol::Tcp, to));
        }
    }
    scenario
}

/// Number, name, source ranges and endpoints of a Service.
type Ranged = (
    u16,
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
);

const RANGED: [Ranged; 8] = [
    (
        620,
        "A8 the client outside is admitted",
        &["172.30.0.3/32", "fd30::3/128"],
        &["a", "c"],
    ),
    (
        621,
        "A8 pods of node-1 are admitted",
        &["10.244.1.0/24", "fd44:0:0:1::/64"],
        &["a", "c"],
    ),
    (
        622,
        "A8 nobody of ours is admitted",
        &["192.0.2.0/24", "2001:db8::/32"],
        &["a", "c"],
    ),
    (
        623,
        "A8 everybody is admitted",
        &["192.0.2.0/24", "0.0.0.0/0", "::/0"],
        &["a", "c"],
    ),
    (
        624,
        "A8 ranges of IPv4 only",
        &["172.30.0.3/32"],
        &["a", "c"],
    ),
    (
        625,
        "A8 overlapping ranges",
        &[
            "172.30.0.0/16",
            "172.30.0.3/32",
            "172.30.0.0/24",
            "fd30::/64",
            "fd30::/112",
        ],
        &["a", "c"],
    ),
    (
        626,
        "A9 node-1 is admitted",
        &["172.30.1.1/32", "fd30::1:1/128"],
        &["a", "c"],
    ),
    (
        627,
        "A10 without endpoints",
        &["172.30.0.3/32", "fd30::3/128"],
        &[],
    ),
];

/// A8, A9, A10
fn source_ranges() -> Vec<Scenario> {
    let scenario = |(number, name, ranges, pods): Ranged| {
        let path = "/spec/loadBalancerSourceRanges";
        let service = with(everywhere(number), path, json!(ranges));
        let mut scenario = Scenario::new(name)
            .objects(with_pods(service, pods))
            .everybody(number, &At::ALL);
        for family in Family::ALL {
            let to = svc(number).address(At::LoadBalancer, family, 1);
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                let question = Question::new(Client::Node, protocol, to).source(to.ip());
                scenario = scenario.packet(question);
            }
        }
        scenario
    };
    RANGED.into_iter().map(scenario).collect()
}

/// A11
fn affinity() -> Vec<Scenario> {
    let cases = [
        (630, "A11 affinity", "Cluster", "Cluster"),
        (
            631,
            "A11 A16 affinity with external policy Local",
            "Cluster",
            "Local",
        ),
        (
            632,
            "A11 A12 affinity with internal policy Local",
            "Local",
            "Cluster",
        ),
        (
            633,
            "A11 A12 A16 affinity with both policies Local",
            "Local",
            "Local",
        ),
    ];
    let scenario = |(number, name, internal, external): (u16, &str, &str, &str)| {
        let mut service = everywhere(number);
        service["spec"]["sessionAffinity"] = json!("ClientIP");
        service["spec"]["internalTrafficPolicy"] = json!(internal);
        service["spec"]["externalTrafficPolicy"] = json!(external);
        Scenario::new(name)
            .objects(with_pods(service, &["a", "b", "c"]))
            .everybody(number, &At::ALL)
            .sticky()
    };
    cases.into_iter().map(scenario).collect()
}

/// A12 to A18, B3, B5: policies and where endpoints are.
fn policies() -> Vec<Scenario> {
    let draining = || json!({"conditions": {"ready": false, "serving": true, "terminating": true}});
    let ready = || json!({});
    let endpoints: [(&str, Vec<(&str, Value)>); 7] = [
        ("a and c ready", vec![("a", ready()), ("c", ready())]),
        ("c ready", vec![("c", ready())]),
        ("a and b ready", vec![("a", ready()), ("b", ready())]),
        ("none", vec![]),
        (
            "a and c draining",
            vec![("a", draining()), ("c", draining())],
        ),
        ("c draining", vec![("c", draining())]),
        (
            "a draining, c ready",
            vec![("a", draining()), ("c", ready())],
        ),
    ];
    let mut scenarios = Vec::new();
    let mut number = 640;
    for (words, pods) in endpoints {
        for (internal, external) in [
            ("Cluster", "Cluster"),
            ("Cluster", "Local"),
            ("Local", "Cluster"),
            ("Local", "Local"),
        ] {
            let mut service = everywhere(number);
            service["spec"]["internalTrafficPolicy"] = json!(internal);
            service["spec"]["externalTrafficPolicy"] = json!(external);
            let name = format!("A12-A18 internal {internal}, external {external}: {words}");
            let scenario = Scenario::new(name)
                .objects(with_endpoints(service, &pods))
                .everybody(number, &At::ALL);
            scenarios.push(match words {
                "a and c ready" | "c ready" | "none" => scenario.always(),
                _ => scenario,
            });
            number += 1;
        }
    }
    scenarios
}

/// A15: endpoints that are clients or nodes themselves, or no pods.
fn kinds_of_endpoints() -> Vec<Scenario> {
    let elsewhere = |number: u16, ips: [IpAddr; 2], node: Option<String>, external: &str| {
        let service = with_policy(number, external);
        let mut objects = with_pods(service, &["a"]);
        for (slice, ip) in objects[1..].iter_mut().zip(ips) {
            slice["endpoints"] = json!([{"addresses": [ip.to_string()], "nodeName": node}]);
        }
        objects
    };
    let node = |number| Family::ALL.map(|family| node_ip(number, family));
    let client = Family::ALL.map(|family| Client::Outside.source(family));
    vec![
        Scenario::new("A15 hairpin")
            .objects(with_pods(everywhere(670), &["a"]))
            .everybody(670, &At::ALL)
            .always(),
        Scenario::new("A15 an endpoint in the network of node-1")
            .objects(elsewhere(671, node(1), Some(node_name(1)), "Cluster"))
            .everybody(671, &At::ALL)
            .always(),
        Scenario::new("A15 A16 a local endpoint in the network of node-1")
            .objects(elsewhere(672, node(1), Some(node_name(1)), "Local"))
            .everybody(672, &At::ALL),
        Scenario::new("A15 an endpoint in the network of node-2")
            .objects(elsewhere(673, node(2), Some(node_name(2)), "Cluster"))
            .everybody(673, &At::ALL),
        Scenario::new("A15 an endpoint outside of the cluster")
            .objects(elsewhere(674, client, None, "Cluster"))
            .everybody(674, &At::ALL),
        Scenario::new("A13 an endpoint outside of the cluster with policy Local")
            .objects(elsewhere(675, client, None, "Local"))
            .everybody(675, &At::ALL),
    ]
}

/// A18, A20: ports and addresses that nobody has.
fn unused() -> Vec<Scenario> {
    let mut ports = Scenario::new("A20 unused ports of a Service")
        .objects(with_pods(everywhere(680), &["a", "c"]));
    let mut unallocated = Scenario::new("A20 addresses that no Service has");
    for (client, family) in clients_and_families() {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            for at in At::ALL {
                let mut to = svc(680).address(at, family, client.node());
                to.set_port(to.port() + 1300);
                ports = ports.packet(Question::new(client, protocol, to));
                let nobody = svc(1900).address(at, family, client.node());
                unallocated = unallocated.packet(Question::new(client, protocol, nobody));
            }
        }
        let beside: IpAddr = match family {
            Family::V4 => Ipv4Addr::new(10, 97, 0, 1).into(),
            Family::V6 => Ipv6Addr::new(0xfd97, 0, 0, 0, 0, 0, 0, 1).into(),
        };
        if client != Client::Outside {
            unallocated = unallocated.packet(Question::new(
                client,
                Protocol::Tcp,
                SocketAddr::new(beside, 80),
            ));
        }
    }
    let deaf = with_pods(everywhere(681), &["a", "c"]).into_iter().map(|mut object| {
        for port in entries(&mut object["ports"]) {
            port["port"] = json!(9);
        }
        object
    });
    vec![
        ports.always(),
        unallocated.always(),
        Scenario::new("A18 endpoints that do not listen")
            .objects(deaf)
            .everybody(681, &At::ALL),
    ]
}

/// A21
fn node_ports() -> Vec<Scenario> {
    let cases = [
        (690, "A21 node ports", "Cluster", &["a", "c"][..]),
        (
            691,
            "A21 A16 node ports with policy Local",
            "Local",
            &["a"][..],
        ),
        (
            692,
            "A21 A18 node ports without endpoints",
            "Cluster",
            &[][..],
        ),
    ];
    let scenario = |(number, name, policy, pods): (u16, &str, &str, &[&'static str])| {
        let service = with_policy(number, policy);
        let mut scenario = Scenario::new(name).objects(with_pods(service, pods));
        let port = svc(number).node_port();
        for (client, family) in clients_and_families() {
            let loopback: IpAddr = match family {
                Family::V4 => Ipv4Addr::LOCALHOST.into(),
                Family::V6 => Ipv6Addr::LOCALHOST.into(),
            };
            let mut to = vec![node_ip(1, family), node_ip(2, family), second_ip(family)];
            to.push(svc(number).address(At::LoadBalancer, family, 1).ip());
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                for ip in &to {
                    scenario = scenario.packet(Question::new(
                        client,
                        protocol,
                        SocketAddr::new(*ip, port),
                    ));
                }
                if client == Client::Node {
                    let question = Question::new(client, protocol, SocketAddr::new(loopback, port));
                    scenario = scenario.packet(question.source(loopback));
                }
            }
        }
        scenario.always()
    };
    cases.into_iter().map(scenario).collect()
}

/// Number, name and objects of a Service.
type Sliced = (u16, &'static str, Vec<Value>);

/// A27, A28, A30, B7: how slices are written.
fn odd_slices() -> Vec<Scenario> {
    let scenario = |(number, name, objects): Sliced| {
        Scenario::new(name).objects(objects).everybody(number, &At::ALL)
    };
    let cases = [repeated(), odd_ports(), odd_conditions()].concat();
    let mut all: Vec<Scenario> = cases.into_iter().map(scenario).collect();
    all.push(unnamed_port());
    all.push(names_of_nodes());
    all
}

fn conditions(ready: bool, serving: bool, terminating: bool) -> Value {
    json!({"conditions": {"ready": ready, "serving": serving, "terminating": terminating}})
}

/// A27: of an endpoint in several slices.
fn repeated() -> Vec<Sliced> {
    let twice = |number: u16, more: Value| {
        let mut objects = with_pods(everywhere(number), &["a", "c"]);
        for mut slice in slices(&objects[0].clone(), &[("a", more.clone())]) {
            let name = format!(
                "{}-z",
                slice["metadata"]["name"].as_str().unwrap_or_default()
            );
            slice["metadata"]["name"] = json!(name);
            objects.push(slice);
        }
        objects
    };
    vec![
        (700, "A27 an endpoint in two slices", twice(700, json!({}))),
        (
            701,
            "A27 an endpoint that a later slice calls not ready",
            twice(701, conditions(false, false, false)),
        ),
        (
            702,
            "A27 an endpoint that a later slice calls terminated",
            twice(702, conditions(false, false, true)),
        ),
        (
            703,
            "A27 an endpoint that a later slice calls draining",
            twice(703, conditions(false, true, true)),
        ),
    ]
}

/// A27, A28: ports, labels and addresses of slices.
fn odd_ports() -> Vec<Sliced> {
    let edited = |number: u16, edit: &dyn Fn(&mut Value)| {
        let mut objects = with_pods(everywhere(number), &["a", "c"]);
        objects[1..].iter_mut().for_each(edit);
        objects
    };
    vec![
        (
            704,
            "A27 slices of nobody",
            edited(704, &|slice| slice["metadata"]["labels"] = json!({})),
        ),
        (
            705,
            "A27 slices without ports",
            edited(705, &|slice| slice["ports"] = Value::Null),
        ),
        (
            706,
            "A27 ports without numbers",
            edited(706, &|slice| {
                for port in entries(&mut slice["ports"]) {
                    port["port"] = Value::Null;
                }
            }),
        ),
        (
            707,
            "A27 only the first address of an endpoint",
            edited(707, &|slice| {
                let more = slice["endpoints"][1]["addresses"][0].clone();
                slice["endpoints"][0]["addresses"]
                    .as_array_mut()
                    .into_iter()
                    .for_each(|ips| ips.push(more.clone()));
                slice["endpoints"].as_array_mut().into_iter().for_each(|all| all.truncate(1));
            }),
        ),
        (
            708,
            "A28 ports of other names",
            edited(708, &|slice| {
                slice["ports"][0]["name"] = json!("other");
            }),
        ),
        (
            709,
            "A28 ports of other protocols",
            edited(709, &|slice| {
                slice["ports"][0]["protocol"] = json!("SCTP");
            }),
        ),
        (
            710,
            "A28 another target port",
            edited(710, &|slice| {
                // Only pod c listens there.
                slice["endpoints"]
                    .as_array_mut()
                    .into_iter()
                    .for_each(|all| drop(all.remove(0)));
                slice["ports"][0]["port"] = json!(SECOND_TARGET);
                slice["ports"][1]["port"] = json!(SECOND_TARGET);
            }),
        ),
    ]
}

/// A27, A30, B7
fn odd_conditions() -> Vec<Sliced> {
    vec![
        (
            711,
            "B7 serving but not ready",
            with_endpoints(
                everywhere(711),
                &[("a", conditions(false, true, false)), ("c", json!({}))],
            ),
        ),
        (
            712,
            "A30 publishNotReadyAddresses",
            with_endpoints(
                with(
                    everywhere(712),
                    "/spec/publishNotReadyAddresses",
                    json!(true),
                ),
                &[
                    ("a", conditions(false, false, false)),
                    ("c", conditions(false, true, false)),
                ],
            ),
        ),
        (
            713,
            "A27 serving is not said of a draining endpoint",
            with_endpoints(
                everywhere(713),
                &[
                    (
                        "a",
                        json!({"conditions": {"ready": false, "terminating": true}}),
                    ),
                    (
                        "c",
                        json!({"conditions": {"ready": false, "terminating": true, "serving": false}}),
                    ),
                ],
            ),
        ),
        (
            714,
            "A27 ready and terminating",
            with_endpoints(
                everywhere(714),
                &[("a", conditions(true, true, true)), ("c", json!({}))],
            ),
        ),
        (
            715,
            "A27 ready but not serving",
            with_endpoints(
                everywhere(715),
                &[("a", conditions(true, false, false)), ("c", json!({}))],
            ),
        ),
    ]
}

/// A28: a Service with one port needs no name for it.
fn unnamed_port() -> Scenario {
    let mut objects = with_pods(objects::load_balancer(716), &["a", "c"]);
    objects[0]["spec"]["ports"][0]["name"] = Value::Null;
    objects[1..]
        .iter_mut()
        .for_each(|slice| slice["ports"][0]["name"] = Value::Null);
    Scenario::new("A28 a port without a name")
        .objects(objects)
        .everybody(716, &[At::ClusterIp, At::NodePort, At::LoadBalancer])
}

/// A12: local is who says so by `nodeName`, whatever the address.
fn names_of_nodes() -> Scenario {
    let mut service = everywhere(717);
    service["spec"]["internalTrafficPolicy"] = json!("Local");
    service["spec"]["externalTrafficPolicy"] = json!("Local");
    let named = |name: Value| json!({"nodeName": name});
    let endpoints = [
        ("a", named(json!("node-2"))),
        ("b", named(Value::Null)),
        ("c", named(json!("node-1"))),
    ];
    Scenario::new("A12 local endpoints are those that name the node")
        .objects(with_endpoints(service, &endpoints))
        .everybody(717, &At::ALL)
}

/// Number, name and endpoints of a Service.
type Hinted = (u16, &'static str, Vec<(&'static str, Value)>);

/// Hints for a node and a zone.
fn nodes(name: &str, zone: &str) -> Value {
    json!({"hints": {"forNodes": [{"name": name}], "forZones": [{"name": zone}]}})
}

/// Hints for several zones.
fn zones(names: &[&str]) -> Value {
    let names: Vec<Value> = names.iter().map(|name| json!({"name": name})).collect();
    json!({"hints": {"forZones": names}})
}

/// B2, B3
fn hinted() -> Vec<Hinted> {
    vec![
        (
            720,
            "B2 everybody in the own zone",
            vec![("a", ready_in("zone-1")), ("c", ready_in("zone-2"))],
        ),
        (
            721,
            "B2 everybody in the other zone",
            vec![("a", ready_in("zone-2")), ("c", ready_in("zone-1"))],
        ),
        (
            722,
            "B2 one without a hint",
            vec![
                ("a", ready_in("zone-1")),
                ("b", json!({})),
                ("c", ready_in("zone-2")),
            ],
        ),
        (
            723,
            "B2 only zone-1 is served",
            vec![("a", ready_in("zone-1")), ("b", ready_in("zone-1"))],
        ),
        (
            724,
            "B2 several zones",
            vec![
                ("a", zones(&["zone-1", "zone-2"])),
                ("c", zones(&["zone-2", "zone-3"])),
            ],
        ),
        (
            725,
            "B2 hints for nodes",
            vec![
                ("a", nodes("node-1", "zone-1")),
                ("c", nodes("node-2", "zone-2")),
            ],
        ),
        (
            726,
            "B2 hints for one node only",
            vec![
                ("a", nodes("node-2", "zone-1")),
                ("c", nodes("node-2", "zone-2")),
            ],
        ),
        (
            727,
            "B2 a hint for a node is missing",
            vec![
                ("a", ready_in("zone-1")),
                ("b", nodes("node-1", "zone-2")),
                ("c", nodes("node-2", "zone-2")),
            ],
        ),
        (
            728,
            "B3 draining in the own zone, ready in the other",
            vec![("a", draining_in("zone-1")), ("c", ready_in("zone-2"))],
        ),
        (
            729,
            "B3 all draining, with hints",
            vec![("a", draining_in("zone-1")), ("c", draining_in("zone-2"))],
        ),
    ]
}

/// B2, B3, B5, B8
fn hints() -> Vec<Scenario> {
    let mut all = Vec::new();
    for (number, name, endpoints) in hinted() {
        all.push(
            Scenario::new(name)
                .objects(with_endpoints(everywhere(number), &endpoints))
                .everybody(number, &At::ALL),
        );
        let number = number + 20;
        let local = with_policy(number, "Local");
        let name = format!("B5 {name}, external policy Local");
        all.push(
            Scenario::new(name)
                .objects(with_endpoints(local, &endpoints))
                .everybody(number, &At::ALL),
        );
    }
    let close = with(
        everywhere(760),
        "/spec/trafficDistribution",
        json!("PreferClose"),
    );
    let mode = json!({"service.kubernetes.io/topology-mode": "Auto"});
    let mut zoned = with_pods(with(close, "/metadata/annotations", mode), &["a", "b", "c"]);
    for slice in &mut zoned[1..] {
        for endpoint in entries(&mut slice["endpoints"]) {
            let one = endpoint["nodeName"] == json!("node-1");
            endpoint["zone"] = json!(if one { "zone-1" } else { "zone-2" });
        }
    }
    all.push(
        Scenario::new("B8 trafficDistribution without hints")
            .objects(zoned)
            .everybody(760, &At::ALL),
    );
    all
}

/// What is no Service's goes its way.
fn strangers() -> Vec<Scenario> {
    let mut scenario = Scenario::new("E7 traffic that is no Service's");
    for (client, family) in clients_and_families() {
        let mut to = vec![
            node_ip(1, family),
            node_ip(2, family),
            Client::Outside.source(family),
        ];
        if client != Client::Outside {
            to.extend(["a", "b", "c"].map(|pod| ep(pod).address(family).ip()));
        }
        for (ip, protocol) in
            to.iter().flat_map(|ip| [Protocol::Tcp, Protocol::Udp].map(|p| (*ip, p)))
        {
            scenario =
                scenario.packet(Question::new(client, protocol, SocketAddr::new(ip, TARGET)));
        }
    }
    vec![scenario.always()]
}
