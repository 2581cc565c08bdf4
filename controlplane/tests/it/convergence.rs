//! `WatchConvergence` over real sockets, with agents that lag, fail, take back and disconnect.

use std::net::SocketAddr;

use kp_controlplane::app::{Bound, Config, Origin};
use kplane_desired_state::publish::Publication;
use kplane_http::client::get;
use kplane_model::ServiceKey;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_proto::v1::{self as pb, LagState, ServiceState, server_message};
use tokio::time::{Instant, timeout};
use tonic::{Code, Status, Streaming};

use crate::support::reporter::{Agent, web};
use crate::support::start::start;
use crate::support::{DEADLINE, hello};

/// Starts a control plane with an empty folder, which answers this many watches at a time.
async fn control_plane(watches: usize) -> (Bound, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let any = Some("127.0.0.1:0".parse().unwrap());
    let config = Config {
        agent_listen: any,
        status_listen: any,
        http_listen: any,
        identity: kplane_agents::identity::AuthenticatorConfig {
            watches,
            ..Default::default()
        },
        ..Config::new(Origin::Manifests(folder.path().to_owned()))
    };
    let bound = start(config).await;
    (bound, folder)
}

/// Publishes Service shop/web with this port number, or its deletion.
fn publish(bound: &Bound, port: Option<u16>) -> u64 {
    let publication = Publication::sample(vec![web(port)], vec![]);
    bound.hub().store().publish(publication)
}

impl Agent {
    /// Reads updates up to a revision.
    async fn reach(&mut self, revision: u64) {
        loop {
            let message = self.peer.next().await.unwrap();
            if let server_message::Kind::Update(update) = message
                && update.end.is_some_and(|end| end.revision >= revision)
            {
                return;
            }
        }
    }
}

/// A watch of one Service.
struct Watch(Streaming<pb::Convergence>);

impl Watch {
    async fn begin(status: SocketAddr, name: &str) -> Self {
        Self::try_begin(status, name).await.unwrap()
    }

    async fn try_begin(status: SocketAddr, name: &str) -> Result<Self, Status> {
        Self::ask(status, name, true).await
    }

    async fn ask(status: SocketAddr, name: &str, absent_ok: bool) -> Result<Self, Status> {
        let address = format!("http://{status}");
        let mut client = StatusServiceClient::connect(address).await.unwrap();
        let request = pb::ConvergenceRequest {
            namespace: "shop".to_owned(),
            name: name.to_owned(),
            absent_ok,
        };
        let stream = client.watch_convergence(request).await?;
        Ok(Self(stream.into_inner()))
    }

    async fn next(&mut self) -> pb::Convergence {
        let next = timeout(DEADLINE, self.0.message()).await;
        next.expect("an answer in time").unwrap().unwrap()
    }

    /// Waits until these numbers of nodes are programmed and verified.
    async fn until(&mut self, programmed: u64, verified: u64) -> pb::Convergence {
        let until = Instant::now() + DEADLINE;
        loop {
            let answer = self.next().await;
            if (answer.programmed, answer.verified) == (programmed, verified) {
                return answer;
            }
            assert!(Instant::now() < until, "{answer:?}");
        }
    }
}

fn lags(answer: &pb::Convergence) -> Vec<(&str, LagState)> {
    let laggards = answer.laggards.iter();
    laggards.map(|l| (l.node.as_str(), l.state())).collect()
}

/// Connects agents that hold and have read back this revision.
async fn agents<const N: usize>(bound: &Bound, names: [&str; N], revision: u64) -> [Agent; N] {
    let mut agents = Vec::new();
    for name in names {
        let mut agent = Agent::connect(bound, hello(name)).await;
        agent.reach(revision).await;
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
async fn nodes_that_lag_are_named_with_their_reasons() {
    let (bound, _folder) = control_plane(1).await;
    let old = publish(&bound, Some(80));
    let mut watch = Watch::begin(bound.status_addr.unwrap(), "web").await;
    let first = watch.next().await;
    assert_eq!((first.state(), first.nodes), (ServiceState::Served, 0));
    let [a, _b, c, d] = agents(&bound, ["a", "b", "c", "d"], old).await;
    let all = watch.until(4, 4).await;
    assert_eq!((all.nodes, lags(&all).len(), &all.durations), (4, 0, &None));

    let new = publish(&bound, Some(81));
    a.report(new, new).await;
    c.say(failed(new)).await;
    drop(d);
    let answer = loop {
        let answer = watch.until(1, 1).await;
        let states = lags(&answer);
        if states.contains(&("d", LagState::Disconnected))
            && states.contains(&("c", LagState::Failing))
        {
            break answer;
        }
    };
    assert_eq!(answer.wanted_revision, new);
    assert!(
        lags(&answer).contains(&("b", LagState::Behind)),
        "{answer:?}"
    );
    assert_eq!(answer.laggards[0].reason, "the port is taken");
    assert_eq!(answer.durations.unwrap().nodes, 1);
}

#[tokio::test]
async fn what_an_agent_takes_back_no_longer_counts() {
    let (bound, _folder) = control_plane(1).await;
    let old = publish(&bound, Some(80));
    let mut watch = Watch::begin(bound.status_addr.unwrap(), "web").await;
    let [agent] = agents(&bound, ["a"], old).await;
    watch.until(1, 1).await;
    let new = publish(&bound, Some(81));
    assert_eq!(lags(&watch.until(0, 0).await), [("a", LagState::Behind)]);
    agent.report(new, old).await;
    assert_eq!(
        lags(&watch.until(1, 0).await),
        [("a", LagState::Unverified)]
    );
    agent.report(new, new).await;
    watch.until(1, 1).await;
    agent.report(old, old).await;
    assert_eq!(lags(&watch.until(0, 0).await), [("a", LagState::Behind)]);
    agent.report(new, new).await;
    assert_eq!(
        watch.until(1, 1).await.durations.unwrap().nodes,
        1,
        "counted once"
    );
}

#[tokio::test]
async fn a_change_is_followed_into_every_kernel_and_a_deletion_out_of_it() {
    let (bound, _folder) = control_plane(1).await;
    let old = publish(&bound, Some(80));
    let mut watch = Watch::begin(bound.status_addr.unwrap(), "web").await;
    let [mut a, mut b, away] = agents(&bound, ["a", "b", "c"], old).await;
    watch.until(3, 3).await;
    drop(away);
    let new = publish(&bound, Some(81));
    for agent in [&mut a, &mut b] {
        agent.reach(new).await;
    }
    a.report(new, new).await;
    b.say(failed(new)).await;
    b.report(new, new).await;
    b.peer.is_answered().await;
    let c = Agent::connect(&bound, hello("c")).await;
    c.report(new, new).await;
    let all = watch.until(3, 3).await;
    assert_eq!((all.laggards.len(), all.laggards_omitted), (0, 0));
    let durations = all.durations.unwrap();
    assert_eq!(durations.nodes, 2, "b failed at that revision");
    assert!(durations.p50_ms <= durations.p99_ms && durations.p99_ms <= durations.max_ms);
    assert!(
        durations.max_ms <= all.now_ms - all.changed_at_ms,
        "{all:?}"
    );

    let gone = publish(&bound, None);
    let deleted = watch.until(0, 0).await;
    assert_eq!(deleted.state(), ServiceState::Deleted);
    for agent in [&a, &b, &c] {
        agent.report(gone, gone).await;
    }
    assert_eq!(watch.until(3, 3).await.state(), ServiceState::Deleted);

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
    let status = bound.status_addr.unwrap();
    let mut watch = Watch::begin(status, "api").await;
    let answer = watch.next().await;
    assert_eq!((answer.state(), answer.nodes), (ServiceState::Unknown, 0));
    assert!(answer.reason.contains("does not exist"), "{answer:?}");
    let refused = Watch::ask(status, "wbe", false).await;
    let refused = refused.err().map(|error| error.code());
    assert_eq!(refused, Some(Code::NotFound), "a misspelt name");
    publish(&bound, Some(80));
    assert!(Watch::ask(status, "web", false).await.is_ok());
    let agent = Agent::connect(&bound, hello("a")).await;
    agent.report(1, 1).await;
    watch.until(1, 1).await;
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
    let status = bound.status_addr.unwrap();
    let long = Watch::try_begin(status, &"n".repeat(254)).await;
    assert_eq!(long.err().unwrap().code(), Code::InvalidArgument);
    let mut watch = Watch::begin(status, "web").await;
    watch.next().await;
    let one_more = Watch::try_begin(status, "web").await;
    assert_eq!(one_more.err().unwrap().code(), Code::ResourceExhausted);
    drop(watch);
    let until = Instant::now() + DEADLINE;
    while Watch::try_begin(status, "web").await.is_err() {
        assert!(
            Instant::now() < until,
            "a watch that has ended does not count"
        );
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}
