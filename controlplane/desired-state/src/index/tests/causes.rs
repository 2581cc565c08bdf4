//! The causes of changes.

use super::*;

fn cause(outcome: &Outcome, service: &str) -> Cause {
    let name = ServiceName::new("shop", service);
    let causes = outcome.causes.of(&name);
    assert_eq!(causes.len(), 1, "{causes:?}");
    Cause::clone(&causes[0])
}

fn outcome(index: &mut Index, value: &Value) -> Outcome {
    index.apply(batch(vec![Event::Apply(object(value))]))
}

#[test]
fn a_slice_that_changes_is_the_cause_with_its_version_and_its_endpoints() {
    let (mut index, _) = index(&[
        service("web", "10.96.0.1"),
        slice("web-1", "web", &["10.0.0.1", "10.0.0.2"]),
    ]);
    let mut changed = slice("web-1", "web", &["10.0.0.2", "10.0.0.3"]);
    changed["metadata"]["resourceVersion"] = json!("4711");
    changed["endpoints"][0]["conditions"] = json!({"ready": false});
    let cause = cause(&outcome(&mut index, &changed), "web");
    assert_eq!((cause.version, cause.verb), (4711, Verb::Changed));
    assert_eq!(&*cause.object.name, "web-1");
    let mut states: Vec<_> = cause
        .details
        .endpoints
        .iter()
        .map(|change| (change.addr.ip.to_string(), change.before, change.after))
        .collect();
    states.sort_by_key(|(ip, ..)| ip.clone());
    use EndpointState::{Absent, NotReady, Ready};
    let expected = [
        ("10.0.0.1", Ready, Absent),
        ("10.0.0.2", Ready, NotReady),
        ("10.0.0.3", Absent, Ready),
    ]
    .map(|(ip, before, after)| (ip.to_owned(), before, after));
    assert_eq!(states, expected);
}

/// Nothing that kplane uses changed, so nothing is said about the Service.
#[test]
fn a_slice_that_is_written_again_causes_nothing() {
    let same = slice("web-1", "web", &["10.0.0.1"]);
    let (mut index, _) = index(&[service("web", "10.96.0.1"), same.clone()]);
    let outcome = outcome(&mut index, &same);
    assert!(cause(&outcome, "web").details.is_empty());
    assert_eq!(outcome.causes.services().count(), 0);
}

#[test]
fn a_service_that_changes_is_the_cause_with_its_fields() {
    let (mut index, _) = index(&[service("web", "10.96.0.1")]);
    let mut changed = service("web", "10.96.0.1");
    changed["spec"]["internalTrafficPolicy"] = json!("Local");
    let found = cause(&outcome(&mut index, &changed), "web");
    let fields = &found.details.fields;
    assert_eq!(fields.len(), 1, "{fields:?}");
    assert!(fields[0].field.ends_with("internalTrafficPolicy"));
    assert_eq!(
        (&*fields[0].before, &*fields[0].after),
        ("Cluster", "Local")
    );
    let id = object(&changed).object.id();
    let gone = index.apply(batch(vec![Event::Delete(id)]));
    let found = cause(&gone, "web");
    assert_eq!(found.verb, Verb::Removed);
    let fields = &found.details.fields;
    assert_eq!(
        (&*fields[0].before, &*fields[0].after),
        ("10.96.0.1:80", "")
    );
}

/// The first list is not a change, whatever its size.
#[test]
fn the_first_picture_has_no_causes() {
    let mut index = Index::default();
    let first = lists(&[service("web", "10.96.0.1")]);
    assert_eq!(index.apply(first).causes.others().count(), 0);
}

#[test]
fn causes_are_bounded() {
    let many: Vec<String> = (0..100).map(|n| format!("10.0.1.{n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let (mut index, _) = index(&[service("web", "10.96.0.1")]);
    let found = cause(&outcome(&mut index, &slice("web-1", "web", &many)), "web");
    assert_eq!(found.verb, Verb::Added);
    assert_eq!(found.details.endpoints.len(), 16);
    assert_eq!(found.details.omitted, 84);
}
