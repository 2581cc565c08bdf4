//! Ten thousand agents at three replicas. Sessions take the place of streams, which answers do not read.

use kplane_agents::fleet::Session;
use kplane_proto::v1 as pb;
use tokio::time::Instant;

use super::{DEADLINE, Replica, SOON, three};
use crate::support::watch::Watch;

/// Agents of each replica.
const EACH: usize = 3_334;

/// A report of the size that agents of a healthy fleet send.
fn report(epoch: u64) -> pb::Report {
    let family = |family: pb::Family| pb::FamilyStatus {
        family: family.into(),
        programmed: true,
        verified_at_ms: 1_700_000_000_000,
        rules: Some(pb::RuleStats {
            rules: 70_000,
            lookups: 40,
            lookups_in_one_list: 70_000,
        }),
        ..pb::FamilyStatus::default()
    };
    pb::Report {
        epoch,
        received_revision: 20_000,
        applied_revision: 20_000,
        verified_revision: 20_000,
        last_sync: Some(pb::SyncStats {
            revision: 20_000,
            finished_at_ms: 1_700_000_000_000,
            total_us: 4_711,
            ..pb::SyncStats::default()
        }),
        families: vec![family(pb::Family::Ipv4), family(pb::Family::Ipv6)],
        ..pb::Report::default()
    }
}

fn connect(replica: &Replica, number: usize) -> Vec<Session> {
    let hub = replica.bound.hub();
    (0..EACH)
        .map(|n| format!("node-{number}-{n:05}"))
        .map(|name| {
            let session = Session::sample(hub, &name);
            session.report(report(hub.store().epoch()));
            session
        })
        .collect()
}

/// The code of tests is several times as slow as that of a release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_agents_are_one_answer() {
    let replicas = three().await;
    let sessions: Vec<_> = replicas.iter().zip(0..).map(|(r, n)| connect(r, n)).collect();
    let asked = &replicas[0];
    let until = Instant::now() + DEADLINE;
    let (fleet, first, all) = loop {
        let started = Instant::now();
        let (fleet, first) = asked.fleet(0).await;
        if fleet.missing_replicas.is_empty() {
            break (fleet, first, started.elapsed());
        }
        // Other tests have all processors.
        assert!(Instant::now() < until, "{:?}", fleet.missing_replicas);
    };
    assert_eq!(fleet.nodes.len(), 3 * EACH + 3);
    let started = Instant::now();
    let mut watch = Watch::begin(&asked.bound, "web").await;
    let mut last = watch.next().await;
    let convergence = started.elapsed();
    println!("first page {first:?}, all pages {all:?}, convergence {convergence:?}");
    // A replica has a second, and the rest is work of this one.
    assert!(
        first < 2 * SOON && convergence < 2 * SOON,
        "{first:?}, {convergence:?}"
    );
    while (last.nodes, last.programmed) != (10_005, 10_002) {
        assert!(Instant::now() < until, "{last:?}");
        last = watch.next().await;
    }
    drop(sessions);
}
