//! Tests of what travels over a stream, and from where a new stream continues.

use kplane_model::{Family, ServiceName};

use super::*;
use kplane_dataplane::backend::{
    Applied, ApplyError, Change, Inspection, ServerCounts, Side, Verification, noop::Noop,
};

#[tokio::test(start_paused = true)]
async fn a_snapshot_and_deltas_are_applied_and_reported() {
    let mut rig = Rig::new();
    let mut plane = Plane::new([svc("a", &[]), svc("b", &["10.0.0.1:80"])]);
    let mut server = rig.opened().await;
    let hello = &server.hello;
    assert_eq!((&*hello.node_name, &*hello.backend), ("n1", "noop"));
    assert_eq!((hello.protocol_version, hello.capabilities), (1, 251));
    assert_eq!(hello.resume, None);
    server.welcome(EPOCH);
    let first = server.report(|_| true).await;
    assert_eq!((first.received_revision, first.applied_revision), (0, 0));
    server.update(plane.snapshot());
    let report = server.applied(2).await;
    assert_eq!((report.epoch, report.received_revision), (EPOCH, 2));
    assert_eq!(report.objects.unwrap().endpoints, 1);
    assert!(report.families.iter().all(|family| family.programmed));
    plane.put(&svc("a", &["10.0.0.2:80"]));
    server.update(plane.delta());
    assert_eq!(server.applied(3).await.objects.unwrap().endpoints, 2);
    // A delta in which there is nothing for this node counts as well.
    plane.revision = 10;
    server.update(plane.delta());
    server.applied(10).await;
    assert!(rig.connection.borrow().live);
}

#[tokio::test(start_paused = true)]
async fn a_part_of_a_snapshot_changes_nothing() {
    let mut rig = Rig::new();
    let mut plane = Plane::new([svc("a", &[]), svc("b", &[]), svc("c", &[])]);
    drop(rig.synced(&mut plane).await);
    let before = rig.report();

    let server = rig.opened().await;
    server.welcome(EPOCH);
    let mut pieces = Plane::new([svc("a", &["10.0.0.1:80"])]).snapshot();
    pieces.truncate(1);
    server.update(pieces);
    drop(server);

    // The next stream drops collected pieces, and continues from everything held.
    let mut server = rig.opened().await;
    assert_eq!(rig.report().held, before.held);
    assert_eq!(rig.report().counts.services, 3);
    server.welcome(EPOCH);
    plane.put(&svc("d", &[]));
    server.update(plane.delta());
    assert_eq!(server.applied(4).await.objects.unwrap().services, 4);
}

#[tokio::test(start_paused = true)]
async fn a_reconnect_resumes_from_what_is_held() {
    let mut rig = Rig::new();
    let mut plane = Plane::new([svc("a", &[])]);
    drop(rig.synced(&mut plane).await);
    let server = rig.opened().await;
    let resume = server.hello.resume.clone().unwrap();
    assert_eq!(
        (resume.schema, resume.epoch, resume.revision),
        (DIGEST_SCHEMA, EPOCH, 1)
    );
    assert_eq!(resume.digest, plane.digest().to_bytes());
    assert_eq!(
        rig.stage.lock().unwrap().looks,
        2,
        "names are resolved again"
    );
}

#[tokio::test(start_paused = true)]
async fn a_wrong_digest_leads_to_a_snapshot() {
    let mut rig = Rig::new();
    let mut plane = Plane::new([svc("a", &[])]);
    let server = rig.synced(&mut plane).await;
    plane.put(&svc("b", &[]));
    plane.put(&svc("c", &[]));
    let mut lossy = plane.delta();
    lossy[0].objects.pop();
    server.update(lossy);
    server.closed().await;
    assert_eq!(rig.report().counts.services, 1, "nothing of it counts");

    let server = rig.opened().await;
    assert_eq!(server.hello.resume, None);
    server.welcome(EPOCH);
    drop(server);
    let mut server = rig.opened().await;
    assert_eq!(server.hello.resume, None, "still in doubt");
    server.welcome(EPOCH);
    server.update(plane.snapshot());
    server.applied(3).await;
    drop(server);
    assert!(rig.opened().await.hello.resume.is_some(), "no longer");
}

#[tokio::test(start_paused = true)]
async fn an_older_view_is_refused_and_everything_kept() {
    let mut rig = Rig::new();
    let mut plane = Plane::new([svc("a", &[]), svc("b", &[])]);
    drop(rig.synced(&mut plane).await);
    // The same epoch from before `b` existed.
    let mut old = Plane::new([svc("a", &[])]);
    let server = rig.opened().await;
    server.welcome(EPOCH);
    server.update(old.snapshot());
    server.closed().await;
    assert_eq!(rig.report().counts.services, 2);
    let server = rig.opened().await;
    assert_eq!(server.hello.resume.as_ref().unwrap().revision, 2);
}

/// Until the engine holds an update of a new epoch, nothing of it is reported as applied.
#[tokio::test(start_paused = true)]
async fn another_epoch_is_received_before_it_is_applied() {
    let (engine, mut inbox, publish) = Engine::scripted();
    let at = |epoch, revision| Some(Position { epoch, revision });
    publish.send_modify(|report| {
        (report.held, report.applied) = (at(1, 50), at(1, 50));
    });
    let mut rig = Rig::with(engine, 0);
    let mut server = rig.opened().await;
    let mut plane = Plane::new([svc("a", &[])]);
    plane.epoch = 2;
    server.welcome(2);
    server.update(plane.snapshot());
    let report = server.report(|report| report.epoch == 2).await;
    assert_eq!((report.received_revision, report.applied_revision), (1, 0));
    let (update, taken) = inbox.recv().await.unwrap();
    assert_eq!(Some(update.position), at(2, 1));
    taken.send(Ok(())).unwrap();
    publish.send_modify(|report| {
        (report.held, report.applied) = (at(2, 1), at(2, 1));
    });
    server.applied(1).await;
}

#[tokio::test(start_paused = true)]
async fn unknown_messages_are_skipped_and_counted() {
    let mut rig = Rig::new();
    let mut plane = Plane::new([svc("a", &[])]);
    let mut server = rig.opened().await;
    server.welcome(EPOCH);
    for _ in 0..3 {
        server.send.send(Ok(ServerMessage { kind: None })).unwrap();
    }
    server.update(plane.snapshot());
    assert_eq!(server.applied(1).await.unknown_kinds, 3);
}

/// A report describes the current state, but it names each trigger only once, and only to the
/// control plane that numbered the trigger.
#[tokio::test(start_paused = true)]
async fn h_programmed_triggers_are_told_once() {
    let mut rig = Rig::new();
    let mut plane = Plane::new([svc("a", &[])]);
    let mut server = rig.synced(&mut plane).await;
    let trigger = |id| pb::Trigger {
        id,
        family: pb::Family::Ipv4.into(),
        at_ms: 1,
    };
    let announced = |report: pb::Report| {
        report.triggers_programmed.into_iter().map(|one| one.id).collect::<Vec<_>>()
    };
    plane.put(&svc("a", &["10.0.0.1:80"]));
    plane.triggers = vec![trigger(5), trigger(6)];
    // A family that only a newer version knows.
    plane.triggers.push(pb::Trigger {
        id: 7,
        family: 9,
        at_ms: 1,
    });
    server.update(plane.delta());
    assert_eq!(announced(server.applied(2).await), [5, 6]);
    plane.put(&svc("a", &["10.0.0.2:80"]));
    plane.triggers = vec![trigger(8)];
    server.update(plane.delta());
    assert_eq!(announced(server.applied(3).await), [8]);
    drop(server);
    // A reconnect does not repeat them.
    let mut server = rig.opened().await;
    server.welcome(EPOCH);
    assert_eq!(announced(server.report(|_| true).await), [0; 0]);
}

fn active(report: &pb::Report) -> Option<u64> {
    let servers = report.families[0].servers.as_ref();
    servers.map(|servers| servers.active_connections)
}

/// Ten read-backs a second that find other connections: one report in five seconds, with the latest
/// counts; none while nothing changes.
#[tokio::test(start_paused = true)]
async fn connections_alone_travel_with_the_next_ping() {
    let (engine, _inbox, publish) = Engine::scripted();
    let mut rig = Rig::with(engine, 0);
    let mut server = rig.opened().await;
    server.welcome(EPOCH);
    assert_eq!(active(&server.report(|_| true).await), None);
    let quiet = server.reports_within(60 * SECOND).await;
    assert_eq!(quiet, []);

    let mut reports = Vec::new();
    for connections in 1..=600 {
        let mut seen = ServerCounts::default();
        seen.connections.active = connections;
        publish.send_if_modified(|held| {
            let looked = Report {
                servers: [Some(seen), None],
                ..held.clone()
            };
            looked.replace(held)
        });
        reports.extend(server.reports_within(SECOND / 10).await);
    }
    assert!((11..=13).contains(&reports.len()), "{}", reports.len());
    let last = server.report(|report| active(report) == Some(600)).await;
    assert_eq!(last.families[1].servers, None);
    assert_eq!(server.reports_within(60 * SECOND).await, []);
}

#[tokio::test(start_paused = true)]
async fn another_replica_compares_ranges_and_sends_what_differs() {
    let mut rig = Rig::new();
    let names: Vec<_> = (0..40).map(|number| svc(&format!("s{number}"), &[])).collect();
    let mut plane = Plane::new(names.clone());
    drop(rig.synced(&mut plane).await);
    let mut other = Plane::new(names);
    other.epoch = EPOCH + 1;
    other.put(&svc("s7", &["10.0.0.1:80"]));
    let mut server = rig.opened().await;
    server.welcome(other.epoch);
    let ranges = u32::from(RANGES);
    server.say(server_message::Kind::Compare(pb::Compare { ranges }));
    let digests = loop {
        if let agent_message::Kind::Ranges(ranges) = server.heard().await.unwrap() {
            break ranges.digests;
        }
    };
    let pieces = other.replacement(&digests).unwrap();
    assert!(pieces.len() < 20, "{}", pieces.len());
    server.update(pieces);
    let report = server.applied(other.revision).await;
    let objects = report.objects.unwrap();
    assert_eq!(
        (report.epoch, objects.services, objects.endpoints),
        (other.epoch, 40, 1)
    );
    assert_eq!(rig.report().snapshots, 1);
    for ranges in [0, 17, 1 << 20] {
        server.say(server_message::Kind::Compare(pb::Compare { ranges }));
        server.closed().await;
        server = rig.opened().await;
        server.welcome(other.epoch);
    }
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_holds_nothing_has_no_digests() {
    let mut rig = Rig::new();
    let mut server = rig.opened().await;
    server.welcome(EPOCH);
    let ranges = u32::from(RANGES);
    server.say(server_message::Kind::Compare(pb::Compare { ranges }));
    loop {
        if let agent_message::Kind::Ranges(ranges) = server.heard().await.unwrap() {
            assert!(ranges.digests.is_empty());
            return;
        }
    }
}

/// A backend that answers questions about Services.
struct ReportPacing;

impl Side for ReportPacing {
    fn apply(&mut self, _: Change<'_>) -> Result<Applied, ApplyError> {
        Ok(Applied::default())
    }

    fn verify(&mut self) -> Result<Verification, ApplyError> {
        Ok(Verification::Equal)
    }

    fn inspect(&self, service: &ServiceName) -> Option<Inspection> {
        Some(Inspection {
            error: format!("about {service}"),
            ..Inspection::default()
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_question_about_a_service_is_answered_with_its_token() {
    let report_pacing = |family| match family {
        Family::V4 => Box::new(ReportPacing) as Box<dyn Side>,
        Family::V6 => Box::new(Noop::default()),
    };
    let mut rig = Rig::with(local(noop::open_with(report_pacing)), 0);
    let mut server = rig.synced(&mut Plane::new([svc("a", &[])])).await;
    for token in [7, 8] {
        server.say(server_message::Kind::Inspect(pb::Inspect {
            token,
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            ..pb::Inspect::default()
        }));
        let announced = loop {
            let heard = server.heard().await.unwrap();
            if let agent_message::Kind::Inspection(announced) = heard {
                break announced;
            }
        };
        assert_eq!(
            (announced.token, &*announced.error),
            (token, "about shop/web")
        );
    }
}

/// The control plane of a large fleet wants to hear of progress later, and of trouble at once.
#[tokio::test(start_paused = true)]
async fn reports_of_progress_are_spread_when_the_control_plane_says_so() {
    let mut rig = Rig::new();
    let mut plane = Plane::new([svc("a", &[])]);
    let mut server = rig.opened().await;
    server.welcome(EPOCH);
    server.update(plane.snapshot());
    server.applied(1).await;
    server.say(server_message::Kind::Heartbeat(pb::Heartbeat {
        report_within_ms: 2_000,
        ..pb::Heartbeat::default()
    }));
    plane.put(&svc("b", &[]));
    server.update(plane.delta());
    plane.put(&svc("c", &[]));
    server.update(plane.delta());
    // One report tells of both, with the time of each.
    let report = server.report(|report| report.received_revision > 1).await;
    assert_eq!((report.received_revision, report.applied_revision), (3, 3));
    let first = report.steps.first().unwrap();
    assert!((2..=3).contains(&first.revision), "{:?}", report.steps);
    assert_eq!(report.steps.last().unwrap().revision, 3);
}
