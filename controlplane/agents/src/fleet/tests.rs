//! Records of agents, and limits on their number.

use kplane_desired_state::publish::Publication;
use kplane_model::NodeFacts;

use super::*;
use crate::hub::Hub;

fn hub() -> Arc<Hub> {
    Hub::sample(1, "test")
}

fn hello() -> Hello {
    Hello {
        agent_version: "0.1.0\u{1b}[31m".to_owned(),
        backend: "ä".repeat(1_000),
        ..Hello::default()
    }
}

fn begin(hub: &Arc<Hub>, node: &str) -> Result<Session, NotBegun> {
    let mut hello = hello();
    bound_hello(&mut hello);
    let begun = Session::begin(hub.agents(), &node.into(), &hello, String::new());
    begun.map(|(session, _, _)| session)
}

fn publish_node(hub: &Hub, name: &str) {
    let publication = Publication::sample(vec![], vec![NodeFacts::sample(name)]);
    hub.store().publish(publication);
}

#[test]
fn what_an_agent_says_of_itself_is_short_and_plain() {
    let hub = hub();
    let _session = begin(&hub, "n1").unwrap();
    let record = hub.agents().record("n1").unwrap();
    assert_eq!(record.version, "0.1.0[31m");
    assert_eq!(record.backend, "ä".repeat(32));
}

/// An agent that resumes from its cache file has just started, and an agent that connects again has not.
#[test]
fn a_state_from_a_file_is_no_sign_of_an_older_process() {
    let hub = hub();
    for (resume, from_cache, began_empty) in [
        (false, false, true),
        (true, false, false),
        (true, true, true),
    ] {
        let hello = Hello {
            resume: resume.then(Default::default),
            from_cache,
            ..hello()
        };
        let begun = Session::begin(hub.agents(), &"n1".into(), &hello, String::new());
        let _session = begun.map(|(session, _, _)| session).unwrap();
        assert_eq!(hub.agents().record("n1").unwrap().began_empty, began_empty);
    }
}

#[test]
fn names_that_are_no_nodes_are_bounded() {
    let hub = hub();
    let mut sessions: Vec<Session> = (0..MAX_STRANGERS)
        .map(|n| begin(&hub, &format!("stranger-{n}")))
        .collect::<Result<_, _>>()
        .unwrap();
    assert_eq!(begin(&hub, "one-more").unwrap_err(), NotBegun::TooMany);
    // A Node is no stranger; a known stranger that reconnects is not counted twice.
    publish_node(&hub, "n1");
    let _node = begin(&hub, "n1").unwrap();
    let _again = begin(&hub, "stranger-7").unwrap();

    drop(sessions.remove(500));
    let _more = begin(&hub, "one-more").unwrap();
    assert!(hub.agents().record("stranger-500").is_none());
    assert_eq!(hub.agents().records().len(), MAX_STRANGERS + 1);
}

#[test]
fn strangers_that_are_gone_are_forgotten_and_nodes_are_not() {
    let hub = hub();
    publish_node(&hub, "n1");
    let _stays = begin(&hub, "connected").unwrap();
    for gone in ["n1", "gone", "a-node-later"] {
        drop(begin(&hub, gone).unwrap());
    }
    publish_node(&hub, "a-node-later");
    let sweep = |after| {
        let now = Instant::now() + after;
        hub.agents().sweep(now, |name| hub.store().knows(name));
        hub.agents()
            .records()
            .into_keys()
            .map(|name| name.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(sweep(REMEMBERED / 2).len(), 4);
    assert_eq!(sweep(REMEMBERED * 2), ["a-node-later", "connected", "n1"]);
    assert_eq!(hub.agents().lock().strangers, 1);
}

/// Reading the fleet copies no report, and what is read stays as it is.
#[test]
fn records_are_shared_with_readers() {
    let hub = hub();
    let session = begin(&hub, "n1").unwrap();
    session.report(Report::default());
    let before = hub.agents().record("n1").unwrap();
    assert!(Arc::ptr_eq(&before, &hub.agents().records()["n1"]));
    session.heard();
    let after = hub.agents().record("n1").unwrap();
    let report = |record: &AgentRecord| record.report.clone().unwrap();
    assert!(Arc::ptr_eq(&report(&before), &report(&after)));
}
