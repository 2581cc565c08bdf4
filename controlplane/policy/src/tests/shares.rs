//! What the policies of one namespace may take, and which of them allow nothing beyond that.

use kplane_model::{PolicyPort, Protocol};

use super::agent::Agent;
use super::cluster::*;
use crate::limits::Limits;
use crate::{End, Excess, NetworkPolicy, Policies, Requirement, Rule, Selector};

const SIZES: [(&str, u16); 4] = [("a/s", 10), ("a/m", 20), ("a/l", 30), ("b/l", 30)];

/// A policy for the Pod of its name that allows everybody at so many ports, 16 bytes each, from port 1 on.
fn of_size(name: &str, size: u16) -> NetworkPolicy {
    let port = |port| PolicyPort::Range(Protocol::Tcp, port, port);
    let all: Vec<_> = (1..=size).map(port).collect();
    ingress(name, &[("app", name)], &[ports(&all)])
}

/// What such a policy takes.
fn weight(size: usize) -> usize {
    64 + 2 + 32 + 16 * size
}

/// An index with these policies, and a Pod for each of [`SIZES`].
fn index(share: usize, policies: &[(&str, u16)]) -> Policies {
    let mut cluster = Cluster::two();
    for (number, (name, _)) in SIZES.into_iter().enumerate() {
        let address = format!("10.0.0.{}", number + 1);
        cluster = cluster.with(pod(name, &[&address], &[("app", name)]));
    }
    let mut index = cluster.index_with(Limits {
        share,
        ..Limits::default()
    });
    for (name, size) in policies {
        index.put_policy(of_size(name, *size));
    }
    index
}

/// Returns to which Pods of [`SIZES`] a stranger may connect, after checking that all agree on it.
fn open(index: &Policies, agent: &Agent) -> [bool; 4] {
    let from = "192.0.2.1".parse().unwrap();
    [1, 2, 3, 4].map(|number| {
        let to = format!("10.0.0.{number}").parse().unwrap();
        let judged = index.judge(&End::Address(from), &End::Address(to), Protocol::Tcp, 1);
        let is_open = agent.allows(from, to, Protocol::Tcp, 1);
        assert_eq!(judged.is_allowed(), is_open, "{to}: {judged:?}");
        is_open
    })
}

fn beyond(index: &Policies) -> Vec<(String, usize)> {
    index
        .beyond_share()
        .map(|(name, excess)| match excess {
            Excess::Messages { weight, .. } => (name.to_string(), weight),
            Excess::Groups { share } => (name.to_string(), share),
        })
        .collect()
}

#[test]
fn the_largest_policies_of_a_namespace_beyond_its_share_allow_nothing() {
    let [small, medium, large] = [10, 20, 30].map(weight);
    let named = |name: &str, weight| (name.to_owned(), weight);
    let cases = [
        (small + medium + large, [true; 4], vec![]),
        (
            small + medium + large - 1,
            [true, true, false, true],
            vec![named("a/l", large)],
        ),
        (
            small + medium - 1,
            [true, false, false, true],
            vec![named("a/l", large), named("a/m", medium)],
        ),
    ];
    for (share, expected, named) in cases {
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]] {
            let mut index = index(share, &order.map(|at: usize| SIZES[at]));
            let mut agent = Agent::default();
            agent.apply(index.take());
            assert_eq!(open(&index, &agent), expected, "{share} {order:?}");
            assert_eq!(beyond(&index), named, "{share} {order:?}");
        }
    }
}

#[test]
fn a_policy_that_shrinks_or_goes_lets_others_back_in() {
    let share = [10, 20, 30].map(weight).iter().sum::<usize>() - 1;
    for smaller in [Some(of_size("a/m", 19)), None] {
        let (mut index, mut agent) = (index(share, &SIZES), Agent::default());
        agent.apply(index.take());
        assert_eq!(open(&index, &agent), [true, true, false, true]);
        match smaller {
            Some(policy) => index.put_policy(policy),
            None => index.delete_policy(&name("a/m")),
        }
        agent.apply(index.take());
        assert_eq!((open(&index, &agent), beyond(&index)), ([true; 4], vec![]));
    }
}

#[test]
fn a_group_of_pods_counts_as_a_kibibyte() {
    let by_label = pods(None, Some(selector(&[("app", "web")])));
    let policy = ingress("a/g", &[], &[from(&[by_label])]);
    for (share, is_beyond) in [(weight(1) + 1_024, false), (weight(1) + 1_023, true)] {
        let mut index = index(share, &[]);
        index.put_policy(policy.clone());
        assert_eq!(!beyond(&index).is_empty(), is_beyond);
    }
}

#[test]
fn rules_far_beyond_a_share_are_forgotten_until_they_are_written_again() {
    let (mut index, mut agent) = (index(weight(30), &SIZES), Agent::default());
    let rules = |index: &Policies, of: &str| -> Vec<Rule> {
        let facts = index.policy(&name(of)).unwrap();
        facts.policy.ingress.unwrap()
    };
    assert_eq!(rules(&index, "a/m").len(), 1, "beyond, and not far");
    assert_eq!(rules(&index, "a/l"), []);
    agent.apply(index.take());
    for gone in ["a/s", "a/m"] {
        index.delete_policy(&name(gone));
    }
    agent.apply(index.take());
    assert_eq!(open(&index, &agent), [true, true, false, true]);
    assert_eq!(beyond(&index).len(), 1);
    index.put_policy(of_size("a/l", 30));
    agent.apply(index.take());
    assert_eq!((open(&index, &agent), beyond(&index)), ([true; 4], vec![]));
}

/// 200 Pods of namespace b in classes of their own, a Pod of a, and a policy of a with so many groups of all of them.
fn with_groups(of: usize, groups: usize) -> (Policies, Agent) {
    let mut cluster = Cluster::two().node("n", "10.0.0.0/8").with(pod("a/web", &["10.0.0.1"], &[]));
    for number in 0..200 {
        let (hash, address) = (number.to_string(), format!("10.1.0.{number}"));
        cluster = cluster.with(pod(&format!("b/{number}"), &[&address], &[("hash", &hash)]));
    }
    let peer = |number: usize| {
        let without = Requirement::DoesNotExist(format!("x{number}").into());
        pods(Some(selector(&[])), Some(Selector(vec![without])))
    };
    let all: Vec<_> = (0..of).map(peer).collect();
    let mut index = cluster.index_with(Limits {
        // Each node counts for 16 KiB.
        groups: groups - (16 << 10),
        ..Limits::default()
    });
    index.put_policy(ingress(
        "a/small",
        &[],
        &[from(&[block("192.0.2.0/24", &[])])],
    ));
    index.put_policy(ingress("a/wide", &[], &[from(&all)]));
    index.put_policy(ingress("b/own", &[], &[from(&[pods(None, None)])]));
    let mut agent = Agent::default();
    agent.apply(index.take());
    (index, agent)
}

#[test]
fn groups_beyond_a_share_are_not_made_and_their_policy_allows_nothing() {
    // 201 Pods are members, in one part on the one node.
    let price = |of: usize| of * (24 * 201 + 400);
    let [from, other, web] = ["10.1.0.7", "192.0.2.1", "10.0.0.1"].map(|ip| ip.parse().unwrap());
    let (index, agent) = with_groups(5, price(5));
    assert_eq!((beyond(&index), index.counts().groups), (vec![], 6));
    assert!(agent.allows(from, web, Protocol::Tcp, 1));
    assert_eq!(agent.parts().count(), 5 + 1);

    let (mut index, mut agent) = with_groups(5, price(5) - 1);
    let named = vec![("a/wide".to_owned(), price(5) - 1)];
    assert_eq!((beyond(&index), index.counts().groups), (named, 1));
    assert!(!agent.allows(from, web, Protocol::Tcp, 1));
    assert!(
        agent.allows(other, web, Protocol::Tcp, 1),
        "by the small one"
    );
    // Where fewer Pods are selected, it counts again.
    for number in 0..100 {
        index.delete_pod(&name(&format!("b/{number}")));
    }
    agent.apply(index.take());
    assert_eq!(beyond(&index), []);
    let from = "10.1.0.107".parse().unwrap();
    assert!(agent.allows(from, web, Protocol::Tcp, 1));
}
