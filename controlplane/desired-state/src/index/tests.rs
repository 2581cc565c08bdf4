//! Publications for given batches.

mod address_claims;
mod causes;
mod details;
mod large;
mod policies;
mod proxying;
mod step;
mod suspects;
mod terminating;

use std::net::IpAddr;
use std::slice;
use std::time::{Duration, SystemTime};

use kplane_model::{Cidr, Severity};
use kplane_rig::cluster::objects;
use serde_json::{Value, json};

use super::*;
use crate::source::{Batch, Event};

pub(crate) fn object(value: &Value) -> Box<Located> {
    Box::new(Located::sample(value))
}

pub(super) fn service(name: &str, ip: &str) -> Value {
    objects::service("shop", name, json!({"clusterIP": ip, "clusterIPs": [ip]}))
}

pub(super) fn slice(name: &str, service: &str, endpoints: &[&str]) -> Value {
    let endpoints = endpoints.iter().map(|ip| objects::endpoint(ip, "n1"));
    objects::slice("shop", name, service, endpoints)
}

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

fn batch(events: Vec<Event>) -> Batch {
    Batch {
        events,
        observed_at: at(1),
    }
}

/// Lists all kinds, with these objects.
fn lists(objects: &[Value]) -> Batch {
    Batch {
        observed_at: at(1),
        ..Batch::sample(&Kind::ALL, objects.iter().map(Located::sample))
    }
}

/// A synced index that holds these objects.
pub(crate) fn index(objects: &[Value]) -> (Index, Publication) {
    let mut index = Index::default();
    let publication = index
        .apply(lists(objects))
        .publication
        .unwrap_or_else(|| Publication::sample(vec![], vec![]));
    (index, publication)
}

fn apply(index: &mut Index, value: &Value) -> Publication {
    index.apply(batch(vec![Event::Apply(object(value))])).publication.unwrap()
}

fn delete(index: &mut Index, value: &Value) -> Publication {
    let id = object(value).object.id();
    index.apply(batch(vec![Event::Delete(id)])).publication.unwrap()
}

/// Formats a publication as `name: endpoints` or `name: gone`.
fn summary(publication: &Publication) -> Vec<String> {
    let line = |(key, published): &(ServiceKey, Option<Published>)| match published {
        None => format!("{}: gone", key.service.name),
        Some(p) => {
            let ips: Vec<String> = p.variants.default.iter().map(|e| e.ip.to_string()).collect();
            format!("{}: {}", key.service.name, ips.join(" "))
        }
    };
    let mut lines: Vec<String> = publication.services.iter().map(line).collect();
    lines.sort();
    lines
}

#[test]
fn z3_nothing_is_published_before_every_kind_is_listed() {
    let mut index = Index::default();
    for kind in Kind::ALL {
        assert!(!index.is_synced());
        let mut events = vec![Event::Init(kind)];
        if kind == Kind::Service {
            events.push(Event::InitApply(object(&service("web", "10.96.0.1"))));
        }
        events.push(Event::InitDone(kind));
        let outcome = index.apply(batch(events));
        assert_eq!(outcome.publication.is_some(), kind == Kind::ServiceCidr);
    }
    assert!(index.is_synced());
}

#[test]
fn only_services_that_a_batch_concerns_are_published() {
    let (mut index, first) = index(&[
        service("web", "10.96.0.1"),
        service("api", "10.96.0.2"),
        slice("web-1", "web", &["10.0.0.1"]),
    ]);
    assert_eq!(summary(&first), ["api: ", "web: 10.0.0.1"]);
    let change = apply(
        &mut index,
        &slice("web-2", "web", &["10.0.0.2", "10.0.0.1"]),
    );
    assert_eq!(summary(&change), ["web: 10.0.0.1 10.0.0.2"]);
    assert_eq!(change.observed_at, at(1));
    let change = delete(&mut index, &slice("web-1", "web", &[]));
    assert_eq!(summary(&change), ["web: 10.0.0.1 10.0.0.2"]);
    let change = delete(&mut index, &slice("web-2", "web", &[]));
    assert_eq!(summary(&change), ["web: "]);
    let totals = index.totals();
    assert_eq!((totals.services, totals.endpoints), (2, 0));
}

#[test]
fn a_slice_that_moves_to_another_service_leaves_the_old_one() {
    let (mut index, _) = index(&[
        service("web", "10.96.0.1"),
        service("api", "10.96.0.2"),
        slice("s", "web", &["10.0.0.1"]),
    ]);
    let change = apply(&mut index, &slice("s", "api", &["10.0.0.1"]));
    assert_eq!(summary(&change), ["api: 10.0.0.1", "web: "]);
}

#[test]
fn slices_may_come_before_their_service_and_outlive_it() {
    let (mut index, first) = index(&[slice("s", "web", &["10.0.0.1"])]);
    assert!(first.services.is_empty());
    assert_eq!(
        summary(&apply(&mut index, &service("web", "10.96.0.1"))),
        ["web: 10.0.0.1"]
    );
    assert_eq!(
        summary(&delete(&mut index, &service("web", "10.96.0.1"))),
        ["web: gone"]
    );
    assert_eq!(index.totals(), Totals::default());
    assert_eq!(
        summary(&apply(&mut index, &service("web", "10.96.0.1"))),
        ["web: 10.0.0.1"]
    );
}

#[test]
fn a_port_that_goes_away_is_withdrawn() {
    let (mut index, _) = index(&[service("web", "10.96.0.1")]);
    let mut headless = service("web", "None");
    headless["spec"]["clusterIPs"] = json!(["None"]);
    assert_eq!(summary(&apply(&mut index, &headless)), ["web: gone"]);
}

#[test]
fn a_new_list_deletes_what_it_does_not_name_and_nothing_before_it_ends() {
    let web = service("web", "10.96.0.1");
    let api = service("api", "10.96.0.2");
    let (mut index, _) = index(&[web.clone(), api]);
    let begun = vec![Event::Init(Kind::Service), Event::InitApply(object(&web))];
    let outcome = index.apply(batch(begun));
    assert_eq!(summary(&outcome.publication.unwrap()), ["web: "]);
    // A second list begins before the first ended: only the second counts.
    let again = vec![
        Event::Init(Kind::Service),
        Event::InitApply(object(&web)),
        Event::InitDone(Kind::Service),
    ];
    let outcome = index.apply(batch(again));
    assert_eq!(
        summary(&outcome.publication.unwrap()),
        ["api: gone", "web: "]
    );
    // An end without a beginning means nothing.
    assert!(index.apply(batch(vec![Event::InitDone(Kind::Service)])).publication.is_none());
}

#[test]
fn the_older_service_keeps_a_contested_address_and_the_other_gets_it_afterwards() {
    let with_ip = |name: &str, ip: &str, created: &str| {
        let mut service = service(name, ip);
        service["metadata"]["creationTimestamp"] = json!(created);
        service["spec"]["externalIPs"] = json!(["203.0.113.1"]);
        service
    };
    let old = with_ip("old", "10.96.0.1", "2026-01-01T00:00:00Z");
    let young = with_ip("a-young", "10.96.0.2", "2026-02-01T00:00:00Z");
    let externals = |publication: &Publication, name: &str| {
        let mut published = publication.services.iter();
        let (_, published) = published.find(|(key, _)| &*key.service.name == name).unwrap();
        published.as_ref().unwrap().port.external_ips.clone()
    };
    let ip: IpAddr = "203.0.113.1".parse().unwrap();
    let (mut index, first) = index(&[young.clone(), old.clone()]);
    assert_eq!(externals(&first, "old"), [ip]);
    assert_eq!(externals(&first, "a-young"), [] as [IpAddr; 0]);
    let issues = index.issues();
    assert_eq!(issues.len(), 1);
    assert_eq!(
        issues[0].to_string(),
        "x.yaml: Service shop/a-young: address 203.0.113.1:80/TCP belongs to shop/old:http/TCP \
         (IPv4): this Service is not served there; change one of the two Services"
    );
    let third = with_ip("third", "10.96.0.3", "2026-03-01T00:00:00Z");
    apply(&mut index, &third);
    let change = delete(&mut index, &old);
    assert_eq!(externals(&change, "a-young"), [ip]);
    let owner = |text: String| text.split(" belongs to ").nth(1).unwrap()[..9].to_owned();
    let owners = |index: &Index| -> Vec<String> {
        index.issues().iter().map(|issue| owner(issue.to_string())).collect()
    };
    assert_eq!(
        owners(&index),
        ["shop/a-yo"],
        "the third is told who has it now"
    );
    apply(&mut index, &old);
    assert_eq!(owners(&index), ["shop/old:", "shop/old:"]);
    delete(&mut index, &old);
    delete(&mut index, &young);
    assert_eq!(index.issues(), []);
}

#[test]
fn an_external_ip_never_shadows_a_cluster_ip() {
    let mut hijacker = service("hijacker", "10.96.0.9");
    hijacker["metadata"]["creationTimestamp"] = json!("2020-01-01T00:00:00Z");
    hijacker["spec"]["externalIPs"] = json!(["10.96.0.1"]);
    let (mut index, _) = index(&[hijacker]);
    let change = apply(&mut index, &service("victim", "10.96.0.1"));
    let ports: Vec<_> = change
        .services
        .iter()
        .map(|(k, p)| (&*k.service.name, p.clone().unwrap().port))
        .collect();
    let port = |name| &ports.iter().find(|(n, _)| *n == name).unwrap().1;
    assert!(port("hijacker").external_ips.is_empty());
    assert_eq!(port("victim").cluster_ip.to_string(), "10.96.0.1");
}

#[test]
fn a_cluster_ip_that_is_taken_is_not_served_twice() {
    let (mut index, _) = index(&[service("a", "10.96.0.1"), service("b", "10.96.0.1")]);
    assert_eq!(index.totals().services, 1);
    assert_eq!(index.issues()[0].severity, Severity::Error);
    assert_eq!(
        summary(&delete(&mut index, &service("a", "10.96.0.1"))),
        ["a: gone", "b: "]
    );
}

/// A later slice wins, unless its endpoint is terminating: a pod's address may be used again.
#[test]
fn a27_of_an_address_in_several_slices_the_living_endpoint_is_served() {
    let draining = |name: &str| {
        let mut slice = slice(name, "web", &["10.0.0.1"]);
        let conditions = json!({"ready": false, "serving": true, "terminating": true});
        slice["endpoints"][0]["conditions"] = conditions;
        slice
    };
    let alive = |name: &str| slice(name, "web", &["10.0.0.1", "10.0.0.2"]);
    let web = service("web", "10.96.0.1");
    for slices in [
        [alive("s-1"), draining("s-2")],
        [draining("s-1"), alive("s-2")],
    ] {
        let [first, second] = slices;
        let (_, publication) = index(&[web.clone(), first, second]);
        assert_eq!(summary(&publication), ["web: 10.0.0.1 10.0.0.2"]);
    }
}

/// Each port of a Service has the endpoints of the slice ports of its name, with their numbers.
#[test]
fn a28_ports_are_matched_by_name_and_targets_may_differ_by_slice() {
    let mut web = service("web", "10.96.0.1");
    web["spec"]["ports"] = json!([{"name": "http", "port": 80}, {"name": "admin", "port": 81}]);
    let with_ports = |name: &str, ip: &str, ports: Value| {
        let mut slice = slice(name, "web", &[ip]);
        slice["ports"] = ports;
        slice
    };
    let (_, publication) = index(&[
        web,
        with_ports("old", "10.0.0.1", json!([{"name": "http", "port": 8080}])),
        with_ports(
            "new",
            "10.0.0.2",
            json!([{"name": "http", "port": 9090}, {"name": "admin", "port": 9091},
                   {"name": "", "port": 1}, {"name": "http", "protocol": "UDP", "port": 2}]),
        ),
    ]);
    let mut ports: Vec<String> = publication
        .services
        .iter()
        .map(|(key, published)| {
            let published = published.as_ref().unwrap();
            let endpoints = published.variants.default.iter().map(ToString::to_string);
            format!("{}: {}", key.port_name, Vec::from_iter(endpoints).join(" "))
        })
        .collect();
    ports.sort();
    assert_eq!(
        ports,
        ["admin: 10.0.0.2:9091", "http: 10.0.0.1:8080 10.0.0.2:9090"]
    );
}

#[test]
fn nodes_and_cidrs_are_published_when_they_change() {
    let node = json!({"kind": "Node", "metadata": {"name": "n1", "labels": {"topology.kubernetes.io/zone": "z"}}});
    let cidr = json!({"kind": "ServiceCIDR", "metadata": {"name": "c"}, "spec": {"cidrs": ["10.96.0.0/16"]}});
    let (mut index, first) = index(&[node.clone(), cidr.clone()]);
    assert_eq!(first.nodes[0].zone.as_deref(), Some("z"));
    assert_eq!(
        first.service_cidrs,
        Some(vec!["10.96.0.0/16".parse::<Cidr>().unwrap()])
    );
    let change = delete(&mut index, &node);
    assert!(!change.nodes[0].known && change.nodes[0].eligible);
    assert_eq!(change.service_cidrs, None);
    assert_eq!(delete(&mut index, &cidr).service_cidrs, Some(Vec::new()));
}

#[test]
fn issues_come_and_go_with_their_objects() {
    let bad = slice("s", "web", &["127.0.0.1", "10.0.0.1"]);
    let (mut index, first) = index(&[service("web", "10.96.0.1"), bad]);
    assert_eq!(summary(&first), ["web: 10.0.0.1"]);
    assert_eq!(index.issues().len(), 1);
    let detail = index.detail(&ServiceName::new("shop", "web"), &[]).unwrap();
    assert_eq!(detail.issues.len(), 1);
    let mended = Event::Apply(object(&slice("s", "web", &["10.0.0.1"])));
    assert!(index.apply(batch(vec![mended])).issues_changed);
    assert_eq!(index.issues(), []);
    let nothing = ServiceName::new("shop", "nothing");
    assert!(index.detail(&nothing, &[]).is_none());
}

/// A Service stays as it was last read while its file cannot be parsed.
#[test]
fn a_service_has_the_issues_of_its_file_if_it_is_kept() {
    let mut catalog = crate::source::manifests::parse(b"kind: Service\nmetadata: [".to_vec());
    let mut issue = catalog.issues.pop().unwrap();
    let (index, _) = index(&[service("web", "10.96.0.1")]);
    let web = ServiceName::new("shop", "web");
    let found = |issue: &Issue| index.detail(&web, slice::from_ref(issue)).unwrap().issues;
    "x.yaml, document 1, line 2".clone_into(&mut issue.location);
    assert_eq!(found(&issue), [], "the file never had a good state");
    issue.reason += "; 2 objects of this file keep their last good state";
    assert_eq!(found(&issue), [issue.clone()]);
    "y.yaml, document 1, line 2".clone_into(&mut issue.location);
    assert_eq!(found(&issue), []);
}
