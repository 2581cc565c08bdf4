//! Endpoints of Pods that are being deleted.

use super::*;
use crate::k8s::{MANAGED_BY_LABEL, SLICE_CONTROLLER};

/// An index that knows Pods, with a Service of these slices.
fn watching(slices: &[Value]) -> Index {
    let mut index = Index::new(Admission {
        watch_pods: true,
        ..Admission::default()
    });
    let service = service("web", "10.96.0.1");
    let objects = [&service].into_iter().chain(slices).map(Located::sample);
    let kinds: Vec<Kind> = Kind::ALL.into_iter().chain([Kind::Pod]).collect();
    index.apply(Batch::sample(&kinds, objects));
    index
}

/// A slice with Pods, which Kubernetes writes: `web-1` has 10.0.0.1, and so on.
fn slice_of(name: &str, pods: &[u8]) -> Value {
    let endpoints = pods.iter().map(|number| {
        let mut endpoint = objects::endpoint(format!("10.0.0.{number}"), "n1");
        endpoint["targetRef"] =
            json!({"kind": "Pod", "namespace": "shop", "name": format!("web-{number}")});
        endpoint
    });
    let mut slice = objects::slice("shop", name, "web", endpoints);
    slice["metadata"]["labels"][MANAGED_BY_LABEL] = json!(SLICE_CONTROLLER);
    slice
}

fn pod(number: u8, ip: &str, is_deleted: bool) -> Value {
    let mut pod = objects::pod("shop", &format!("web-{number}"), "web", "n1");
    pod["status"] = json!({"phase": "Running", "podIPs": [{"ip": ip}]});
    if is_deleted {
        pod["metadata"]["deletionTimestamp"] = json!("2026-01-03T00:00:00Z");
    }
    pod
}

/// Applies objects; returns whether anything is published.
fn publishes(index: &mut Index, objects: &[Value]) -> bool {
    let events = objects.iter().map(|value| Event::Apply(object(value)));
    index
        .apply(batch(events.collect()))
        .publication
        .is_some_and(|of| !of.services.is_empty())
}

/// The endpoints and their state, such as `1` or `2 terminating`.
fn states(index: &Index) -> Vec<String> {
    let detail = index.detail(&ServiceName::new("shop", "web"), &[]).unwrap();
    detail.ports[0]
        .endpoints
        .iter()
        .map(|endpoint| {
            let number = endpoint.addr.ip.to_string().split_off("10.0.0.".len());
            match (endpoint.ready, endpoint.serving, endpoint.terminating) {
                (true, true, false) => number,
                (false, true, true) => format!("{number} terminating"),
                other => format!("{number} {other:?}"),
            }
        })
        .collect()
}

fn named(index: &Index) -> usize {
    let detail = index.detail(&ServiceName::new("shop", "web"), &[]).unwrap();
    detail.facts.terminating.len()
}

#[test]
fn an_endpoint_counts_as_terminating_once_its_pod_is_being_deleted() {
    let mut index = watching(&[slice_of("web-a", &[1, 2]), slice_of("web-b", &[3])]);
    assert!(!publishes(&mut index, &[pod(1, "10.0.0.1", false)]));
    let deleted = [pod(1, "10.0.0.1", true), pod(3, "10.0.0.3", true)];
    let outcome = index.apply(batch(
        deleted.iter().map(|pod| Event::Apply(object(pod))).collect(),
    ));
    assert_eq!(outcome.publication.unwrap().services.len(), 1);
    let causes: Vec<_> = outcome.causes.others().collect();
    assert_eq!((causes.len(), causes[0].object.kind), (2, Kind::Pod));
    assert_eq!(states(&index), ["1 terminating", "2", "3 terminating"]);
    assert_eq!(named(&index), 2);
    assert!(!publishes(&mut index, &deleted), "nothing is new");
    // The slices say so at last, and leave the Pods out.
    let mut later = slice_of("web-a", &[1, 2]);
    later["endpoints"][0]["conditions"] =
        json!({"ready": false, "serving": true, "terminating": true});
    publishes(&mut index, &[later]);
    assert_eq!(states(&index), ["1 terminating", "2", "3 terminating"]);
    assert_eq!(named(&index), 1);
    publishes(
        &mut index,
        &[slice_of("web-a", &[2]), slice_of("web-b", &[])],
    );
    assert_eq!(states(&index), ["2"]);
}

/// Slices may be far behind: the Pod itself is gone.
#[test]
fn an_endpoint_stays_terminating_until_no_slice_has_its_pod() {
    let mut index = watching(&[slice_of("web-a", &[1, 2])]);
    publishes(&mut index, &[pod(1, "10.0.0.1", true)]);
    let id = object(&pod(1, "10.0.0.1", true)).object.id();
    index.apply(batch(vec![Event::Delete(id.clone())]));
    // Another slice has the Pod before the first one lacks it.
    publishes(&mut index, &[slice_of("web-b", &[1])]);
    publishes(&mut index, &[slice_of("web-a", &[2])]);
    assert_eq!(states(&index), ["1 terminating", "2"]);
    publishes(&mut index, &[slice_of("web-b", &[])]);
    assert_eq!(states(&index), ["2"]);
    // It is forgotten: this is another Pod.
    publishes(&mut index, &[slice_of("web-b", &[1])]);
    assert_eq!(states(&index), ["1", "2"]);
    // A Pod that no slice names is forgotten at once.
    publishes(
        &mut index,
        &[slice_of("web-b", &[]), pod(1, "10.0.0.1", true)],
    );
    index.apply(batch(vec![Event::Delete(id)]));
    publishes(&mut index, &[slice_of("web-b", &[1])]);
    assert_eq!(states(&index), ["1", "2"]);
}

/// A StatefulSet gives the name to the next Pod, and what is known of the two may come in any order.
#[test]
fn another_pod_with_the_name_serves() {
    let mut index = watching(&[slice_of("web-a", &[1, 2])]);
    publishes(&mut index, &[pod(1, "10.0.0.9", true)]);
    assert_eq!(states(&index), ["1", "2"], "another address");
    publishes(&mut index, &[pod(1, "10.0.0.1", true)]);
    assert_eq!(states(&index), ["1 terminating", "2"]);
    publishes(&mut index, &[pod(1, "10.0.0.1", false)]);
    assert_eq!(states(&index), ["1", "2"]);
}

#[test]
fn what_others_write_and_what_publishes_unready_pods_counts_as_written() {
    let mut of_others = slice_of("web-a", &[1, 2]);
    of_others["metadata"]["labels"][MANAGED_BY_LABEL] = json!("somebody");
    let mut index = watching(&[of_others]);
    publishes(&mut index, &[pod(1, "10.0.0.1", true)]);
    assert_eq!(states(&index), ["1", "2"]);

    let mut index = watching(&[slice_of("web-a", &[1, 2])]);
    let mut publishing = service("web", "10.96.0.1");
    publishing["spec"]["publishNotReadyAddresses"] = json!(true);
    publishes(&mut index, &[publishing, pod(1, "10.0.0.1", true)]);
    assert_eq!((states(&index).concat().as_str(), named(&index)), ("12", 0));
    publishes(&mut index, &[service("web", "10.96.0.1")]);
    assert_eq!(states(&index), ["1 terminating", "2"]);
}

/// A Pod of a namespace says nothing of another namespace's endpoints.
#[test]
fn a_pod_of_another_namespace_does_not_count() {
    let mut index = watching(&[slice_of("web-a", &[1, 2])]);
    let mut foreign = pod(1, "10.0.0.1", true);
    foreign["metadata"]["namespace"] = json!("evil");
    publishes(&mut index, &[foreign]);
    assert_eq!(states(&index), ["1", "2"]);
}

#[test]
fn without_a_watch_of_pods_slices_alone_count() {
    let (mut index, _) = index(&[service("web", "10.96.0.1"), slice_of("web-a", &[1, 2])]);
    assert!(!publishes(&mut index, &[pod(1, "10.0.0.1", true)]));
    assert_eq!(states(&index), ["1", "2"]);
}
