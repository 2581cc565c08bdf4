//! Replicas that were started with different orders about NetworkPolicies.

use kplane_desired_state::admission::Enforce;
use kplane_model::Reason;

use super::*;

/// Starts two replicas that know each other, with these orders.
async fn two(overrides: [Option<Enforce>; 2]) -> Vec<Replica> {
    let all = addresses::<2>();
    let mut replicas = Vec::new();
    for (at, order) in all.into_iter().zip(overrides) {
        let replica = Replica::configured(at, flags(&all), |config| {
            config.admission.network_policies = order;
        });
        replicas.push(replica.await);
    }
    replicas
}

/// Returns the name of the replica that differs, and how.
fn differing(fleet: &pb::Fleet) -> Option<(&str, &str)> {
    let issues = &fleet.control_plane.as_ref()?.issues;
    let mut found = issues.iter().filter(|issue| issue.code == Reason::ReplicasDiffer.code());
    let issue = found.next()?;
    assert!(found.next().is_none(), "{issues:?}");
    assert_eq!(issue.severity(), pb::Severity::Error);
    Some((&issue.name, &issue.reason))
}

/// NP: a node enforces what its replica says, so each replica that is asked names one that says something else.
#[tokio::test]
async fn replicas_with_different_orders_about_policies_name_each_other() {
    let (on, off) = ("with --network-policy", "with --network-policy=off");
    for (overrides, words) in [
        ([Some(Enforce::On), None], [on, "without --network-policy"]),
        ([Some(Enforce::On), Some(Enforce::Off)], [on, off]),
    ] {
        let replicas = two(overrides).await;
        let [first, second] = [0, 1].map(|index| &replicas[index]);
        for (asked, other, said) in [(first, second, words[1]), (second, first, words[0])] {
            let fleet = asked.fleet_until(|fleet| differing(fleet).is_some()).await;
            let (name, reason) = differing(&fleet).unwrap();
            assert_eq!(name, address(other));
            let start = format!("was started {said},");
            assert!(reason.starts_with(&start), "{reason}");
        }
    }
}

#[tokio::test]
async fn replicas_with_the_same_order_about_policies_do_not_differ() {
    for order in [None, Some(Enforce::Off), Some(Enforce::On)] {
        for replica in &two([order; 2]).await {
            let fleet = replica.fleet_until(|fleet| fleet.replicas == 2).await;
            assert_eq!(differing(&fleet), None, "{order:?}");
            let expected = match order {
                None => pb::Enforcement::Unspecified,
                Some(Enforce::Off) => pb::Enforcement::Off,
                Some(Enforce::On) => pb::Enforcement::On,
            };
            let is_said = |fleet: &pb::Fleet| {
                let plane = fleet.control_plane.as_ref();
                plane.is_some_and(|plane| plane.enforcement() == expected)
            };
            replica.fleet_until(is_said).await;
        }
    }
}
