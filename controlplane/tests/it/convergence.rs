//! `WatchConvergence` over real sockets, with agents that lag, fail, take back and disconnect.

use kp_controlplane::app::Bound;
use kplane_desired_state::publish::Publication;
use kplane_http::client::get;
use kplane_model::ServiceKey;
use kplane_proto::v1::{self as pb, LagState, ServiceState};
use tokio::time::{Instant, timeout};
use tonic::Code;

use crate::support::reporter::{Agent, web};
use crate::support::start::start;
use crate::support::watch::{Watch, lags};
use crate::support::{DEADLINE, hello};

/// Starts a control plane that answers this many watches at a time.
async fn control_plane(watches: usize) -> (Bound, tempfile::TempDir) {
    start(|config| config.identity.watches = watches).await
}

/// Publishes Service shop/web with this port number, or its deletion.
fn publish(bound: &Bound, port: Option<u16>) -> u64 {
    let publication = Publication::sample(vec![web(port)], vec![]);
    bound.hub().store().publish(publication)
}

/// Connects agents that hold and have read back this revision.
async fn agents<const N: usize>(bound: &Bound, names: [&str; N], revision: u64) -> [Agent; N] {
    let mut agents = Vec::new();
    for name in names {
        let mut agent = Agent::connect(bound, hello(name)).await;
        agent.peer.reach(revision).await;
        agent.report(revision, revision).await;
        agents.push(agent);
    }
    agents.try_into().ok().unwrap()
}

/// Returns a report that shop/web is not in the kernel.
fn failed(revision: u64) -> pb::Report {
    let failure = pb::ObjectFailure {
        key: Some((&ServiceKey::sample("shop", "web")).into()),
        reason: "the port is taken".to_owned(),
        since_ms: 1,
        ..pb::ObjectFailure::default()
    };
    pb::Report {
        applied_revision: revision,
        verified_revision: revision,
        failures: vec![failure],
        ..pb::Report::default()
    }
}

#[tokio::test]
async fn what_an_agent_takes_back_no_longer_counts() {
    let (bound, _folder) = control_plane(1).await;
    let old = publish(&bound, Some(80));
    let mut watch = Watch::begin(&bound, "web").await;
    let [agent] = agents(&bound, ["a"], old).await;
    watch.counts(1, 1).await;
    let new = publish(&bound, Some(81));
    assert_eq!(lags(&watch.counts(0, 0).await), [("a", LagState::Behind)]);
    agent.report(new, old).await;
    assert_eq!(
        lags(&watch.counts(1, 0).await),
        [("a", LagState::Unverified)]
    );
    agent.report(new, new).await;
    watch.counts(1, 1).await;
    agent.report(old, old).await;
    assert_eq!(lags(&watch.counts(0, 0).await), [("a", LagState::Behind)]);
    agent.report(new, new).await;
    assert_eq!(
        watch.counts(1, 1).await.durations.unwrap().nodes,
        1,
        "counted once"
    );
}

#[tokio::test]
async fn a_change_is_followed_into_every_kernel_and_a_deletion_out_of_it() {
    let (bound, _folder) = control_plane(1).await;
    let old = publish(&bound, Some(80));
    let mut watch = Watch::begin(&bound, "web").await;
    let [mut a, mut b, away] = agents(&bound, ["a", "b", "c"], old).await;
    watch.counts(3, 3).await;
    drop(away);
    let new = publish(&bound, Some(81));
    for agent in [&mut a, &mut b] {
        agent.peer.reach(new).await;
    }
    a.report(new, new).await;
    b.say(failed(new)).await;
    b.report(new, new).await;
    b.peer.is_answered().await;
    let c = Agent::connect(&bound, hello("c")).await;
    c.report(new, new).await;
    let all = watch.counts(3, 3).await;
    assert_eq!((all.laggards.len(), all.laggards_omitted), (0, 0));
    let durations = all.durations.unwrap();
    assert_eq!(durations.nodes, 2, "b failed at that revision");
    assert!(durations.p50_ms <= durations.p99_ms && durations.p99_ms <= durations.max_ms);
    assert!(
        durations.max_ms <= all.now_ms - all.changed_at_ms,
        "{all:?}"
    );

    let gone = publish(&bound, None);
    let deleted = watch.counts(0, 0).await;
    assert_eq!(deleted.state(), ServiceState::Deleted);
    for agent in [&a, &b, &c] {
        agent.report(gone, gone).await;
    }
    assert_eq!(watch.counts(3, 3).await.state(), ServiceState::Deleted);

    let metrics = get(bound.http_addr.unwrap(), "/metrics").await.unwrap().body;
    // Two nodes for the change, and three for the deletion.
    let line = "kplane_controlplane_change_programmed_duration_seconds_count 5";
    assert!(metrics.lines().any(|l| l == line), "{metrics}");
    let send = "kplane_controlplane_change_hop_duration_seconds_count{hop=\"send\"} 0";
    assert!(!metrics.contains(send), "{metrics}");
}

/// Agents report all the time about other Services; a watch hears only of its own.
#[tokio::test]
async fn a_quiet_service_causes_few_answers_and_an_unknown_one_does_not_end_the_watch() {
    let (bound, _folder) = control_plane(16).await;
    let mut watch = Watch::begin(&bound, "api").await;
    let answer = watch.next().await;
    assert_eq!((answer.state(), answer.nodes), (ServiceState::Unknown, 0));
    assert!(answer.reason.contains("does not exist"), "{answer:?}");
    let refused = Watch::ask(&bound, "wbe", false).await.err().map(|error| error.code());
    assert_eq!(refused, Some(Code::NotFound), "a misspelt name");
    publish(&bound, Some(80));
    assert!(Watch::ask(&bound, "web", false).await.is_ok());
    let agent = Agent::connect(&bound, hello("a")).await;
    agent.report(1, 1).await;
    watch.counts(1, 1).await;
    let began = Instant::now();
    let answers = loop {
        agent.report(1, 1).await;
        let quiet = timeout(std::time::Duration::from_millis(20), watch.0.message());
        if let Ok(answer) = quiet.await {
            break answer.unwrap().unwrap();
        }
    };
    assert!(began.elapsed().as_millis() >= 1_000, "{answers:?}");
}

#[tokio::test]
async fn it_counts_as_a_watch_and_a_name_has_a_limit() {
    let (bound, _folder) = control_plane(1).await;
    let long = Watch::ask(&bound, &"n".repeat(254), true).await;
    assert_eq!(long.err().unwrap().code(), Code::InvalidArgument);
    let mut watch = Watch::begin(&bound, "web").await;
    watch.next().await;
    let one_more = Watch::ask(&bound, "web", true).await;
    assert_eq!(one_more.err().unwrap().code(), Code::ResourceExhausted);
    drop(watch);
    let until = Instant::now() + DEADLINE;
    while Watch::ask(&bound, "web", true).await.is_err() {
        assert!(
            Instant::now() < until,
            "a watch that has ended does not count"
        );
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}
