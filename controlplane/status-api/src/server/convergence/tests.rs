//! The counts, and the reasons of laggards; the tests supply the agents' reports.

use std::collections::BTreeMap;

use kplane_agents::fleet::Session;
use kplane_desired_state::publish::{Publication, Published};
use kplane_desired_state::source::kubernetes;
use kplane_model::{NodeFacts, ServiceKey, ServicePort};

use super::*;

const EPOCH: u64 = 1;

fn hub(source: &'static str) -> Arc<Hub> {
    let hub = Hub::sample(EPOCH, source);
    hub.store().set_synced();
    hub
}

fn publish(hub: &Hub, services: &[(&str, bool)], nodes: &[(&str, bool)]) -> u64 {
    let services = services.iter().map(|(name, exists)| {
        let key = ServiceKey::sample("shop", name);
        let port = ServicePort::sample(key.clone());
        // Another number each time, so that every call is a change.
        let port = ServicePort {
            port: u16::try_from(hub.store().head().borrow().revision).unwrap(),
            ..port
        };
        (key, exists.then(|| Published::new(port, &[])))
    });
    let nodes = nodes.iter().map(|(name, known)| NodeFacts {
        name: (*name).into(),
        known: *known,
        ..NodeFacts::default()
    });
    hub.store().publish(Publication::sample(services.collect(), nodes.collect()))
}

fn report(applied: u64, verified: u64) -> pb::Report {
    pb::Report {
        epoch: EPOCH,
        received_revision: applied,
        applied_revision: applied,
        verified_revision: verified,
        ..pb::Report::default()
    }
}

/// Returns a report that shop/web failed.
fn failed(applied: u64, degraded: bool) -> pb::Report {
    let failure = pb::ObjectFailure {
        key: Some((&ServiceKey::sample("shop", "web")).into()),
        reason: "the port is taken".to_owned(),
        since_ms: 5_000,
        degraded,
        ..pb::ObjectFailure::default()
    };
    pb::Report {
        failures: vec![failure],
        ..report(applied, applied)
    }
}

fn of(hub: &Hub, name: &str) -> pb::Convergence {
    let mut followed = Followed::new(ServiceName::new("shop", name));
    convergence(hub, &mut followed, &Collected::default())
}

fn counts_of(answer: &pb::Convergence) -> [u64; 3] {
    [answer.nodes, answer.programmed, answer.verified]
}

fn lags(answer: &pb::Convergence) -> Vec<(&str, LagState)> {
    answer.laggards.iter().map(|l| (l.node.as_str(), l.state())).collect()
}

#[test]
fn each_laggard_has_its_reason() {
    let hub = hub("test");
    let nodes = [
        "absent", "away", "behind", "broken", "fails", "new", "plain", "read",
    ];
    let known = nodes.map(|name| (name, true));
    let old = publish(&hub, &[("web", true), ("other", true)], &known);
    let sessions: Vec<_> = nodes[1..].iter().map(|name| Session::sample(&hub, name)).collect();
    let [away, behind, broken, fails, _new, plain, read] = sessions.try_into().unwrap();
    for session in [&away, &behind, &broken, &fails, &plain, &read] {
        session.report(report(old, old));
    }
    let new = publish(&hub, &[("web", true)], &[]);
    away.report(report(new, new));
    drop(away);
    let family = pb::FamilyStatus {
        error: "nf_tables: no memory".to_owned(),
        error_since_ms: 4_000,
        ..pb::FamilyStatus::default()
    };
    broken.report(pb::Report {
        families: vec![family],
        ..report(old, old)
    });
    fails.report(failed(new, false));
    plain.report(report(new, old));
    read.report(report(new, new));

    let answer = of(&hub, "web");
    assert_eq!(counts_of(&answer), [8, 2, 1]);
    assert_eq!(
        (answer.state(), answer.wanted_revision),
        (ServiceState::Served, new)
    );
    assert!(answer.changed_at_ms > 0);
    let states = lags(&answer);
    assert_eq!(states[0], ("broken", LagState::Failing), "for longest");
    assert_eq!(states[6], ("plain", LagState::Unverified), "comes last");
    assert_eq!(
        BTreeMap::from_iter(states.clone()),
        BTreeMap::from([
            ("absent", LagState::NoAgent),
            ("away", LagState::Disconnected),
            ("behind", LagState::Behind),
            ("broken", LagState::Failing),
            ("fails", LagState::Failing),
            ("new", LagState::Behind),
            ("plain", LagState::Unverified),
        ])
    );
    let of_node = |name: &str| answer.laggards.iter().find(|l| l.node == name).cloned().unwrap();
    let reason = |name: &str| (of_node(name).since_ms, of_node(name).reason);
    assert_eq!(reason("fails"), (5_000, "the port is taken".to_owned()));
    let broken = format!("applied revision {old} of {new}; nf_tables: no memory");
    assert_eq!(reason("broken"), (4_000, broken));
    assert!(reason("new").1.contains("not reported"), "{answer:?}");
    let behind = of_node("behind");
    assert_eq!((behind.revision, behind.wanted_revision), (old, new));
    // The change concerned nobody else's Service.
    assert_eq!(counts_of(&of(&hub, "other")), [8, 5, 5]);
}

#[test]
fn a_degraded_service_is_served() {
    let hub = hub("test");
    let revision = publish(&hub, &[("web", true)], &[]);
    let session = Session::sample(&hub, "a");
    session.report(failed(revision, false));
    assert_eq!(counts_of(&of(&hub, "web")), [1, 0, 0]);
    session.report(failed(revision, true));
    assert_eq!(counts_of(&of(&hub, "web")), [1, 1, 1]);
}

#[test]
fn few_laggards_are_listed_and_all_are_counted() {
    let hub = hub("test");
    let names: Vec<String> = (0..30).map(|n| format!("node-{n:02}")).collect();
    let nodes: Vec<_> = names.iter().map(|name| (name.as_str(), true)).collect();
    let revision = publish(&hub, &[("web", true)], &nodes);
    let session = Session::sample(&hub, "node-00");
    session.report(report(revision, 0));
    let answer = of(&hub, "web");
    assert_eq!(counts_of(&answer), [30, 1, 0]);
    assert_eq!((answer.laggards.len(), answer.laggards_omitted), (20, 10));
    assert_eq!(
        answer.laggards[0].node, "node-01",
        "what is not programmed comes first"
    );
    session.report(pb::Report {
        failures: vec![pb::ObjectFailure {
            key: Some((&ServiceKey::sample("shop", "web")).into()),
            reason: "ä".repeat(9_000),
            ..pb::ObjectFailure::default()
        }],
        ..report(revision, 0)
    });
    assert_eq!(of(&hub, "web").laggards[0].reason, "ä".repeat(150));
}

#[test]
fn nodes_that_are_gone_do_not_count() {
    for (source, left) in [(kubernetes::NAME, 1), ("manifests", 2)] {
        let hub = hub(source);
        let revision = publish(&hub, &[("web", true)], &[("gone", true), ("here", true)]);
        let sessions = ["gone", "here"].map(|name| Session::sample(&hub, name));
        for session in &sessions {
            session.report(report(revision, revision));
        }
        publish(&hub, &[], &[("gone", false)]);
        assert_eq!(
            counts_of(&of(&hub, "web")),
            [2, 2, 2],
            "while its agent is there"
        );
        let [gone, _here] = sessions;
        drop(gone);
        assert_eq!(of(&hub, "web").nodes, left, "{source}");
    }
}

#[test]
fn a_service_that_is_not_served_says_why() {
    let hub = Hub::sample(EPOCH, "test");
    let state = |name: &str| {
        let answer = of(&hub, name);
        (answer.state(), answer.programmed, answer.reason)
    };
    let session = Session::sample(&hub, "a");
    assert_eq!(
        state("web").0,
        ServiceState::Uncertain,
        "nothing was read yet"
    );
    let revision = publish(&hub, &[("web", true)], &[]);
    hub.store().set_synced();
    hub.store().set_trust(Trust::Partial("half a file".into()));
    let (uncertain, _, reason) = state("api");
    assert_eq!(uncertain, ServiceState::Uncertain);
    assert!(reason.contains("half a file"), "{reason}");
    hub.store().set_trust(Trust::Whole);
    assert_eq!(state("api").0, ServiceState::Unknown);
    assert_eq!(state("api").1, 0, "the agent has not reported");
    session.report(report(revision, revision));
    assert_eq!(state("api").1, 1);
    // An agent that keeps Services from before may serve this one.
    session.report(pb::Report {
        held: Some(pb::Held {
            services: 3,
            ..pb::Held::default()
        }),
        ..report(revision, revision)
    });
    assert_eq!(lags(&of(&hub, "api")), [("a", LagState::Holding)]);
    assert_eq!(state("web").1, 1, "but this one is known");

    let deleted = publish(&hub, &[("web", false)], &[]);
    assert_eq!((state("web").0, state("web").1), (ServiceState::Deleted, 0));
    session.report(report(deleted, deleted));
    assert_eq!(state("web").1, 1);
}

#[test]
fn durations_are_those_of_the_newest_change() {
    let hub = hub("test");
    let sessions = ["a", "b"].map(|name| Session::sample(&hub, name));
    let both = |revision| {
        for session in &sessions {
            session.report(report(revision, 0));
        }
    };
    both(publish(&hub, &[("web", true)], &[]));
    assert_eq!(
        of(&hub, "web").durations,
        None,
        "agents that are new are not measured"
    );
    both(publish(&hub, &[("web", true)], &[]));
    publish(&hub, &[("web", true)], &[]);
    assert_eq!(of(&hub, "web").durations, None, "no kernel holds it");
    let revision = publish(&hub, &[("other", true)], &[]);
    sessions[0].report(report(revision, 0));
    let durations = of(&hub, "web").durations.unwrap();
    assert_eq!(durations.nodes, 1);
    assert!(durations.p50_ms <= durations.p99_ms && durations.p99_ms <= durations.max_ms);
}
