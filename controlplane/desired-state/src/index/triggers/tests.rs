//! Slices that make triggers, and slices that do not.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::index::Index;
use crate::index::tests::{self, object, service};
use crate::k8s::{Kind, ObjectId};
use crate::source::{Batch, Event, Located};

/// Time at which the process starts and everything is observed: 2026-11-21T06:15:00Z.
const NOW: u64 = 1_795_241_700;

fn at(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(seconds)
}

fn slice(name: &str, service: &str, trigger: Option<&str>) -> Value {
    let mut slice = tests::slice(name, service, &["10.0.0.1"]);
    if let Some(trigger) = trigger {
        slice["metadata"]["annotations"] =
            json!({"endpoints.kubernetes.io/last-change-trigger-time": trigger});
    }
    slice
}

/// Returns the triggers of a batch as `service/family at milliseconds after NOW`.
fn triggers(index: &mut Index, events: Vec<Event>) -> Vec<String> {
    let observed_at = at(NOW);
    let outcome = index.apply(Batch {
        events,
        observed_at,
    });
    let triggers = outcome.publication.map(|p| p.triggers).unwrap_or_default();
    let text = |trigger: &crate::publish::Trigger| {
        let after = i128::from(trigger.at_ms) - i128::from(NOW) * 1_000;
        format!("{}/{} at {after}", trigger.service.name, trigger.family)
    };
    triggers.iter().map(text).collect()
}

fn list(slices: &[Value]) -> Vec<Event> {
    let services = [service("web", "10.96.0.1"), service("api", "10.96.0.2")];
    let objects = services.iter().chain(slices);
    Batch::sample(&Kind::ALL, objects.map(Located::sample)).events
}

fn synced(slices: &[Value]) -> Index {
    let mut index = Index::default().started_at(at(NOW - 60));
    assert_eq!(triggers(&mut index, list(slices)), [""; 0]);
    index
}

fn apply(index: &mut Index, slices: &[Value]) -> Vec<String> {
    let events = slices.iter().map(|slice| Event::Apply(object(slice)));
    triggers(index, events.collect())
}

#[test]
fn h_a_new_time_of_a_slice_is_a_trigger() {
    let mut index = synced(&[]);
    let first = slice("web-1", "web", Some("2026-11-21T06:14:59.5Z"));
    assert_eq!(
        apply(&mut index, std::slice::from_ref(&first)),
        ["web/IPv4 at -500"]
    );
    assert_eq!(apply(&mut index, &[first]), [""; 0], "the same time again");
    // The form that kube-controller-manager writes, and one with another time zone; two slices for
    // one change.
    let same = "2026-11-21T07:14:59.123456789+01:00";
    let both = [
        slice("web-1", "web", Some(same)),
        slice("web-2", "web", Some(same)),
    ];
    assert_eq!(apply(&mut index, &both), ["web/IPv4 at -877"]);
    let mut v6 = slice("web-6", "web", Some("2026-11-21T06:15:00Z"));
    v6["addressType"] = "IPv6".into();
    assert_eq!(apply(&mut index, &[v6]), ["web/IPv6 at 0"]);
}

#[test]
fn h_lists_and_deletions_are_no_triggers() {
    let first = slice("web-1", "web", Some("2026-11-21T06:14:58Z"));
    let mut index = synced(std::slice::from_ref(&first));
    assert_eq!(apply(&mut index, &[first]), [""; 0], "known from the list");
    // A restarted watch lists the changes made meanwhile.
    let listed = slice("web-1", "web", Some("2026-11-21T06:14:59Z"));
    assert_eq!(
        triggers(&mut index, list(std::slice::from_ref(&listed))),
        [""; 0]
    );
    assert_eq!(apply(&mut index, &[listed]), [""; 0]);
    let gone = Event::Delete(ObjectId {
        kind: Kind::EndpointSlice,
        namespace: "shop".into(),
        name: "web-1".into(),
    });
    assert_eq!(triggers(&mut index, vec![gone]), [""; 0]);
}

#[test]
fn h_times_that_make_no_sense_are_no_triggers() {
    let mut index = synced(&[]);
    for (time, expected) in [
        // Before the process began.
        ("2026-11-21T06:13:59Z", None),
        ("1970-01-01T00:00:00Z", None),
        ("1234-01-01T00:00:00Z", None),
        // A clock that is ahead, and one that is wrong.
        ("2026-11-21T06:15:04Z", Some("web/IPv4 at 4000")),
        ("2026-11-21T06:15:06Z", None),
        ("9999-12-31T23:59:59Z", None),
        ("yesterday", None),
        ("", None),
    ] {
        let found = apply(&mut index, &[slice("web-1", "web", Some(time))]);
        assert_eq!(found, Vec::from_iter(expected), "{time}");
    }
    let without = slice("web-1", "web", None);
    assert_eq!(apply(&mut index, &[without]), [""; 0]);
}

#[test]
fn h_slices_that_are_not_ours_are_no_triggers() {
    let mut index = synced(&[]);
    let time = Some("2026-11-21T06:14:59Z");
    let mut headless = slice("web-1", "web", time);
    headless["metadata"]["labels"]["service.kubernetes.io/headless"] = "".into();
    let mut fqdn = slice("web-2", "web", time);
    fqdn["addressType"] = "FQDN".into();
    assert_eq!(apply(&mut index, &[headless, fqdn]), [""; 0]);
}

#[test]
fn h_each_service_has_its_own_triggers() {
    let mut index = synced(&[]);
    let time = Some("2026-11-21T06:14:59Z");
    let both = [slice("web-1", "web", time), slice("api-1", "api", time)];
    assert_eq!(
        apply(&mut index, &both),
        ["api/IPv4 at -1000", "web/IPv4 at -1000"]
    );
}
