//! Deletions of a step, and those that are held back.

use super::*;
use crate::trust::Trust;

/// Returns this number of Services with an endpoint each.
fn many(count: usize) -> Vec<Value> {
    let both = |n: usize| {
        let (name, octet) = (format!("s{n}"), n + 1);
        let endpoint = format!("10.0.0.{octet}");
        let slice = slice(&format!("{name}-1"), &name, &[&endpoint]);
        [service(&name, &format!("10.96.0.{octet}")), slice]
    };
    (0..count).flat_map(both).collect()
}

fn ids(objects: &[Value], kind: &str) -> Vec<ObjectId> {
    objects
        .iter()
        .filter(|value| value["kind"] == kind)
        .map(|value| object(value).object.id())
        .collect()
}

fn say(index: &mut Index, events: Vec<Event>) -> Vec<String> {
    let outcome = index.apply(batch(events));
    outcome.publication.as_ref().map_or_else(Vec::new, summary)
}

/// Two lists lack the same objects: the second one is believed. So is a list that has them again.
#[test]
fn a_second_look_lets_go_what_it_does_not_show_either() {
    let objects = many(20);
    let (mut index, _) = index(&objects);
    let services = ids(&objects, "Service");
    assert!(!say(&mut index, vec![Event::Vanished(services[..8].to_vec())]).is_empty());
    let vanished = vec![Event::Vanished(services[8..].to_vec())];
    let outcome = index.apply(batch(vanished));
    assert!(outcome.held_more && outcome.held_changed);
    assert_eq!(index.held().unwrap().services, 12);
    assert!(index.issues()[0].reason.starts_with("12 Services are kept: "));
    assert_eq!(index.totals().services, 12);
    // Slices of held Services stay, even when few of them vanish at a time.
    let slices = ids(&objects, "EndpointSlice");
    say(&mut index, vec![Event::Vanished(slices[8..10].to_vec())]);
    assert_eq!(index.totals().endpoints, 12);
    // One Service is back; a list of another kind does not confirm that the others are gone.
    let back = Event::Apply(object(&service("s19", "10.96.0.20")));
    say(&mut index, vec![back, Event::Looked(Kind::EndpointSlice)]);
    assert_eq!(index.held().unwrap().services, 11);
    let gone = say(&mut index, vec![Event::Looked(Kind::Service)]);
    assert_eq!(
        gone.iter().filter(|line| line.ends_with("gone")).count(),
        11
    );
    assert!(index.held().is_none() && index.issues().is_empty());
    assert_eq!(index.trust(), Trust::Confirmed);
}

/// A list that earlier lists confirm is believed at once.
#[test]
fn a_confirmed_list_is_no_cliff() {
    let objects = many(20);
    let (mut index, _) = index(&objects);
    let vanished = Event::Vanished(ids(&objects, "Service"));
    say(&mut index, vec![vanished, Event::Looked(Kind::Service)]);
    assert!(index.held().is_none());
    assert_eq!(index.totals(), Totals::default());
}

#[test]
fn what_is_deleted_by_name_goes_also_while_it_is_held() {
    let objects = many(20);
    let (mut index, _) = index(&objects);
    let services = ids(&objects, "Service");
    say(&mut index, vec![Event::Vanished(services.clone())]);
    assert_eq!(index.held().unwrap().services, 20);
    say(&mut index, vec![Event::Delete(services[0].clone())]);
    assert_eq!(index.held().unwrap().services, 19);
    for id in &services[1..] {
        say(&mut index, vec![Event::Delete(id.clone())]);
    }
    assert!(index.held().is_none());
    assert_eq!(index.totals(), Totals::default());
}

/// Services and slices come in separate lists, in either order.
#[test]
fn a_cliff_of_both_kinds_is_held_in_either_order() {
    let objects = many(20);
    for kinds in [["Service", "EndpointSlice"], ["EndpointSlice", "Service"]] {
        let (mut index, _) = index(&objects);
        for kind in kinds {
            say(&mut index, vec![Event::Vanished(ids(&objects, kind))]);
        }
        let held = index.held().unwrap();
        assert_eq!((held.services, held.without_endpoints), (20, 0));
        assert_eq!(
            (index.totals().services, index.totals().endpoints),
            (20, 20)
        );
        let (released, outcome) = index.approve(at(2));
        assert_eq!(released.unwrap().services, 20);
        assert_eq!(summary(&outcome.publication.unwrap()).len(), 20);
        assert_eq!(index.totals(), Totals::default());
    }
}

/// A list that lacks most Nodes is as doubtful as one that lacks most Services: agents would be strangers, and health
/// checks would fail.
#[test]
fn nodes_that_vanish_are_held() {
    let nodes: Vec<Value> = (0..20)
        .map(|n| {
            json!({
                "apiVersion": "v1", "kind": "Node", "metadata": {"name": format!("n{n}")},
            })
        })
        .collect();
    let (mut index, _) = index(&nodes);
    let ids = ids(&nodes, "Node");
    let gone = |index: &mut Index, event| {
        let publication = index.apply(batch(vec![event])).publication;
        let nodes = publication.map_or_else(Vec::new, |publication| publication.nodes);
        nodes.iter().filter(|node| !node.known).count()
    };
    assert_eq!(gone(&mut index, Event::Vanished(ids[..5].to_vec())), 5);
    assert_eq!(gone(&mut index, Event::Vanished(ids[5..].to_vec())), 0);
    let reason = index.held().unwrap().to_string();
    assert!(
        reason.starts_with("Nodes are kept: ")
            && reason.contains("15 of 15 Nodes would be removed"),
        "{reason}"
    );
    // A scale-down deletes by name.
    assert_eq!(gone(&mut index, Event::Delete(ids[19].clone())), 1);
    assert_eq!(gone(&mut index, Event::Looked(Kind::Node)), 14);
    assert!(index.held().is_none());
}

/// Before agents are served there is nothing to hold.
#[test]
fn a_first_list_that_begins_anew_holds_nothing() {
    let objects = many(20);
    let mut index = Index::default();
    let mut events = vec![Event::Init(Kind::Service)];
    events.extend(objects.iter().step_by(2).map(|o| Event::InitApply(object(o))));
    say(&mut index, events);
    say(&mut index, lists(&[]).events);
    assert!(index.is_synced() && index.held().is_none());
    assert_eq!(index.totals(), Totals::default());
}

/// `kubectl delete` sends deletions one by one; those before the cliff was reached have taken
/// effect.
#[test]
fn deletions_by_name_are_guarded_where_that_is_wanted() {
    let objects = many(100);
    let (index, _) = index(&objects);
    let mut index = index.guarded(CliffGuard {
        deletions: Guarded::All,
        ..CliffGuard::default()
    });
    for id in ids(&objects, "Service") {
        say(&mut index, vec![Event::Delete(id)]);
    }
    assert_eq!(index.held().unwrap().services, 70);
    // No list confirms deletions that the source named.
    say(&mut index, vec![Event::Looked(Kind::Service)]);
    assert_eq!(index.held().unwrap().services, 70);
    index.approve(at(2));
    assert_eq!(index.totals(), Totals::default());
}
