//! One answer from many replicas: real control planes, each on a loopback address of its own, with agents spread over
//! them.

mod approval;
mod bad;
mod enforcement;
mod identity;
mod large;
mod prestop;
mod service;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use kp_controlplane::app::{Bound, Config, Protection};
use kplane_agents::peers::{self, PeerFlags};
use kplane_desired_state::publish::Publication;
use kplane_model::NodeFacts;
use kplane_proto::v1::recorder_service_client::RecorderServiceClient;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_proto::v1::{self as pb, AgentMessage, NodeState};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::Channel;

use crate::support::loopback::addresses;
use crate::support::reporter::{Agent, web};
use crate::support::start::start;
use crate::support::{DEADLINE, hello, status};

/// The time in which an answer must come, even if a replica is silent: a second, and some for a busy machine.
const SOON: Duration = Duration::from_millis(1_800);

/// Returns the flags that name these replicas.
fn flags(peers: &[SocketAddr]) -> peers::Config {
    let flags = PeerFlags {
        peers: peers.iter().map(|at| at.to_string().parse().unwrap()).collect(),
        ..PeerFlags::default()
    };
    flags.config(0)
}

/// A replica on an empty folder: tests publish themselves.
struct Replica {
    bound: Bound,
    _folder: tempfile::TempDir,
}

impl Replica {
    async fn start(at: SocketAddr, peers: peers::Config) -> Self {
        let protection = Protection::PlainText { exposed: false };
        Self::protected(at, peers, protection).await
    }

    async fn protected(at: SocketAddr, peers: peers::Config, protection: Protection) -> Self {
        Self::configured(at, peers, |config| config.protection = protection).await
    }

    /// Starts a replica in plain text, with a further change of its configuration.
    async fn configured(
        at: SocketAddr,
        peers: peers::Config,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let started = start(|config| {
            config.status_listen = Some(at);
            config.protection = Protection::PlainText { exposed: false };
            config.peers = peers;
            change(config);
        });
        let (bound, _folder) = started.await;
        Self { bound, _folder }
    }

    async fn status(&self) -> StatusServiceClient<Channel> {
        status(&self.bound).await
    }

    /// Returns the fleet from all its pages, and the time that the first page took.
    async fn fleet(&self, page_size: u32) -> (pb::Fleet, Duration) {
        let mut status = self.status().await;
        let mut request = pb::GetFleetRequest {
            page_size,
            ..Default::default()
        };
        let started = Instant::now();
        let mut fleet = status.get_fleet(request.clone()).await.unwrap().into_inner();
        let took = started.elapsed();
        while !fleet.next_page_token.is_empty() {
            request.page_token = std::mem::take(&mut fleet.next_page_token);
            let page = status.get_fleet(request.clone()).await.unwrap().into_inner();
            assert!(page.control_plane.is_none());
            fleet.nodes.extend(page.nodes);
            fleet.next_page_token = page.next_page_token;
        }
        (fleet, took)
    }

    /// Waits until the fleet is as wanted.
    async fn fleet_until(&self, wanted: impl Fn(&pb::Fleet) -> bool) -> pb::Fleet {
        let until = Instant::now() + DEADLINE;
        loop {
            let (fleet, _) = self.fleet(0).await;
            if wanted(&fleet) {
                return fleet;
            }
            assert!(Instant::now() < until, "{fleet:#?}");
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Asks until an answer is as wanted and came in time: on a busy machine, one may be late.
    async fn fleet_soon(&self, wanted: impl Fn(&pb::Fleet) -> bool) -> pb::Fleet {
        let until = Instant::now() + DEADLINE;
        loop {
            let (fleet, took) = self.fleet(0).await;
            if took < SOON && wanted(&fleet) {
                return fleet;
            }
            assert!(Instant::now() < until, "{took:?}: {fleet:#?}");
        }
    }

    /// Publishes Service shop/web with this port number, or its deletion, and these Nodes.
    fn publish(&self, port: Option<u16>, nodes: &[&str]) -> u64 {
        let nodes = nodes.iter().map(|name| NodeFacts::sample(name));
        let publication = Publication::sample(vec![web(port)], nodes.collect());
        self.bound.hub().store().publish(publication)
    }

    /// Connects an agent that has applied and read back this revision.
    async fn agent(&self, node: &str, applied: u64) -> Agent {
        let hello = pb::Hello {
            instance: 1,
            ..hello(node)
        };
        let mut agent = Agent::connect(&self.bound, hello).await;
        agent.holds(applied).await;
        agent.peer.is_answered().await;
        agent
    }
}

impl Agent {
    /// Reports that the kernel holds a revision, and was read back.
    async fn holds(&self, revision: u64) {
        self.report(revision, revision).await;
    }
}

/// Starts three replicas that know each other, and publishes Service shop/web with Nodes a, b and c.
async fn three() -> [Replica; 3] {
    let all = addresses::<3>();
    let mut replicas = Vec::new();
    for at in all {
        let replica = Replica::start(at, flags(&all)).await;
        replica.publish(Some(80), &["a", "b", "c"]);
        replicas.push(replica);
    }
    replicas.try_into().ok().unwrap()
}

/// Returns the state of each node.
fn states(fleet: &pb::Fleet) -> BTreeMap<&str, NodeState> {
    let states: BTreeMap<_, _> =
        fleet.nodes.iter().map(|node| (node.name.as_str(), node.state())).collect();
    assert_eq!(states.len(), fleet.nodes.len(), "each node once");
    states
}

fn address(replica: &Replica) -> String {
    replica.bound.status_addr.unwrap().to_string()
}

#[tokio::test]
async fn any_replica_answers_for_the_agents_of_all() {
    let replicas = three().await;
    let mut agents = Vec::new();
    for (replica, node) in replicas.iter().zip(["a", "b", "c"]) {
        let revision = replica.bound.hub().store().head().borrow().revision;
        agents.push(replica.agent(node, revision).await);
    }
    for (asked, own) in replicas.iter().zip(["a", "b", "c"]) {
        let in_sync = |fleet: &pb::Fleet| {
            states(fleet).values().filter(|s| **s == NodeState::InSync).count() == 3
        };
        let fleet = asked.fleet_until(in_sync).await;
        assert_eq!((fleet.replicas, fleet.missing_replicas.len()), (3, 0));
        for (node, serving) in fleet.nodes.iter().zip(&replicas) {
            let epoch = serving.bound.hub().store().epoch();
            let (replica, wanted) =
                if node.name == own { (String::new(), 0) } else { (address(serving), epoch) };
            assert_eq!((&node.replica, node.epoch), (&replica, wanted));
        }
        let (pages, _) = asked.fleet(1).await;
        let names = pages.nodes.iter().map(|node| node.name.as_str());
        assert_eq!(names.collect::<Vec<_>>(), ["a", "b", "c"]);
    }
}

#[tokio::test]
async fn an_agent_that_moves_counts_once_where_its_connection_is_newest() {
    let replicas = three().await;
    let [first, second, third] = &replicas;
    let before = first.agent("a", 1).await;
    sleep(Duration::from_millis(5)).await;
    // The first connection is half open for a while.
    let after = second.agent("a", 1).await;
    let is_at = |fleet: &pb::Fleet, replica: &str| {
        assert_eq!(fleet.nodes.len(), 3);
        fleet.nodes[0].replica == replica
    };
    for asked in [first, third] {
        asked.fleet_until(|fleet| is_at(fleet, &address(second))).await;
    }
    second.fleet_until(|fleet| is_at(fleet, "")).await;
    drop(before);
    third.fleet_until(|fleet| is_at(fleet, &address(second))).await;
    // It returns. The second replica still knows that it was there.
    let _back = first.agent("a", 1).await;
    drop(after);
    let fleet = third.fleet_until(|fleet| is_at(fleet, &address(first))).await;
    assert_ne!(states(&fleet)["a"], NodeState::Disconnected);
    assert_eq!(states(&fleet)["b"], NodeState::NoAgent, "{fleet:?}");
}

#[tokio::test]
async fn a_replica_that_stops_is_named_and_its_agents_are_unknown() {
    let [first, second, third] = three().await;
    let _a = first.agent("a", 1).await;
    let gone = third.agent("c", 1).await;
    let name = address(&third);
    first.fleet_until(|fleet| fleet.replicas == 3).await;
    third.bound.shutdown_token().cancel();
    timeout(DEADLINE, third.bound.wait()).await.unwrap().unwrap();
    drop(gone);
    for asked in [&first, &second] {
        let fleet = asked.fleet_soon(|fleet| fleet.replicas == 2).await;
        let [missing] = &*fleet.missing_replicas else {
            panic!("{fleet:?}");
        };
        assert_eq!(missing.address, name);
        assert!(missing.reason.contains("cannot connect"), "{missing:?}");
        let states = states(&fleet);
        assert_ne!(states["a"], NodeState::Unknown);
        assert_eq!([states["b"], states["c"]], [NodeState::Unknown; 2]);
    }
}

#[tokio::test]
async fn a_replica_that_is_silent_costs_a_second_and_is_named() {
    let [first, silent] = addresses::<2>();
    // The kernel accepts connections, and nobody answers.
    let _listener = TcpListener::bind(silent).await.unwrap();
    let replica = Replica::start(first, flags(&[first, silent])).await;
    let (_, took) = replica.fleet(0).await;
    assert!(took > Duration::from_millis(900), "{took:?}");
    let names_one = |fleet: &pb::Fleet| fleet.missing_replicas.len() == 1;
    let fleet = replica.fleet_soon(names_one).await;
    assert_eq!(fleet.missing_replicas[0].address, silent.to_string());
    assert!(fleet.missing_replicas[0].reason.contains("within 1 s"));
    let until = Instant::now() + DEADLINE;
    let first = loop {
        let mut watch = replica.status().await;
        let started = Instant::now();
        let watch = watch.watch_fleet(pb::GetFleetRequest::default()).await;
        let first = watch.unwrap().into_inner().message().await;
        if started.elapsed() < SOON {
            break first.unwrap().unwrap();
        }
        assert!(Instant::now() < until, "{:?}", started.elapsed());
    };
    assert_eq!((first.missing_replicas.len(), first.replicas), (1, 1));
}

/// A watch shows an agent of another replica soon after it connects, and after it leaves.
#[tokio::test]
async fn a_watch_follows_the_agents_of_all_replicas() {
    let [first, second, _third] = three().await;
    let mut status = first.status().await;
    let mut watch = status.watch_fleet(pb::GetFleetRequest::default()).await.unwrap().into_inner();
    let mut until = async |state| {
        loop {
            let held_state = timeout(DEADLINE, watch.message()).await.unwrap().unwrap().unwrap();
            assert!(held_state.missing_replicas.is_empty(), "{held_state:?}");
            if states(&held_state)["b"] == state {
                return;
            }
        }
    };
    until(NodeState::NoAgent).await;
    let agent = second.agent("b", u64::MAX).await;
    until(NodeState::InSync).await;
    drop(agent);
    until(NodeState::Disconnected).await;
}

/// Hooks are answered, events recorded and revisions counted by each replica for itself.
#[tokio::test]
async fn what_one_replica_answers_alone_says_so() {
    let unasked = async |replica: &Replica| {
        let mut status = replica.status().await;
        let address = format!("http://{}", replica.bound.status_addr.unwrap());
        let mut recorder = RecorderServiceClient::connect(address).await.unwrap();
        let departures = pb::DrainStatusRequest {};
        let departures = status.get_drain_status(departures).await.unwrap();
        let history = pb::GetHistoryRequest::default();
        let history = status.get_history(history).await.unwrap();
        let events = pb::NoticedRequest::default();
        let events = recorder.list_noticed(events).await.unwrap();
        [
            departures.into_inner().unasked_replicas,
            history.into_inner().unasked_replicas,
            events.into_inner().unasked_replicas,
        ]
    };
    let replicas = three().await;
    assert_eq!(unasked(&replicas[0]).await, [2; 3]);
    let [at] = addresses::<1>();
    let alone = Replica::start(at, peers::Config::default()).await;
    assert_eq!(unasked(&alone).await, [0; 3]);
    let (fleet, _) = alone.fleet(0).await;
    assert_eq!((fleet.replicas, fleet.missing_replicas.len()), (0, 0));
}
