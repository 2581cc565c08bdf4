//! Steps of a rollout.

use super::*;
use crate::orders::{Settings, Stage};

const BEGAN: u64 = 1_000;

fn rollout() -> Rollout {
    Rollout {
        number: 1,
        settings: Settings {
            backend: "iptables".to_owned(),
            ..Settings::default()
        },
        steps: vec![5, 100],
        step: 0,
        up_to: u64::MAX,
        healthy_ms: 10_000,
        timeout_ms: 60_000,
        by: String::new(),
        reason: String::new(),
        at_ms: BEGAN,
        step_at_ms: BEGAN,
        stage: Stage::Running,
    }
}

/// Returns a node that has the settings and is healthy.
fn node(name: &str) -> pb::NodeStatus {
    pb::NodeStatus {
        name: name.to_owned(),
        state: pb::NodeState::InSync.into(),
        since_ms: BEGAN + 1,
        settings: Some((&rollout().settings).into()),
        report: Some(pb::Report {
            verified_revision: 7,
            ..pb::Report::default()
        }),
        ..pb::NodeStatus::default()
    }
}

fn away(since_ms: u64) -> pb::NodeStatus {
    pb::NodeStatus {
        state: pb::NodeState::Disconnected.into(),
        since_ms,
        ..node("away")
    }
}

fn covered(nodes: &[pb::NodeStatus]) -> Covered {
    let mut covered = Covered::default();
    for node in nodes {
        covered.add(&rollout(), node);
    }
    covered
}

fn after(covered: &Covered, healthy_s: u64, lasted_s: u64) -> Verdict {
    let [healthy, lasted] = [healthy_s, lasted_s].map(Duration::from_secs);
    judge(&rollout(), covered, healthy, lasted)
}

fn back(verdict: Verdict) -> String {
    match verdict {
        Verdict::Back(why) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_step_is_over_when_its_nodes_were_healthy_for_the_time() {
    let good = covered(&[node("a"), node("b")]);
    assert_eq!(after(&good, 9, 59), Verdict::Wait);
    assert_eq!(after(&good, 10, 59), Verdict::Good);
    assert_eq!(
        after(&good, 10, 600),
        Verdict::Good,
        "good comes before late"
    );
}

#[test]
fn nodes_that_were_away_before_are_not_waited_for() {
    let frozen = pb::NodeStatus {
        frozen: Some(pb::Frozen::default()),
        settings: None,
        ..node("frozen")
    };
    let some = covered(&[node("a"), away(BEGAN - 1), frozen.clone()]);
    assert_eq!((some.healthy, some.later), (1, 2));
    assert_eq!(after(&some, 10, 20), Verdict::Good);
    // Nothing is proved by nodes that did not try.
    let none = covered(&[away(BEGAN - 1), frozen]);
    assert_eq!(after(&none, 10, 59), Verdict::Wait);
    assert!(back(after(&none, 10, 60)).contains("no node had an agent"));
}

#[test]
fn a_node_that_goes_away_with_the_settings_is_the_way_back() {
    let gone = covered(&[node("a"), away(BEGAN)]);
    assert_eq!(
        after(&gone, 10, 59),
        Verdict::Wait,
        "it may be starting anew"
    );
    let why = back(after(&gone, 10, 60));
    assert!(
        why.contains("1 of 2") && why.contains("away: its agent has gone"),
        "{why}"
    );
}

#[test]
fn a_node_that_is_not_healthy_is_the_way_back_when_the_time_is_over() {
    let failing = pb::NodeStatus {
        state: pb::NodeState::Failing.into(),
        last_error: "no nft".to_owned(),
        ..node("bad")
    };
    let slow = pb::NodeStatus {
        settings: Some(pb::Settings::default()),
        ..node("slow")
    };
    let blind = pb::NodeStatus {
        report: Some(pb::Report::default()),
        ..node("blind")
    };
    for (node, word) in [(failing, "no nft"), (slow, "yet"), (blind, "read back")] {
        let some = covered(&[node]);
        assert_eq!(after(&some, 10, 59), Verdict::Wait);
        let why = back(after(&some, 0, 60));
        assert!(why.contains(word), "{why}");
    }
}

#[test]
fn a_node_that_cannot_take_the_settings_is_the_way_back_at_once() {
    let refusing = |settings: &Settings| pb::NodeStatus {
        settings: Some(pb::Settings::default()),
        refused_settings: Some(pb::RefusedSettings {
            settings: Some(settings.into()),
            reason: "no such backend".to_owned(),
        }),
        ..node("old")
    };
    let refuses = refusing(&rollout().settings);
    let older = pb::NodeStatus {
        settings: None,
        ..node("older")
    };
    for (node, word) in [(refuses, "no such backend"), (older, "upgrade")] {
        let why = back(after(&covered(&[node]), 0, 0));
        assert!(why.contains(word), "{why}");
    }
    // What it refused some time ago does not matter.
    let refused_others = covered(&[refusing(&Settings::default())]);
    assert_eq!(after(&refused_others, 0, 0), Verdict::Wait);
}

#[test]
fn nothing_goes_on_while_a_replica_does_not_answer() {
    let mut some = covered(&[node("a")]);
    some.miss(&[pb::MissingReplica {
        address: "192.0.2.1:7444".to_owned(),
        reason: "timeout".to_owned(),
    }]);
    assert_eq!(after(&some, 10, 59), Verdict::Wait);
    assert!(back(after(&some, 10, 60)).contains("192.0.2.1:7444"));
}
