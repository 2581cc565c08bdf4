use std::collections::BTreeSet;

use kplane_proto::v1::NodeState;

use super::*;
use crate::migrate::order::Chosen;
use crate::migrate::pods::PodState;
use crate::migrate::record::Record;
use crate::migrate::snapshot::{Agents, KubeProxy, Served};

/// A cluster that does at once what labels and DaemonSets say.
fn cluster(names: &[&str]) -> Snapshot {
    Snapshot {
        kube_proxy: Some(KubeProxy::default()),
        agents: Some(Agents {
            limited: true,
            release: None,
        }),
        mode: Some("iptables".to_owned()),
        nodes: names.iter().map(|name| node(name)).collect(),
        ..Snapshot::default()
    }
}

fn node(name: &str) -> NodeSnapshot {
    NodeSnapshot {
        name: name.to_owned(),
        ready: true,
        linux: true,
        kube_proxy: PodState::Ready,
        ..NodeSnapshot::default()
    }
}

fn order(direction: Direction, at_a_time: usize) -> Order {
    Order {
        direction,
        chosen: Chosen::All,
        at_a_time,
    }
}

fn named(names: &[&str]) -> Chosen {
    let names: BTreeSet<String> = names.iter().map(|name| (*name).to_owned()).collect();
    Chosen::Named(names)
}

/// Does a step, as the cluster would. Pods come and go when `settle` says so.
fn act(snapshot: &mut Snapshot, step: &Step) {
    let each = |snapshot: &mut Snapshot, names: &[String], change: &dyn Fn(&mut NodeSnapshot)| {
        snapshot
            .nodes
            .iter_mut()
            .filter(|node| names.contains(&node.name))
            .for_each(change);
    };
    match step {
        Step::KeepOff => {
            snapshot.kube_proxy = Some(KubeProxy {
                keeps_off: true,
                record: Some(Record::default()),
            });
        }
        Step::Recreate | Step::Restore => snapshot.kube_proxy = Some(KubeProxy::default()),
        Step::Mark { nodes, value } => each(snapshot, nodes, &|node| node.mark = value.clone()),
        Step::CleanUp(name) => each(snapshot, std::slice::from_ref(name), &|node| {
            node.cleanup = PodState::Ready;
        }),
        Step::Unmark(name) => each(snapshot, std::slice::from_ref(name), &|node| {
            node.mark = Mark::None;
            node.cleanup = PodState::Absent;
        }),
        Step::Wait(_) => snapshot.nodes.iter_mut().for_each(settle),
        Step::Blocked(_) | Step::Paused | Step::Done(_) => {}
    }
}

fn settle(node: &mut NodeSnapshot) {
    match node.mark {
        Mark::Kplane => {
            node.kube_proxy = PodState::Absent;
            node.agent = PodState::Ready;
            node.served = Some(Served {
                state: NodeState::InSync,
                verified: true,
                error: String::new(),
                backend: "nftables".to_owned(),
            });
        }
        Mark::Returning => {
            node.agent = PodState::Absent;
            node.kube_proxy = PodState::Ready;
            if node.cleanup == PodState::Ready {
                node.cleanup = PodState::Succeeded;
            }
        }
        Mark::None | Mark::Other(_) => {}
    }
}

/// Walks to the end, and returns the most nodes that were on their way at once.
fn walk(snapshot: &mut Snapshot, order: &Order) -> usize {
    let mut most = 0;
    for _ in 0..100 {
        let step = next(snapshot, order);
        if matches!(step, Step::Done(_)) {
            return most;
        }
        act(snapshot, &step);
        let on_way = snapshot.nodes.iter().filter(|node| Stage::of(node).is_on_its_way());
        most = most.max(on_way.count());
    }
    panic!("no end: {:?}", next(snapshot, order));
}

#[test]
fn the_way_there_and_back_leaves_nothing() {
    for at_a_time in [1, 2, 9] {
        let before = cluster(&["a", "b", "c", "d", "e"]);
        let mut snapshot = before.clone();
        let most = walk(&mut snapshot, &order(Direction::ToKplane, at_a_time));
        assert_eq!(most, at_a_time.min(5));
        assert!(snapshot.nodes.iter().all(|node| Stage::of(node) == Stage::Kplane));
        assert_eq!(unfinished(&snapshot), None);
        let most = walk(&mut snapshot, &order(Direction::Back, at_a_time));
        assert_eq!(most, at_a_time.min(5));
        for node in &mut snapshot.nodes {
            node.served = None;
        }
        assert_eq!(snapshot, before);
    }
}

#[test]
fn a_command_that_is_repeated_at_any_moment_goes_on() {
    // The outcome of a step depends on the snapshot alone, so killing kpctl after each step is the same as not.
    let mut snapshot = cluster(&["a", "b"]);
    let forth = order(Direction::ToKplane, 1);
    for _ in 0..4 {
        let step = next(&snapshot, &forth);
        act(&mut snapshot, &step);
    }
    // In the middle of the way the operator turns round.
    walk(&mut snapshot, &order(Direction::Back, 1));
    assert!(snapshot.nodes.iter().all(|node| node.mark == Mark::None));
    walk(&mut snapshot, &forth);
    assert_eq!(unfinished(&snapshot), None);
}

#[test]
fn the_next_node_waits_until_the_one_before_is_verified() {
    let mut snapshot = cluster(&["a", "b"]);
    let forth = order(Direction::ToKplane, 1);
    act(&mut snapshot, &Step::KeepOff);
    let first = next(&snapshot, &forth);
    let mark = |name: &str| Step::Mark {
        nodes: vec![name.to_owned()],
        value: Mark::Kplane,
    };
    assert_eq!(first, mark("a"));
    act(&mut snapshot, &first);
    let Step::Wait(waits) = next(&snapshot, &forth) else {
        panic!("it does not wait");
    };
    assert_eq!(waits[0].node, "a");
    settle(&mut snapshot.nodes[0]);
    assert_eq!(next(&snapshot, &forth), mark("b"));
    // A node that was verified, and is not any more, holds the others up as well.
    if let Some(served) = &mut snapshot.nodes[0].served {
        served.state = NodeState::Failing;
    }
    assert!(matches!(next(&snapshot, &forth), Step::Wait(_)));
    let two = order(Direction::ToKplane, 2);
    assert_eq!(next(&snapshot, &two), mark("b"));
    snapshot.nodes[0].agent = PodState::Waiting {
        reason: "ImagePullBackOff".to_owned(),
        hopeless: true,
    };
    assert!(
        matches!(next(&snapshot, &two), Step::Wait(_)),
        "no other node meets the same fate"
    );
}

#[test]
fn only_chosen_nodes_move_and_only_those_that_work() {
    let mut snapshot = cluster(&["a", "b", "windows"]);
    snapshot.nodes[1].ready = false;
    snapshot.nodes[2].linux = false;
    let chosen = Order {
        chosen: named(&["b", "windows"]),
        ..order(Direction::ToKplane, 5)
    };
    act(&mut snapshot, &Step::KeepOff);
    let Step::Done(left) = next(&snapshot, &chosen) else {
        panic!("it goes on");
    };
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].node, "b");
    assert!(unfinished(&snapshot).is_some());
}

#[test]
fn a_node_that_was_kept_out_keeps_kube_proxy() {
    let mut snapshot = cluster(&["a", "b"]);
    walk(&mut snapshot, &order(Direction::ToKplane, 1));
    assert_eq!(unfinished(&snapshot), None);
    snapshot.nodes[1].mark = Mark::Other("kube-proxy".to_owned());
    let blocked = unfinished(&snapshot).unwrap();
    assert!(blocked.problem.starts_with("b is not served by kplane"));
    assert!(blocked.remedy.starts_with("kubectl label node b kplane.io/proxy- ;"));
    snapshot.nodes[1].linux = false;
    assert_eq!(unfinished(&snapshot), None);
}

#[test]
fn what_is_missing_is_named_with_the_command() {
    let forth = order(Direction::ToKplane, 1);
    let remedy = |change: fn(&mut Snapshot), order: &Order| {
        let mut snapshot = cluster(&["a"]);
        change(&mut snapshot);
        blocked(&snapshot, order).map(|blocked| blocked.remedy).unwrap_or_default()
    };
    assert_eq!(remedy(|_| {}, &forth), "");
    assert!(remedy(|snapshot| snapshot.agents = None, &forth).starts_with("helm install"));
    let unlimited = |snapshot: &mut Snapshot| snapshot.agents = Some(Agents::default());
    let back = order(Direction::Back, 1);
    for direction in [&forth, &back] {
        let remedy = remedy(unlimited, direction);
        let (label, upgrade) = remedy.split_once(" && ").expect("two commands");
        assert!(
            label.starts_with("kubectl label node ") && label.ends_with(" kplane.io/proxy=kplane")
        );
        assert!(upgrade.starts_with("helm upgrade kplane "), "{upgrade}");
    }
    let alone = |snapshot: &mut Snapshot| snapshot.plane_error = Some("refused".to_owned());
    assert_eq!(remedy(alone, &forth), "kpctl status");
    assert_eq!(
        remedy(alone, &back),
        "",
        "the way back needs no control plane"
    );
    let ipvs = |snapshot: &mut Snapshot| {
        snapshot.nodes[0].mark = Mark::Kplane;
        settle(&mut snapshot.nodes[0]);
        if let Some(served) = &mut snapshot.nodes[0].served {
            served.backend = "ipvs".to_owned();
        }
    };
    assert_eq!(
        remedy(ipvs, &back),
        "helm upgrade kplane deploy/chart --namespace kplane --reset-then-reuse-values --set \
         agent.backend=iptables"
    );
    assert!(remedy(|snapshot| snapshot.kube_proxy = None, &back).starts_with("kubeadm"));
}

#[test]
fn a_paused_migration_does_nothing() {
    let mut snapshot = cluster(&["a"]);
    snapshot.kube_proxy = Some(KubeProxy {
        keeps_off: true,
        record: Some(Record {
            paused: true,
            ..Record::default()
        }),
    });
    for direction in [Direction::ToKplane, Direction::Back] {
        assert_eq!(next(&snapshot, &order(direction, 1)), Step::Paused);
    }
}
