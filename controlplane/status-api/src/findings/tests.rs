//! Broken Services, each with the findings that it must get.

use kplane_desired_state::index::Index;
use kplane_desired_state::k8s::Kind;
use kplane_desired_state::source::{Batch, Located};
use kplane_rig::cluster::objects;
use serde_json::{Value, json};

use super::*;

const NODES: [&str; 3] = ["n1", "n2", "n3"];

/// Returns the findings about shop/web.
fn findings(objects: impl IntoIterator<Item = Value>) -> Vec<Finding> {
    let objects: Vec<Value> = objects.into_iter().collect();
    let service = ServiceName::new("shop", "web");
    let detail = index(&objects).detail(&service, &[]);
    of_service(&service, &detail.unwrap(), &NODES.map(NodeName::from))
}

/// Returns a synced index that holds these objects.
fn index(objects: &[Value]) -> Index {
    let mut index = Index::default();
    let objects = objects.iter().map(Located::sample);
    index.apply(Batch::sample(&Kind::ALL, objects));
    index
}

/// Returns the codes, in order.
fn codes(objects: impl IntoIterator<Item = Value>) -> Vec<Reason> {
    let findings = findings(objects);
    for finding in &findings {
        assert!(!finding.text.is_empty(), "{finding:?}");
    }
    findings.into_iter().map(|finding| finding.code).collect()
}

/// A Service with changes to its `spec`.
fn service(changes: &Value) -> Value {
    let mut spec = json!({
        "clusterIP": "10.96.0.1",
        "clusterIPs": ["10.96.0.1"],
        "selector": { "app": "web" },
        "ports": [{ "name": "http", "port": 80, "targetPort": 8080 }],
    });
    for (key, value) in changes.as_object().unwrap() {
        spec[key] = value.clone();
    }
    objects::service("shop", "web", spec)
}

/// A slice with one port; each endpoint with its conditions.
fn slice(port: &Value, conditions: &[Value]) -> Value {
    let endpoints: Vec<Value> = conditions
        .iter()
        .enumerate()
        .map(|(n, conditions)| {
            json!({
                "addresses": [format!("10.1.0.{}", n + 1)],
                "nodeName": "n1",
                "conditions": conditions,
            })
        })
        .collect();
    let ports = if port.is_null() { json!([]) } else { json!([port]) };
    json!({
        "kind": "EndpointSlice",
        "metadata": {
            "name": "web-1",
            "namespace": "shop",
            "labels": { "kubernetes.io/service-name": "web" },
        },
        "addressType": "IPv4",
        "ports": ports,
        "endpoints": endpoints,
    })
}

fn http() -> Value {
    json!({ "name": "http", "port": 8080 })
}

fn ready() -> Value {
    json!({ "ready": true, "serving": true, "terminating": false })
}

#[test]
fn a_healthy_service_has_none() {
    assert_eq!(codes([service(&json!({})), slice(&http(), &[ready()])]), []);
}

#[test]
fn services_that_are_not_proxied_say_why() {
    let headless = json!({ "clusterIP": "None", "clusterIPs": ["None"] });
    assert_eq!(codes([service(&headless)]), [Reason::Headless]);
    let alias =
        json!({ "type": "ExternalName", "clusterIP": "", "externalName": "db.example.org" });
    let found = findings([service(&alias)]);
    assert_eq!(found[0].code, Reason::ExternalName);
    assert!(found[0].text.ends_with("with the name \"db.example.org\""));
    let mut other = service(&json!({}));
    other["metadata"]["labels"] = json!({ (SERVICE_PROXY_NAME_LABEL): "other" });
    assert_eq!(codes([other]), [Reason::OtherProxy]);
}

#[test]
fn without_a_slice_the_stray_is_named() {
    assert_eq!(codes([service(&json!({}))]), [Reason::NoEndpointSlice]);
    let mut stray = slice(&http(), &[ready()]);
    stray["metadata"]["labels"] = json!({});
    let mut other = stray.clone();
    other["metadata"]["name"] = json!("api-1");
    let found = findings([service(&json!({})), other, stray]);
    assert_eq!(found[0].code, Reason::SliceWithoutService);
    assert!(found[0].text.contains("web-1, api-1"), "{}", found[0].text);
    assert!(
        found[0].fix.ends_with("web-1 kubernetes.io/service-name=web"),
        "{}",
        found[0].fix
    );
    assert_eq!(found[1].code, Reason::NoEndpointSlice);
}

/// A slice of another Service that lost its label is no lead.
#[test]
fn a_stray_of_another_name_comes_last() {
    let mut other = slice(&http(), &[ready()]);
    other["metadata"]["labels"] = json!({});
    other["metadata"]["name"] = json!("api-1");
    assert_eq!(
        codes([service(&json!({})), other]),
        [Reason::NoEndpointSlice, Reason::SliceWithoutService]
    );
}

#[test]
fn a_load_balancer_without_an_address_and_a_cluster_ip_outside_all_ranges() {
    let mut balanced = service(&json!({ "type": "LoadBalancer" }));
    let healthy = slice(&http(), &[ready()]);
    assert_eq!(
        codes([balanced.clone(), healthy.clone()]),
        [Reason::NoLoadBalancerAddress]
    );
    // Clouds give names, and addresses that their own machines serve.
    balanced["status"] = json!({ "loadBalancer": { "ingress": [{ "hostname": "lb.example" }] } });
    assert_eq!(codes([balanced, healthy.clone()]), []);
    let range = |cidrs: &[&str]| {
        json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "ServiceCIDR",
            "metadata": { "name": "kubernetes" },
            "spec": { "cidrs": cidrs },
        })
    };
    let plain = || [service(&json!({})), healthy.clone()];
    let with = |cidrs| codes(plain().into_iter().chain([range(cidrs)]));
    assert_eq!(with(&["10.97.0.0/16"]), [Reason::OutsideServiceRange]);
    assert_eq!(with(&["10.97.0.0/16", "10.96.0.0/16"]), []);
    assert_eq!(
        with(&["fd00:10:96::/112"]),
        [],
        "nothing is known of its family"
    );
}

#[test]
fn a_port_that_no_slice_has() {
    let other = json!({ "name": "web", "port": 8080 });
    let found = findings([service(&json!({})), slice(&other, &[ready()])]);
    assert_eq!(found[0].code, Reason::PortNameMismatch);
    assert_eq!(
        found[0].text,
        "port http/TCP: the EndpointSlices have \"web\"/TCP only: connections are refused"
    );
    let udp = json!({ "name": "http", "port": 8080, "protocol": "UDP" });
    assert_eq!(
        codes([service(&json!({})), slice(&udp, &[ready()])]),
        [Reason::PortNameMismatch]
    );
    // The API's controller leaves out a port whose name no container has.
    let named = json!({ "ports": [{ "name": "http", "port": 80, "targetPort": "htpp" }] });
    let found = findings([service(&named), slice(&Value::Null, &[ready()])]);
    assert_eq!(found[0].code, Reason::TargetPortNotFound);
    assert!(found[0].text.contains("\"htpp\""), "{}", found[0].text);
}

#[test]
fn slices_without_addresses() {
    let found = findings([service(&json!({})), slice(&Value::Null, &[])]);
    assert_eq!(found[0].code, Reason::SelectorMatchesNoPod);
    assert!(
        found[0].fix.starts_with("kubectl get pods -n shop -l app=web "),
        "{}",
        found[0].fix
    );
    let by_hand = service(&json!({ "selector": null }));
    assert_eq!(codes([by_hand, slice(&http(), &[])]), [Reason::NoEndpoints]);
}

#[test]
fn endpoints_that_are_not_ready() {
    let not_ready = json!({ "ready": false, "serving": false, "terminating": false });
    let draining = json!({ "ready": false, "serving": true, "terminating": true });
    let dead = json!({ "ready": false, "serving": false, "terminating": true });
    let published = json!({ "ready": true, "serving": false, "terminating": false });
    let published_ending = json!({ "ready": true, "serving": true, "terminating": true });
    let cases = [
        (vec![not_ready.clone()], vec![Reason::NoReadyEndpoint]),
        (vec![dead], vec![Reason::NoReadyEndpoint]),
        (
            vec![not_ready.clone(), draining],
            vec![Reason::OnlyTerminating],
        ),
        (vec![ready(), not_ready], vec![Reason::SomeNotReady]),
        (vec![published], vec![Reason::PublishedNotReady]),
        (vec![published_ending], vec![Reason::PublishedNotReady]),
    ];
    for (conditions, expected) in cases {
        assert_eq!(
            codes([service(&json!({})), slice(&http(), &conditions)]),
            expected
        );
    }
}

/// Pods that end are not told from Pods that have not started.
#[test]
fn endpoints_that_all_end_are_said_to_end() {
    let draining = json!({ "ready": false, "serving": true, "terminating": true });
    let dead = json!({ "ready": false, "serving": false, "terminating": true });
    let text = |conditions: &[Value]| {
        let found = findings([service(&json!({})), slice(&http(), conditions)]);
        found[0].text.clone()
    };
    assert_eq!(
        text(&[dead.clone(), dead.clone()]),
        "all 2 endpoints are about to end, and no Pod serves: connections are refused"
    );
    assert_eq!(
        text(&[draining, dead]),
        "all 2 endpoints are about to end; those that still serve (1) get the connections until a Pod is ready"
    );
    let published = json!({ "ready": true, "serving": true, "terminating": true });
    let found = findings([service(&json!({})), slice(&http(), &[published])]);
    assert!(found[0].fix.contains("-n shop web -p"), "{}", found[0].fix);
}

#[test]
fn a20_endpoints_that_are_services_are_named() {
    let mut other = objects::service(
        "shop",
        "other",
        json!({"clusterIP": "10.1.0.1", "clusterIPs": ["10.1.0.1"], "ports": [{"port": 8080}]}),
    );
    let web = [service(&json!({})), slice(&http(), &[ready(), ready()])];
    let with = |more: &Value| findings(web.iter().chain([more]).cloned());
    let found = with(&other);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].code, Reason::EndpointIsService);
    assert!(
        found[0].text.starts_with("endpoints 10.1.0.1 are"),
        "{}",
        found[0].text
    );
    // A machine's address that another Service has as an external one is an endpoint like any other.
    other["spec"]["externalIPs"] = json!(["10.1.0.2"]);
    other["spec"]["clusterIP"] = json!("10.96.0.9");
    other["spec"]["clusterIPs"] = json!(["10.96.0.9"]);
    assert_eq!(with(&other), []);
    let range = json!({"kind": "ServiceCIDR", "metadata": {"name": "c"}, "spec": {"cidrs": ["10.1.0.0/16"]}});
    let found = with(&range);
    assert!(found[0].text.starts_with("endpoints 10.1.0.1, 10.1.0.2 are"));
}

#[test]
fn a_family_without_endpoints() {
    let dual = json!({
        "clusterIPs": ["10.96.0.1", "fd00::1"],
        "ipFamilies": ["IPv4", "IPv6"],
    });
    let found = findings([service(&dual), slice(&http(), &[ready()])]);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].code, Reason::FamilyWithoutEndpoints);
    assert!(
        found[0].text.contains("IPv6") && found[0].text.contains("fd00::1"),
        "{}",
        found[0].text
    );
}

/// A Service with two families, and its IPv6 slice with one port and as many endpoints.
fn dual(port: &Value, endpoints: usize) -> [Value; 2] {
    let both = json!({
        "clusterIPs": ["10.96.0.1", "fd00::1"],
        "ipFamilies": ["IPv4", "IPv6"],
    });
    let mut slice = slice(port, &vec![ready(); endpoints]);
    slice["metadata"]["name"] = json!("web-2");
    slice["addressType"] = json!("IPv6");
    for (n, endpoint) in slice["endpoints"].as_array_mut().unwrap().iter_mut().enumerate() {
        endpoint["addresses"] = json!([format!("fd00:1::{}", n + 1)]);
    }
    [service(&both), slice]
}

/// The API's controller writes a slice for each family of the Service, also for one that no Pod has.
#[test]
fn a_family_that_the_pods_do_not_have_is_no_error() {
    let [service, none] = dual(&Value::Null, 0);
    let found = findings([service.clone(), none.clone(), slice(&http(), &[ready()])]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].code, Reason::FamilyWithoutEndpoints);
    assert_eq!(found[0].severity, Severity::Warning);
    assert_eq!(
        found[0].text,
        "no Pod of the Service has an IPv6 address: connections to fd00::1 are refused"
    );
    let neither = codes([service, none, slice(&Value::Null, &[])]);
    assert_eq!(neither, [Reason::SelectorMatchesNoPod]);
}

#[test]
fn a_port_that_one_family_lacks_is_refused_there_only() {
    let other = json!({ "name": "web", "port": 8080 });
    let text = |v6: &Value, v4: &Value| {
        let [service, of_v6] = dual(v6, 1);
        findings([service, of_v6, slice(v4, &[ready()])])
            .into_iter()
            .map(|finding| {
                assert_eq!(finding.code, Reason::PortNameMismatch);
                (finding.severity, finding.text)
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(
        text(&other, &http()),
        [(
            Severity::Warning,
            "port http/TCP: the IPv6 EndpointSlices have \"web\"/TCP only: connections to fd00::1 are refused".to_owned()
        )]
    );
    assert_eq!(
        text(&other, &other),
        [(
            Severity::Error,
            "port http/TCP: the EndpointSlices have \"web\"/TCP only: connections are refused"
                .to_owned()
        )]
    );
}

#[test]
fn policies_name_the_nodes_without_endpoints() {
    let local = json!({
        "type": "NodePort",
        "externalTrafficPolicy": "Local",
        "internalTrafficPolicy": "Local",
        "ports": [{ "name": "http", "port": 80, "nodePort": 30080 }],
    });
    let found = findings([service(&local), slice(&http(), &[ready()])]);
    let seen: Vec<_> = found.iter().map(|finding| finding.code).collect();
    assert_eq!(
        seen,
        [Reason::ExternalPolicyLocal, Reason::InternalPolicyLocal]
    );
    let others: [NodeName; 2] = ["n2".into(), "n3".into()];
    assert!(
        found.iter().all(|finding| finding.nodes == others),
        "{found:?}"
    );
    // Connections are refused everywhere, and no policy changes that.
    assert_eq!(codes([service(&local)]), [Reason::NoEndpointSlice]);
}

#[test]
fn a_load_balancer_tells_who_may_come_in() {
    let mut balanced = service(&json!({
        "type": "LoadBalancer",
        "loadBalancerSourceRanges": ["192.0.2.0/24"],
        "sessionAffinity": "ClientIP",
    }));
    balanced["status"] = json!({ "loadBalancer": { "ingress": [{ "ip": "203.0.113.1" }] } });
    let found = findings([balanced, slice(&http(), &[ready()])]);
    let codes: Vec<_> = found.iter().map(|finding| finding.code).collect();
    assert_eq!(codes, [Reason::SessionAffinity, Reason::SourceRanges]);
    assert!(found[1].text.contains("192.0.2.0/24"), "{}", found[1].text);
}

#[test]
fn the_winner_of_a_conflict_names_the_loser() {
    let external = json!({ "externalIPs": ["203.0.113.1"] });
    let mut older = service(&external);
    older["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
    let mut younger = objects::service(
        "shop",
        "young",
        json!({ "clusterIP": "10.96.0.2", "clusterIPs": ["10.96.0.2"], "externalIPs": ["203.0.113.1"],
            "ports": [{ "name": "http", "port": 80 }] }),
    );
    younger["metadata"]["creationTimestamp"] = json!("2026-02-01T00:00:00Z");
    let found = findings([older, slice(&http(), &[ready()]), younger]);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].code, Reason::AddressContested);
    assert!(
        found[0].text.starts_with("shop/young wants address 203.0.113.1:80/TCP"),
        "{}",
        found[0].text
    );
}

#[test]
fn nodes_in_the_same_state_make_one_finding() {
    let names: Vec<NodeName> = (0..100).map(|n| format!("n{n:03}").as_str().into()).collect();
    let places = names.iter().enumerate().map(|(n, node)| Place {
        node,
        lag: match n {
            0 => Some((pb::LagState::Failing, "no memory")),
            1..=80 => Some((pb::LagState::Disconnected, "the agent is not connected")),
            _ => None,
        },
        degraded: if n == 99 { "health check" } else { "" },
    });
    let found = of_fleet(places);
    let count = |finding: &Finding| finding.nodes.len() as u64 + finding.nodes_omitted;
    let codes: Vec<_> = found.iter().map(|finding| (finding.code, count(finding))).collect();
    assert_eq!(
        codes,
        [
            (Reason::AgentDisconnected, 80),
            (Reason::NotProgrammed, 1),
            (Reason::Degraded, 1)
        ]
    );
    assert_eq!(found[0].text, "80 of 100 nodes: the agent is not connected");
    let wire = found[0].to_wire();
    assert_eq!((wire.nodes.len(), wire.nodes_omitted), (64, 16));
}

/// What an agent says about an endpoint of shop/web.
fn avoids(port_name: &str, address: &str) -> pb::AvoidedEndpoint {
    pb::AvoidedEndpoint {
        key: Some(pb::ServiceKey {
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            port_name: port_name.to_owned(),
            protocol: pb::Protocol::Tcp.into(),
            family: pb::Family::Ipv4.into(),
        }),
        address: address.to_owned(),
    }
}

/// Returns the findings if nodes avoid these endpoints of shop/web.
fn avoided_by(reported: &[(&str, Vec<pb::AvoidedEndpoint>)]) -> Vec<Finding> {
    let objects = [service(&json!({})), slice(&http(), &vec![ready(); 30])];
    let name = ServiceName::new("shop", "web");
    let detail = index(&objects).detail(&name, &[]).unwrap();
    let reported: Vec<(NodeName, _)> =
        reported.iter().map(|(node, avoided)| ((*node).into(), avoided)).collect();
    let reported = reported.iter();
    avoided(
        &name,
        &detail.ports,
        reported.map(|(node, all)| (node, all.as_slice())),
    )
}

#[test]
fn u53_two_nodes_that_avoid_an_endpoint_agree_and_one_is_a_hint() {
    let (ill, odd) = (
        avoids("http", "10.1.0.2:8080"),
        avoids("http", "10.1.0.1:8080"),
    );
    let found = avoided_by(&[
        ("n1", vec![odd.clone(), odd, ill.clone()]),
        ("n2", vec![ill]),
    ]);
    let seen: Vec<_> = found
        .iter()
        .map(|finding| (finding.code, finding.severity, finding.nodes.len()))
        .collect();
    assert_eq!(
        seen,
        [
            (Reason::EndpointAvoided, Severity::Warning, 2),
            (Reason::EndpointAvoided, Severity::Info, 1),
        ],
        "a node that says it twice counts once"
    );
    for (finding, parts) in found.iter().zip([
        [
            "2 nodes avoid the endpoint 10.1.0.2:8080 of http/TCP IPv4 on n1",
            "kubectl -n shop get pods",
        ],
        [
            "proxy of n1 avoids the endpoint 10.1.0.1:8080",
            "network between",
        ],
    ]) {
        assert!(finding.text.contains(parts[0]), "{}", finding.text);
        assert!(finding.fix.contains(parts[1]), "{}", finding.fix);
    }
}

#[test]
fn u53_only_endpoints_of_the_service_count_and_a_few_are_named() {
    let strange = vec![
        avoids("http", "10.9.9.9:8080"),
        avoids("http", "10.1.0.1:1"),
        avoids("other", "10.1.0.1:8080"),
        avoids("http", "nonsense"),
        pb::AvoidedEndpoint::default(),
    ];
    assert_eq!(avoided_by(&[("n1", strange.clone()), ("n2", strange)]), []);

    let all: Vec<_> = (1..=30).map(|n| avoids("http", &format!("10.1.0.{n}:8080"))).collect();
    let found = avoided_by(&[("n1", all)]);
    assert_eq!(found.len(), 21);
    assert_eq!(found[20].text, "10 more endpoints are avoided");
    assert_eq!(found[20].severity, Severity::Info);
}

#[test]
fn slices_that_are_behind_pods_are_a_warning_after_ten_seconds() {
    let text = |pods: usize, seconds| {
        let facts = Facts {
            terminating: (0..pods)
                .map(|pod| (format!("web-{pod}").into(), SystemTime::UNIX_EPOCH))
                .collect(),
            ..Default::default()
        };
        let now = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        endpoints::slices_behind_pods(&facts, now).map(|of| (of.severity, of.text))
    };
    assert_eq!(text(0, 20), None);
    assert_eq!(text(1, 9).unwrap().0, Severity::Info);
    let (severity, text) = text(7, 10).unwrap();
    assert_eq!(severity, Severity::Warning);
    assert!(
        text.starts_with(
            "web-0, web-1, web-2, web-3, web-4 and 2 more: being deleted for up to 10 s"
        ),
        "{text}"
    );
}
