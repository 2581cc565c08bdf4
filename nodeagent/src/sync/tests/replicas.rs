//! Several replicas of the control plane.

use kplane_model::Family;

use super::*;
use crate::desired::Desired;

/// An engine without a kernel. (The timers of a real one need real time, and these tests take hours.)
fn engine() -> Engine {
    let (engine, mut inbox, publish) = Engine::scripted();
    tokio::spawn(async move {
        let mut desired = Desired::default();
        while let Some((update, taken)) = inbox.recv().await {
            let _ = taken.send(desired.apply(update).map(drop));
            publish.send_modify(|report| {
                report.held = desired.position();
                report.applied = report.held;
                report.resume = desired.resume();
                report.cluster = desired.cluster();
                report.freshness = desired.freshness().clone();
                report.counts.services = desired.counts(Family::V4).services;
            });
        }
    });
    engine
}

fn later(after_ms: u32) -> server_message::Kind {
    server_message::Kind::ComeBackLater(pb::ComeBackLater {
        after_ms,
        reason: "draining".into(),
        replicas: Vec::new(),
    })
}

fn three() -> Rig {
    Rig::among(engine(), [at(1), at(2), at(3)])
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

/// An agent goes to a replica that it knows from another one only: a list or a name may lag behind for minutes.
#[tokio::test(start_paused = true)]
async fn an_agent_goes_to_a_replica_that_the_last_one_named() {
    for in_farewell in [false, true] {
        let mut rig = Rig::among(engine(), [at(1)]);
        let named = || vec![at(9).to_string(), "nonsense".to_owned()];
        let first = rig.opened().await;
        assert_eq!(first.at, at(1));
        first.welcome(EPOCH);
        if !in_farewell {
            first.say(server_message::Kind::Heartbeat(pb::Heartbeat {
                replicas: named(),
                ..pb::Heartbeat::default()
            }));
            // What was said stays so.
            first.say(server_message::Kind::Heartbeat(pb::Heartbeat::default()));
        }
        first.say(server_message::Kind::ComeBackLater(pb::ComeBackLater {
            after_ms: 30_000,
            replicas: if in_farewell { named() } else { Vec::new() },
            ..pb::ComeBackLater::default()
        }));
        let second = rig.opened().await;
        assert_eq!((second.at, second.opened_at), (at(9), first.opened_at));
    }
}

fn version(kind: &str, version: u64) -> pb::KindVersion {
    pb::KindVersion {
        kind: kind.into(),
        version: version.to_string(),
        changed: String::new(),
    }
}

impl Server {
    /// Welcomes the agent. The first heartbeat follows at once.
    fn welcome_at(&self, epoch: u64, slices: u64, age: Duration) {
        self.say(server_message::Kind::Welcome(pb::Welcome {
            protocol_version: PROTOCOL_VERSION,
            epoch,
            freshness: vec![version("EndpointSlice", slices)],
            ..pb::Welcome::default()
        }));
        self.beat(slices, age);
    }

    fn beat(&self, slices: u64, age: Duration) {
        let beat = server_message::Kind::Heartbeat(pb::Heartbeat {
            freshness: vec![version("EndpointSlice", slices)],
            upstream_age_ms: age.as_millis().try_into().unwrap(),
            ..pb::Heartbeat::default()
        });
        self.try_say(beat);
    }

    /// Says something to a client that may have left.
    fn try_say(&self, kind: server_message::Kind) {
        let _ = self.send.send(Ok(ServerMessage { kind: Some(kind) }));
    }
}

fn plane(epoch: u64, slices: u64, services: &[&str]) -> Plane {
    let services: Vec<_> = services.iter().map(|name| svc(name, &[])).collect();
    let mut plane = Plane::new(services);
    (plane.epoch, plane.revision) = (epoch, 1);
    plane.freshness = vec![version("EndpointSlice", slices)];
    plane
}

/// Fault 2: a replica whose view is older has objects that are gone, and lacks others.
#[tokio::test(start_paused = true)]
async fn an_older_replica_is_left_and_nothing_of_it_is_applied() {
    let mut rig = three();
    let first = rig.opened().await;
    first.welcome_at(1, 100, Duration::ZERO);
    first.update(plane(1, 100, &["a"]).snapshot());
    let mut first = first;
    first.applied(1).await;
    drop(first);

    let older = rig.opened().await;
    older.welcome_at(2, 99, Duration::ZERO);
    let (name, text) = (older.at.to_string(), "versions of EndpointSlice up to 99");
    older.update(plane(2, 99, &["gone", "a"]).snapshot());
    older.closed().await;
    assert_eq!(rig.connection.borrow().older_states, 1);
    assert!(rig.connection.borrow().reason.contains(text));

    let mut fresh = rig.opened().await;
    fresh.welcome_at(3, 101, Duration::ZERO);
    fresh.update(plane(3, 101, &["a", "b"]).snapshot());
    let taken = |report: &pb::Report| report.epoch == 3 && report.applied_revision == 1;
    let report = fresh.report(taken).await;
    assert_eq!(report.objects.unwrap().services, 2);
    let [failure] = &*report.failures else {
        panic!("{:?}", report.failures)
    };
    assert!(
        failure.degraded && failure.reason.contains(text),
        "{failure:?}"
    );
    assert!(failure.reason.starts_with(&name), "{failure:?}");
    assert_eq!(
        rig.report().freshness.kinds().collect::<Vec<_>>(),
        [("EndpointSlice", "101")]
    );
    // The reports say so for ten minutes.
    let started = Instant::now();
    let report = async {
        loop {
            fresh.beat(101, Duration::ZERO);
            let reports = fresh.reports_within(5 * SECOND).await;
            if reports.iter().any(|report| report.failures.is_empty()) {
                return;
            }
        }
    };
    report.await;
    let took = started.elapsed();
    assert!(took >= 590 * SECOND && took <= 620 * SECOND, "{took:?}");
}

/// The source may go back under an open stream, before anything changes.
#[tokio::test(start_paused = true)]
async fn a_replica_that_goes_back_is_left() {
    let mut rig = three();
    let mut first = rig.opened().await;
    first.welcome_at(1, 100, Duration::ZERO);
    first.update(plane(1, 100, &["a"]).snapshot());
    first.applied(1).await;
    let gone = first.at;
    first.beat(50, Duration::ZERO);
    first.closed().await;
    let mut second = rig.opened().await;
    assert_ne!(second.at, gone);
    // The same by an update.
    second.welcome_at(2, 100, Duration::ZERO);
    let mut plane = plane(2, 100, &["a"]);
    second.update(plane.snapshot());
    second.report(|report| report.epoch == 2 && report.applied_revision == 1).await;
    plane.freshness = vec![version("EndpointSlice", 60)];
    plane.put(&svc("b", &[]));
    second.update(plane.delta());
    second.closed().await;
    assert_eq!(rig.report().counts.services, 1);
    assert_eq!(rig.connection.borrow().older_states, 2);
}

/// Answers all streams as replicas that show an older state, until the agent takes it; returns the time.
async fn until_taken(
    rig: &mut Rig,
    age: impl Fn(Replica) -> Duration,
    limit: Duration,
) -> Option<Duration> {
    let started = Instant::now();
    while started.elapsed() < limit {
        let Ok(server) = timeout(limit, rig.opened()).await else {
            return None;
        };
        let mut server = server;
        server.welcome_at(9, 50, age(server.at));
        server.update(plane(9, 50, &["old"]).snapshot());
        while let Some(heard) = server.heard().await {
            if matches!(heard, agent_message::Kind::Report(report) if report.applied_revision == 1)
            {
                return Some(started.elapsed());
            }
        }
    }
    None
}

/// Fault 4: the API server was restored from a backup, and all replicas say so.
#[tokio::test(start_paused = true)]
async fn an_older_state_of_all_replicas_is_taken_after_a_minute() {
    for replicas in [vec![at(1)], vec![at(1), at(2), at(3)]] {
        let mut rig = Rig::among(engine(), replicas.clone());
        let mut first = rig.opened().await;
        first.welcome_at(1, 100, Duration::ZERO);
        first.update(plane(1, 100, &["a", "b"]).snapshot());
        first.applied(1).await;
        drop(first);
        // A replica that does not answer is no reason to wait for ever.
        if replicas.len() > 1 {
            rig.stage.lock().unwrap().dead.insert(at(2));
        }
        let taken = until_taken(&mut rig, |_| Duration::ZERO, 300 * SECOND)
            .await
            .expect("the older state is taken");
        assert!(taken >= 60 * SECOND && taken <= 90 * SECOND, "{taken:?}");
        assert_eq!(rig.report().counts.services, 1);
        assert_eq!(
            rig.report().freshness.kinds().collect::<Vec<_>>(),
            [("EndpointSlice", "50")]
        );
    }
}

/// A replica that is cut off proves nothing: it may be older for that very reason.
#[tokio::test(start_paused = true)]
async fn an_older_state_of_a_replica_that_is_cut_off_is_never_taken() {
    let mut rig = three();
    let mut first = rig.opened().await;
    first.welcome_at(1, 100, Duration::ZERO);
    first.update(plane(1, 100, &["a", "b"]).snapshot());
    first.applied(1).await;
    drop(first);
    let age = |replica| {
        if replica == at(2) { 20 * SECOND } else { Duration::ZERO }
    };
    assert_eq!(until_taken(&mut rig, age, 600 * SECOND).await, None);
    assert_eq!(rig.report().counts.services, 2);
}

/// A replica whose source is cut off is left within 20 s.
#[tokio::test(start_paused = true)]
async fn a_replica_that_is_cut_off_is_left_for_one_that_is_not() {
    let mut rig = three();
    let first = rig.opened().await;
    first.welcome_at(1, 100, 12 * SECOND);
    first.beat(100, 13 * SECOND);
    let left = Instant::now();
    let second = rig.opened().await;
    assert_eq!(second.opened_at, left, "at once");
    assert_ne!(second.at, first.at);
    // This one is cut off as well, so the third is asked.
    second.welcome_at(2, 100, 60 * SECOND);
    let third = rig.opened().await;
    assert!(third.at != first.at && third.at != second.at);
    third.welcome_at(3, 100, 5 * SECOND);
    let mut third = third;
    assert!(lives(&mut third, |_| 5 * SECOND, 600 * SECOND).await);
}

/// Serves a stream for a time, with heartbeats of an age; returns whether the agent stayed.
async fn lives(server: &mut Server, age: impl Fn(Duration) -> Duration, time: Duration) -> bool {
    let started = Instant::now();
    let mut beat = tokio::time::interval(5 * SECOND);
    while started.elapsed() < time {
        tokio::select! {
            _ = beat.tick() => server.beat(100, age(started.elapsed())),
            heard = server.inbox.recv() => match heard.and_then(|message| message.kind) {
                None => return false,
                Some(agent_message::Kind::Ping(ping)) => {
                    let token = ping.token;
                    server.try_say(server_message::Kind::Pong(pb::Pong { token }));
                }
                Some(_) => {}
            },
        }
    }
    true
}

/// The streams that an agent opens in ten minutes, while all replicas are cut off since the start.
async fn streams_while_cut_off(rig: &mut Rig) -> Vec<Replica> {
    let started = Instant::now();
    let mut streams = Vec::new();
    while started.elapsed() < 600 * SECOND && streams.len() < 100 {
        let mut server = rig.opened().await;
        streams.push(server.at);
        server.welcome_at(1, 100, started.elapsed());
        let before = started.elapsed();
        lives(&mut server, |since| before + since, 600 * SECOND - before).await;
    }
    streams
}

#[tokio::test(start_paused = true)]
async fn agents_do_not_flap_when_all_replicas_are_cut_off() {
    let streams = streams_while_cut_off(&mut three()).await;
    let all: BTreeSet<_> = streams.iter().collect();
    assert_eq!(all.len(), 3, "all were asked");
    assert!(streams.len() <= 16, "{}", streams.len());
    let mut alone = Rig::among(engine(), [at(1)]);
    assert_eq!(streams_while_cut_off(&mut alone).await, [at(1)]);
}

/// The agent stays with the replica whose data is the newest.
#[tokio::test(start_paused = true)]
async fn the_freshest_of_replicas_that_are_cut_off_is_kept() {
    let mut rig = three();
    // Replica 2 lost its source a minute after the others.
    let age = |replica: Replica| {
        let at = if replica == at(2) { 40 } else { 100 };
        at * SECOND
    };
    let started = Instant::now();
    let kept = loop {
        let mut server = rig.opened().await;
        let base = age(server.at);
        server.welcome_at(1, 100, base + started.elapsed());
        let before = started.elapsed();
        if lives(&mut server, |since| base + before + since, 20 * SECOND).await {
            break server.at;
        }
    };
    assert_eq!(kept, at(2));
    assert!(started.elapsed() <= 21 * SECOND);
}

/// Replicas that came back or are new get the agents that belong to them; at most one agent in twenty moves a minute.
#[tokio::test(start_paused = true)]
async fn an_agent_goes_to_its_favourite_replica_in_its_own_time() {
    let mut rig = three();
    let mut plane = Plane::new([svc("a", &[])]);
    let favourite = rig.synced(&mut plane).await;
    let place = favourite.at;
    rig.stage.lock().unwrap().dead.insert(place);
    drop(favourite);
    let mut second = rig.opened().await;
    second.welcome(EPOCH);
    let came = Instant::now();
    rig.stage.lock().unwrap().dead.clear();
    while second.answers_a_ping().await {}
    let mut back = rig.opened().await;
    assert_eq!(back.at, place);
    let stayed = back.opened_at - came;
    assert!(
        (600 * SECOND..=2_401 * SECOND).contains(&stayed),
        "{stayed:?}"
    );
    assert!(back.hello.resume.is_some());
    // There it stays.
    back.welcome(EPOCH);
    let end = Instant::now() + 3 * 2_400 * SECOND;
    while Instant::now() < end {
        assert!(back.answers_a_ping().await, "the agent left");
    }
}

/// Found by the simulation: agents asked a replica that was cut off for hundreds of streams a second, because another
/// replica was gone.
#[tokio::test(start_paused = true)]
async fn a_replica_that_is_gone_is_no_reason_to_leave_one_that_is_cut_off() {
    let mut rig = three();
    rig.stage.lock().unwrap().dead.extend([at(1), at(2)]);
    let streams = streams_while_cut_off(&mut rig).await;
    assert!(streams.iter().all(|replica| *replica == at(3)));
    assert!((2..=16).contains(&streams.len()), "{}", streams.len());
}

/// Agents find out by themselves which replica is in their zone, and stay there.
#[tokio::test(start_paused = true)]
async fn an_agent_ends_up_at_the_replica_in_its_zone() {
    let mut rig = three();
    let mut server = rig.opened().await;
    let mut visited = vec![server.at];
    let begin = Instant::now();
    // The last one is in the zone.
    for _ in 0..2 {
        server.welcome_from(EPOCH, Some(false));
        while server.answers_a_ping().await {}
        server = rig.opened().await;
        assert!(!visited.contains(&server.at), "it was there before");
        visited.push(server.at);
    }
    let took = begin.elapsed();
    assert!(took <= 2 * 241 * SECOND, "{took:?}");
    server.welcome_from(EPOCH, Some(true));
    let end = Instant::now() + 3 * 2_400 * SECOND;
    while Instant::now() < end {
        assert!(server.answers_a_ping().await, "the agent left");
    }
}
