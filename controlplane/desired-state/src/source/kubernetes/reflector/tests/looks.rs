//! Second lists, and first lists that must not be believed.

use super::*;
use crate::source::kubernetes::memory::EMPTY_FOR;
use crate::source::kubernetes::reflector::looking::PAUSE;

fn rig(resource: Resource) -> Rig {
    let mut rig = Rig::new(resource);
    rig.shows_looks = true;
    rig.probes(10);
    rig
}

/// After requests for a second list there is exactly one, after a pause.
#[tokio::test(start_paused = true)]
async fn a_second_look_is_taken_when_somebody_wants_one() {
    let mut rig = rig(Resource::Services);
    rig.list(10, [put("a", 5), put("b", 6)]);
    rig.watch([Step::Hang]);
    rig.list(10, [put("a", 5), put("c", 7)]);
    rig.watch([Step::Hang]);
    rig.list(12, [put("a", 5), put("c", 7)]);
    rig.start();
    rig.told_until("done").await;
    let before = Instant::now();
    for _ in 0..100 {
        rig.upstream.look_again();
    }
    // An object that vanishes in this list has been missing only once.
    assert_eq!(rig.sent(3).await, ["apply c", "looked", "vanished b"]);
    assert_eq!(before.elapsed(), PAUSE);
    assert_eq!(rig.pass(Duration::from_secs(30)).await, [""; 0]);
    rig.upstream.look_again();
    assert_eq!(rig.sent(1).await, ["looked"]);
    assert_eq!(rig.lists(), 3);
    assert!(rig.doubts.is_empty());
}

/// Nobody keeps anything for want of a ServiceCIDR.
#[tokio::test(start_paused = true)]
async fn ranges_are_not_looked_at_again() {
    let mut rig = rig(Resource::ServiceCidrs);
    rig.list(10, [put("a", 5)]);
    rig.watch([Step::Hang]);
    rig.start();
    rig.told_until("done").await;
    rig.upstream.look_again();
    assert_eq!(rig.pass(Duration::from_secs(60)).await, [""; 0]);
    assert_eq!(rig.lists(), 1);
}

/// What is kept for want of a policy, a Pod or a Node ends with a second list, too; a definition that
/// the server does not have counts as looked at.
#[tokio::test(start_paused = true)]
async fn policies_pods_and_nodes_are_looked_at_again() {
    for resource in [
        Resource::NetworkPolicies,
        Resource::Namespaces,
        Resource::Pods,
        Resource::Nodes(None),
    ] {
        let mut rig = rig(resource);
        for version in [10, 11] {
            rig.list(version, [put("a", 5)]);
            rig.watch([Step::Hang]);
        }
        rig.start();
        rig.told_until("done").await;
        rig.upstream.look_again();
        assert_eq!(rig.sent(1).await, ["looked"]);
    }
    let mut rig = rig(Resource::ClusterPolicies { beta: true });
    for _ in 0..4 {
        rig.no_page(Failure::NotServed);
    }
    rig.start();
    assert_eq!(rig.sent(2).await, ["init", "done"]);
    let before = Instant::now();
    rig.upstream.look_again();
    assert_eq!(rig.sent(1).await, ["looked"]);
    assert_eq!(before.elapsed(), PAUSE);
    assert!(rig.state().absent && rig.state().trouble.is_none());
    assert_eq!(rig.upstream.age(), None, "what is not there is not stale");
}

/// A definition that is there and may not be read is no absent one: nobody takes it for no policies.
#[tokio::test(start_paused = true)]
async fn cluster_policies_that_may_not_be_read_are_not_taken_for_none() {
    let mut rig = rig(Resource::ClusterPolicies { beta: true });
    for _ in 0..200 {
        rig.no_page(Failure::Forbidden("no".to_owned()));
    }
    rig.start();
    assert_eq!(rig.pass(Duration::from_secs(90)).await, [""; 0]);
    let state = rig.state();
    assert!(state.trouble.is_some() && !state.synced && !state.absent);
    assert_eq!(rig.upstream.age(), None, "agents would leave the replica");
}

/// A second list that fails is tried again until it succeeds.
#[tokio::test(start_paused = true)]
async fn a_second_look_is_not_forgotten() {
    let mut rig = rig(Resource::Slices);
    rig.list(10, [put("a", 5)]);
    rig.watch([Step::Hang]);
    rig.no_page(Failure::Unreachable("no route".to_owned()));
    rig.no_page(Failure::Unreachable("no route".to_owned()));
    rig.list(10, [put("a", 5)]);
    rig.start();
    rig.told_until("done").await;
    rig.upstream.look_again();
    assert_eq!(rig.sent(1).await, ["looked"]);
}

/// No cluster is without Services: an empty list is doubted, and believed when another says the same.
#[tokio::test(start_paused = true)]
async fn a_first_list_without_anything_is_doubted_until_a_second_one() {
    for resource in [Resource::Services, Resource::Slices] {
        let mut rig = rig(resource);
        rig.list(10, []);
        rig.watch([Step::Hang]);
        // The first objects appear in the second list.
        rig.list(12, [put("a", 11)]);
        rig.start();
        assert_eq!(rig.sent(2).await, ["init", "done"]);
        let doubt = rig.doubts.remove(0).unwrap();
        assert!(
            doubt.contains("first list") && doubt.contains("was empty"),
            "{doubt}"
        );
        let before = Instant::now();
        rig.pass(EMPTY_FOR / 2).await;
        assert!(rig.doubts.is_empty());
        assert_eq!(rig.sent(2).await, ["apply a", "looked"]);
        assert!(before.elapsed() >= EMPTY_FOR);
        rig.pass(Duration::ZERO).await;
        assert_eq!(rig.doubts, [None]);
    }
}

/// Objects of the first list that could never be read count as missing, until they can be read or
/// are gone.
#[tokio::test(start_paused = true)]
async fn what_could_never_be_read_is_missing() {
    let mut rig = rig(Resource::Services);
    rig.list(10, [put("a", 5), unreadable("b", 6), unreadable("c", 6)]);
    rig.watch([
        Step::Say(vec![put("b", 11)]),
        Step::Say(vec![unreadable("a", 12), gone("c", 13)]),
    ]);
    rig.start();
    rig.told_until("delete c").await;
    rig.pass(Duration::ZERO).await;
    let doubts: Vec<_> = rig.doubts.iter().map(|doubt| doubt.as_deref()).collect();
    assert_eq!(
        doubts,
        [
            Some("2 Services of the API server cannot be read, the first is default/b"),
            Some("1 Services of the API server cannot be read, the first is default/c"),
            None
        ]
    );
}
