//! Streams that open, live, and end.

use super::*;

#[tokio::test(start_paused = true)]
async fn coming_back_later_is_honoured() {
    let mut rig = Rig::new();
    let later = |after_ms| {
        server_message::Kind::ComeBackLater(pb::ComeBackLater {
            after_ms,
            reason: "storm".into(),
            replicas: Vec::new(),
        })
    };
    // The refusal comes instead of a Welcome, and in the middle of a stream.
    let first = rig.opened().await;
    first.say(later(40_000));
    let second = rig.opened().await;
    let waited = second.opened_at - first.opened_at;
    assert!(waited >= 40 * SECOND && waited <= 61 * SECOND, "{waited:?}");
    second.welcome(EPOCH);
    second.say(later(10_000));
    let third = rig.opened().await;
    let waited = third.opened_at - second.opened_at;
    assert!(waited >= 10 * SECOND && waited <= 16 * SECOND, "{waited:?}");
    // The agent does not stay away for ever.
    third.say(later(u32::MAX));
    let waited = rig.opened().await.opened_at - third.opened_at;
    assert!(waited <= LONGEST_ABSENCE * 3 / 2 + SECOND, "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn a_half_open_stream_is_given_up_within_20_seconds() {
    let mut rig = Rig::new();
    let mut plane = Plane::new([svc("a", &[])]);
    let server = rig.synced(&mut plane).await;
    let silent_since = Instant::now();
    let next = rig.opened().await;
    assert!(next.opened_at - silent_since >= 15 * SECOND);
    assert!(next.opened_at - silent_since <= 20 * SECOND);
    server.closed().await;
    // Silence instead of a Welcome has the same effect.
    let after = rig.opened().await.opened_at - next.opened_at;
    assert!(after <= 20 * SECOND, "{after:?}");
    assert_eq!(
        rig.report().counts.services,
        1,
        "the node is served as before"
    );
}

#[tokio::test(start_paused = true)]
async fn pings_go_both_ways() {
    let mut rig = Rig::new();
    let mut server = rig.opened().await;
    server.welcome(EPOCH);
    let started = Instant::now();
    server.say(server_message::Kind::Ping(pb::Ping { token: 42 }));
    let (mut pongs, mut pings) = (0, 0);
    while pings < 5 {
        match server.heard().await.unwrap() {
            agent_message::Kind::Pong(pong) => {
                assert_eq!(pong.token, 42);
                pongs += 1;
            }
            agent_message::Kind::Ping(ping) => {
                pings += 1;
                let token = ping.token;
                // An answer to something else does not count.
                let stray = token ^ 1;
                server.say(server_message::Kind::Pong(pb::Pong { token: stray }));
                sleep(Duration::from_millis(7)).await;
                server.say(server_message::Kind::Pong(pb::Pong { token }));
            }
            _ => {}
        }
    }
    assert_eq!(pongs, 1);
    let took = Instant::now() - started;
    assert!(took >= 20 * SECOND && took <= 21 * SECOND, "{took:?}");
    server.update(Plane::new([svc("a", &[])]).snapshot());
    let report = server.applied(1).await;
    assert!(
        (7_000..12_000).contains(&report.round_trip_us),
        "{}",
        report.round_trip_us
    );
}

/// A control plane that asks for beats hears something at least as often; others hear no beat.
#[tokio::test(start_paused = true)]
async fn an_agent_says_that_it_is_alive_as_often_as_it_is_asked_to() {
    for (beat_ms, longest) in [(0, 5_000), (1_500, 1_500), (1, 500)] {
        let mut rig = Rig::new();
        let mut server = rig.opened().await;
        assert!(server.hello.capabilities & (1 << (pb::Capability::Beats as u64 - 1)) > 0);
        server.say(server_message::Kind::Welcome(pb::Welcome {
            protocol_version: PROTOCOL_VERSION,
            epoch: EPOCH,
            beat_ms,
            ..pb::Welcome::default()
        }));
        let (mut last, mut beats, mut pings) = (Instant::now(), 0, 0);
        while pings < 3 {
            match server.heard().await.unwrap() {
                agent_message::Kind::Beat(_) => beats += 1,
                agent_message::Kind::Ping(ping) => {
                    pings += 1;
                    let token = ping.token;
                    server.say(server_message::Kind::Pong(pb::Pong { token }));
                }
                _ => {}
            }
            let silent = last.elapsed();
            assert!(
                silent <= Duration::from_millis(longest + 10),
                "{beat_ms}: {silent:?}"
            );
            last = Instant::now();
        }
        assert_eq!(beats > 0, beat_ms > 0);
    }
}

#[tokio::test(start_paused = true)]
async fn an_agent_says_which_nodes_it_reaches() {
    let mut rig = Rig::new();
    let mut plane = Plane::new([svc("a", &[])]);
    let mut server = rig.synced(&mut plane).await;
    server.say(server_message::Kind::Inspect(pb::Inspect {
        token: 7,
        reach: Some(pb::ReachQuestion::default()),
        ..pb::Inspect::default()
    }));
    loop {
        if let agent_message::Kind::Inspection(reported) = server.heard().await.unwrap() {
            assert_eq!(
                (reported.token, reported.reached.unwrap().nodes),
                (7, vec![true, false])
            );
            return;
        }
    }
}

/// An engine in a slow kernel: the stream is read until so much waits, and the agent stays alive.
#[tokio::test(start_paused = true)]
async fn a_slow_engine_holds_the_stream_back_and_keeps_it_alive() {
    let (engine, mut inbox, publish) = Engine::scripted();
    let mut rig = Rig::with(engine, 0);
    let mut plane = Plane::new([svc("a", &[])]);
    let mut server = rig.opened().await;
    server.welcome(EPOCH);
    server.update(plane.snapshot());
    plane.put(&svc("b", &[]));
    server.update(plane.delta());
    (0..10_000).for_each(|number| plane.put(&svc(&format!("s{number}"), &[])));
    server.update(plane.delta());
    let full = plane.revision;
    for port in 1..=5_u16 {
        plane.put(&svc("a", &[&format!("10.0.0.1:{port}")]));
        server.update(plane.delta());
    }
    let (mut pings, mut received) = (0, 0);
    while pings < 20 {
        match server.heard().await.expect("alive for 100 s") {
            agent_message::Kind::Ping(_) => pings += 1,
            agent_message::Kind::Report(report) => received = report.received_revision,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(received, full, "the stream is read no further");
    assert_eq!(inbox.len(), 3, "updates wait for the engine");
    let mut desired = crate::desired::Desired::default();
    while desired.position().is_none_or(|at| at.revision < plane.revision) {
        let (update, taken) = inbox.recv().await.unwrap();
        desired.apply(update).unwrap();
        taken.send(Ok(())).unwrap();
        publish.send_modify(|report| report.held = desired.position());
    }
    server.report(|report| report.received_revision == plane.revision).await;
}

#[tokio::test(start_paused = true)]
async fn connecting_again_backs_off_to_ten_seconds() {
    let started = Instant::now();
    let mut rig = Rig::with(local(noop::open()), 40);
    let server = rig.opened().await;
    // Ceilings 0.1 + .. + 6.4 s, then 33 times 10 s: half of it on average.
    let took = server.opened_at - started;
    assert!(took > 60 * SECOND && took < 345 * SECOND, "{took:?}");
    assert_eq!(rig.stage.lock().unwrap().refused, 40);
    assert!(!rig.connection.borrow().live);
}

#[tokio::test(start_paused = true)]
async fn a_healthy_stream_makes_the_next_pause_short() {
    let mut rig = Rig::with(local(noop::open()), 20);
    let mut server = rig.opened().await;
    server.welcome(EPOCH);
    let started = Instant::now();
    while started.elapsed() < 61 * SECOND {
        if let Some(agent_message::Kind::Ping(ping)) = server.heard().await {
            let token = ping.token;
            server.say(server_message::Kind::Pong(pb::Pong { token }));
        }
    }
    let lost = Instant::now();
    drop(server);
    let wait = rig.opened().await.opened_at - lost;
    assert!(wait <= Duration::from_millis(101), "{wait:?}");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_breaks_the_protocol_is_left() {
    let mut rig = Rig::new();
    let server = rig.opened().await;
    server.say(server_message::Kind::Heartbeat(pb::Heartbeat::default()));
    server.closed().await;
    let server = rig.opened().await;
    server.say(server_message::Kind::Welcome(pb::Welcome {
        protocol_version: 2,
        ..pb::Welcome::default()
    }));
    server.closed().await;
    let server = rig.opened().await;
    server.welcome(EPOCH);
    server.welcome(EPOCH);
    server.closed().await;
    let server = rig.opened().await;
    server.send.send(Err(Status::unavailable("shutting down"))).unwrap();
    server.closed().await;
    rig.opened().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_stops_ends_the_client() {
    let (engine, inbox, publish) = Engine::scripted();
    let mut rig = Rig::with(engine, 0);
    let server = rig.opened().await;
    server.welcome(EPOCH);
    drop((inbox, publish));
    assert_eq!(
        timeout(PATIENCE, rig.client).await.unwrap().unwrap(),
        Stopped
    );
}

#[test]
fn every_loss_has_its_remedy() {
    let position = Position {
        epoch: 1,
        revision: 1,
    };
    let cases = [
        (Lost::NoWelcome, Retry::Backoff),
        (Lost::Closed, Retry::Backoff),
        (Lost::Silent(SECOND), Retry::Backoff),
        (
            Lost::Refused(Refusal::NoSnapshot { position }),
            Retry::Fresh,
        ),
        (Lost::Refused(Refusal::TooLarge), Retry::Backoff),
        (Lost::Engine(Stopped), Retry::Never(Stopped)),
    ];
    for (lost, retry) in cases {
        assert_eq!(lost.retry(), retry, "{lost}");
    }
}

/// A control plane that says which cluster it is of.
fn welcome_to(server: &Server, cluster: &str) {
    server.say(server_message::Kind::Welcome(pb::Welcome {
        protocol_version: PROTOCOL_VERSION,
        epoch: EPOCH,
        cluster_id: cluster.into(),
        ..pb::Welcome::default()
    }));
}

/// An agent that has just started with the file of an earlier process.
fn remembering(cluster: &str) -> (Rig, mpsc::Receiver<Command>, watch::Sender<Report>) {
    let (engine, inbox, publish) = Engine::scripted();
    let position = Position {
        epoch: EPOCH,
        revision: 3,
    };
    publish.send_modify(|report| {
        report.cluster = cluster.into();
        report.resume = Some(Resume {
            position,
            digest: kplane_model::Digest::default(),
        });
    });
    (Rig::with(engine, 0), inbox, publish)
}

#[tokio::test(start_paused = true)]
async fn a_cache_of_another_cluster_is_no_state_to_resume_from() {
    let (mut rig, mut inbox, _reports) = remembering("a");
    let first = rig.opened().await;
    assert!(first.hello.resume.is_some() && first.hello.from_cache);
    welcome_to(&first, "b");
    first.closed().await;
    let second = rig.opened().await;
    assert!(second.hello.resume.is_none() && !second.hello.from_cache);
    let reason = rig.connection.borrow().reason.clone();
    assert!(
        reason.contains("\"b\"") && reason.contains("\"a\""),
        "{reason}"
    );
    // This stream stays, and the engine learns the cluster.
    let long = "b".repeat(100);
    welcome_to(&second, &long);
    second.update(Plane::new([svc("a", &[])]).snapshot());
    let (update, _taken) = inbox.recv().await.unwrap();
    assert_eq!(*update.cluster, long[..64]);
    assert!(rig.connection.borrow().live);
}

#[tokio::test(start_paused = true)]
async fn a_cluster_that_one_side_does_not_know_is_no_other_one() {
    for (ours, theirs) in [("a", "a"), ("a", ""), ("", "a")] {
        let (mut rig, mut inbox, _reports) = remembering(ours);
        let server = rig.opened().await;
        welcome_to(&server, theirs);
        server.update(Plane::new([svc("a", &[])]).delta());
        let (update, _taken) = inbox.recv().await.unwrap();
        assert_eq!(&*update.cluster, theirs);
    }
}

/// Only a control plane that has sent its state can confirm it.
#[tokio::test(start_paused = true)]
async fn a_heartbeat_confirms_what_was_sent_before() {
    let mut rig = Rig::new();
    let beat = || server_message::Kind::Heartbeat(pb::Heartbeat::default());
    let mut server = rig.opened().await;
    server.welcome(EPOCH);
    server.say(beat());
    server.say(server_message::Kind::Ping(pb::Ping { token: 1 }));
    while !matches!(server.heard().await, Some(agent_message::Kind::Pong(_))) {}
    assert_eq!(rig.engine.confirmation().get(), 0);
    server.update(Plane::new([svc("a", &[])]).snapshot());
    server.applied(1).await;
    rig.engine.confirmation().set(1);
    server.say(beat());
    server.say(server_message::Kind::Ping(pb::Ping { token: 2 }));
    while !matches!(server.heard().await, Some(agent_message::Kind::Pong(_))) {}
    assert!(rig.engine.confirmation().get() > 1);
}

/// A control plane confirms nothing that the engine has not taken yet.
#[tokio::test(start_paused = true)]
async fn a_heartbeat_does_not_confirm_what_waits() {
    let (engine, _inbox, _publish) = Engine::scripted();
    let mut rig = Rig::with(engine, 0);
    let mut server = rig.opened().await;
    server.welcome(EPOCH);
    server.update(Plane::new([svc("a", &[])]).snapshot());
    server.say(server_message::Kind::Heartbeat(pb::Heartbeat::default()));
    server.say(server_message::Kind::Ping(pb::Ping { token: 1 }));
    while !matches!(server.heard().await, Some(agent_message::Kind::Pong(_))) {}
    assert_eq!(rig.engine.confirmation().get(), 0);
}

/// A heartbeat says that the node is frozen: the agent's reports and its other parts say so too, and nobody confirms
/// what it serves. A connection that is lost does not thaw the node.
#[tokio::test(start_paused = true)]
async fn a_frozen_agent_knows_it_until_a_control_plane_says_otherwise() {
    let mut rig = Rig::new();
    let mut plane = Plane::new([svc("a", &[])]);
    let mut server = rig.synced(&mut plane).await;
    let heartbeat = |frozen| {
        server_message::Kind::Heartbeat(pb::Heartbeat {
            frozen,
            ..pb::Heartbeat::default()
        })
    };
    let order = pb::Frozen {
        since_ms: 7,
        by: "alice".to_owned(),
        reason: "line\nbreak".to_owned(),
    };
    rig.engine.confirmation().set(1);
    server.say(heartbeat(Some(order.clone())));
    server.report(|report| report.frozen).await;
    let frozen = rig.connection.borrow().frozen.clone().unwrap();
    assert_eq!(
        (frozen.since_ms, &*frozen.by, &*frozen.reason),
        (7, "alice", "line break")
    );
    assert_eq!(rig.engine.confirmation().get(), 1);

    drop(server);
    let mut server = rig.opened().await;
    assert!(rig.connection.borrow().frozen.is_some());
    server.welcome(EPOCH);
    server.say(heartbeat(Some(order)));
    server.update(plane.snapshot());
    server.report(|report| report.frozen).await;
    server.say(heartbeat(None));
    server.report(|report| !report.frozen).await;
    assert_eq!(rig.connection.borrow().frozen, None);
    server.say(heartbeat(None));
    server.answers_a_ping().await;
    assert!(rig.engine.confirmation().get() > 1, "confirmed again");
}
