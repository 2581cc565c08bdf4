//! Several replicas of the control plane.

use super::*;

fn later(after_ms: u32) -> server_message::Kind {
    server_message::Kind::ComeBackLater(pb::ComeBackLater {
        after_ms,
        reason: "draining".into(),
    })
}

fn three() -> Rig {
    Rig::among(Engine::local(noop::open()), [at(1), at(2), at(3)])
}

#[tokio::test(start_paused = true)]
async fn the_next_replica_takes_over_at_once_and_names_are_resolved_again() {
    let mut rig = three();
    let mut plane = Plane::new([svc("a", &[])]);
    let first = rig.synced(&mut plane).await;
    rig.stage.lock().unwrap().dead.insert(first.at);
    // A fourth replica appears meanwhile, which may be the favourite.
    rig.stage.lock().unwrap().replicas.push(at(4));
    let (lost, gone) = (Instant::now(), first.at);
    drop(first);
    let second = rig.opened().await;
    assert!(second.opened_at - lost <= Duration::from_millis(101));
    assert_ne!(second.at, gone);
    assert!(
        second.hello.resume.is_some(),
        "nothing has to be sent again"
    );
    let stage = rig.stage.lock().unwrap();
    assert_eq!((stage.looks, stage.refused), (2, 0), "the lost one is last");
}

#[tokio::test(start_paused = true)]
async fn a_round_tries_all_replicas_without_a_pause() {
    let mut rig = three();
    rig.stage.lock().unwrap().dead.extend([at(1), at(2)]);
    let started = Instant::now();
    let server = rig.opened().await;
    assert_eq!((server.at, server.opened_at), (at(3), started));
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_is_sent_away_goes_to_another_replica_at_once() {
    let mut rig = three();
    let first = rig.opened().await;
    first.welcome(EPOCH);
    first.say(later(30_000));
    let second = rig.opened().await;
    assert_eq!(second.opened_at, first.opened_at);
    second.say(later(10_000));
    let third = rig.opened().await;
    assert_eq!(third.opened_at, first.opened_at);
    let all = BTreeSet::from([first.at, second.at, third.at]);
    assert_eq!(all.len(), 3);
    // With all of them busy, the agent waits for the first.
    third.say(later(60_000));
    let again = rig.opened().await;
    let waited = again.opened_at - first.opened_at;
    assert_eq!(again.at, second.at);
    assert!(waited >= 10 * SECOND && waited <= 15 * SECOND, "{waited:?}");
}
