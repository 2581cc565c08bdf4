//! Frozen nodes: over two replicas of one folder and a restart, through the real gRPC stack.

use std::path::Path;
use std::time::Duration;

use kp_controlplane::app::{Bound, Config, Origin};
use kplane_desired_state::publish::{Publication, Published};
use kplane_model::{ServiceKey, ServicePort};
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_proto::v1::{
    self as pb, AgentMessage, Hello, ServerMessage, agent_message, server_message,
};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::support::{hello, open, synced};

const DEADLINE: Duration = Duration::from_secs(30);

/// Starts a replica on a folder without manifests: tests publish themselves.
async fn replica(folder: &Path, services: &[&str]) -> Bound {
    let config = Config {
        status_listen: Some("127.0.0.1:0".parse().unwrap()),
        ..Config::new(Origin::Manifests(folder.to_owned()))
    };
    let bound = synced(config).await;
    services.iter().for_each(|service| publish(&bound, service));
    bound
}

fn publish(bound: &Bound, service: &str) {
    let port = ServicePort::sample(ServiceKey::sample("shop", service));
    let published = Published::new(port.clone(), &[]);
    let publication = Publication::sample(vec![(port.key, Some(published))], vec![]);
    bound.hub().store().publish(publication);
}

async fn status(bound: &Bound) -> StatusServiceClient<Channel> {
    let address = format!("http://{}", bound.status_addr.unwrap());
    StatusServiceClient::connect(address).await.unwrap()
}

async fn order(
    bound: &Bound,
    thaw: bool,
    node: Option<&str>,
) -> Result<pb::FreezeResponse, Status> {
    let request = pb::FreezeRequest {
        thaw,
        all: node.is_none(),
        nodes: node.into_iter().map(str::to_owned).collect(),
        zone: String::new(),
        reason: "a drill".to_owned(),
    };
    let answer = status(bound).await.freeze(request).await?;
    Ok(answer.into_inner())
}

struct Agent {
    send: mpsc::Sender<AgentMessage>,
    receive: Streaming<ServerMessage>,
    epoch: u64,
}

impl Agent {
    async fn open(bound: &Bound, node: &str, resume: Option<pb::ResumeToken>) -> Self {
        let hello = Hello {
            instance: 1,
            resume,
            ..hello(node)
        };
        let (send, receive) = open(bound, hello).await;
        let mut agent = Self {
            send,
            receive,
            epoch: 0,
        };
        let Some(server_message::Kind::Welcome(welcome)) = agent.next().await else {
            panic!("no Welcome");
        };
        agent.epoch = welcome.epoch;
        agent
    }

    async fn next(&mut self) -> Option<server_message::Kind> {
        let message = timeout(DEADLINE, self.receive.message()).await;
        message.unwrap().unwrap()?.kind
    }

    /// Waits for a heartbeat that says whether the node is frozen.
    async fn reported(&mut self, frozen: bool) {
        loop {
            match self.next().await {
                Some(server_message::Kind::Heartbeat(beat)) if beat.frozen.is_some() == frozen => {
                    return;
                }
                Some(server_message::Kind::Update(update)) => panic!("{update:?}"),
                Some(_) => {}
                None => panic!("the stream has ended"),
            }
        }
    }

    /// Returns the next update: the Services that it contains, and the token afterwards.
    async fn update(&mut self) -> (usize, pb::ResumeToken) {
        let mut services = 0;
        loop {
            let Some(server_message::Kind::Update(update)) = self.next().await else {
                continue;
            };
            let objects = update.objects.iter();
            services += objects.filter(|object| is_service(object)).count();
            if let Some(end) = update.end {
                let token = pb::ResumeToken {
                    schema: 1,
                    epoch: self.epoch,
                    revision: end.revision,
                    digest: end.digest,
                };
                return (services, token);
            }
        }
    }

    async fn report(&self, revision: u64) {
        let report = pb::Report {
            epoch: self.epoch,
            received_revision: revision,
            applied_revision: revision,
            ..pb::Report::default()
        };
        let kind = Some(agent_message::Kind::Report(report));
        self.send.send(AgentMessage { kind }).await.unwrap();
    }
}

fn is_service(object: &[u8]) -> bool {
    let object: pb::Object = prost::Message::decode(object).unwrap();
    matches!(object.kind, Some(pb::object::Kind::Service(_)))
}

/// Waits until a node is in a state.
async fn state(bound: &Bound, node: &str, wanted: pb::NodeState) -> pb::NodeStatus {
    let request = pb::GetFleetRequest::default();
    let fleet = status(bound).await.watch_fleet(request).await.unwrap();
    let mut fleet = fleet.into_inner();
    let seen = async {
        loop {
            let answer = fleet.message().await.unwrap().unwrap();
            let found = answer.nodes.into_iter().find(|one| one.name == node);
            if let Some(found) = found.filter(|found| found.state() == wanted) {
                return found;
            }
        }
    };
    timeout(DEADLINE, seen).await.unwrap()
}

#[tokio::test]
async fn a_frozen_node_gets_nothing_from_any_replica_until_it_is_thawed() {
    let folder = tempfile::tempdir().unwrap();
    let first = replica(folder.path(), &["a"]).await;
    let mut frozen = Agent::open(&first, "n1", None).await;
    let mut other = Agent::open(&first, "n2", None).await;
    let (services, token) = frozen.update().await;
    assert_eq!(services, 1);
    other.update().await;
    frozen.report(token.revision).await;
    let answer = order(&first, false, Some("n1")).await.unwrap();
    assert_eq!((answer.nodes, answer.frozen), (vec!["n1".to_owned()], 1));
    frozen.reported(true).await;
    publish(&first, "b");
    assert_eq!(other.update().await.0, 1);

    let shown = state(&first, "n1", pb::NodeState::Frozen).await;
    assert!(shown.last_error.contains("a drill"), "{shown:?}");
    assert_eq!(shown.frozen.unwrap().reason, "a drill");
    let request = pb::ConvergenceRequest {
        namespace: "shop".to_owned(),
        name: "b".to_owned(),
        absent_ok: true,
    };
    let waiting = status(&first).await.watch_convergence(request).await;
    let seen = waiting.unwrap().into_inner().message().await.unwrap().unwrap();
    let lags = |one: &pb::Laggard| one.node == "n1" && one.reason.starts_with("frozen");
    assert!(seen.laggards.iter().any(lags), "{seen:?}");

    // A replica that starts now knows the order before it sends anything; so does a replica that restarts.
    let second = replica(folder.path(), &["a", "b"]).await;
    let mut moved = Agent::open(&second, "n1", Some(token.clone())).await;
    moved.reported(true).await;
    let mut fresh = Agent::open(&second, "n2", None).await;
    assert_eq!(fresh.update().await.0, 2);
    publish(&first, "c");
    publish(&second, "c");
    assert_eq!(fresh.update().await.0, 1);
    order(&first, true, Some("n1")).await.unwrap();
    frozen.reported(false).await;
    moved.reported(false).await;
    // Both streams get everything that they missed as one update: nothing was sent before.
    let (services, _) = frozen.update().await;
    assert_eq!(services, 2, "b and c");
    assert!(moved.update().await.0 >= 2, "b and c");
    state(&first, "n1", pb::NodeState::Syncing).await;
}

#[tokio::test]
async fn a_node_that_holds_nothing_gets_one_complete_state_although_it_is_frozen() {
    let folder = tempfile::tempdir().unwrap();
    let bound = replica(folder.path(), &["a"]).await;
    order(&bound, false, None).await.unwrap();
    let mut new = Agent::open(&bound, "new", None).await;
    assert_eq!(new.update().await.0, 1);
    for service in ["b", "c"] {
        publish(&bound, service);
    }
    order(&bound, true, None).await.unwrap();
    assert_eq!(new.update().await.0, 2);
}

#[tokio::test]
async fn an_order_that_cannot_be_kept_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let bound = replica(folder.path(), &["a"]).await;
    std::fs::create_dir(folder.path().join(".kplane-orders.new")).unwrap();
    let refused = order(&bound, false, None).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("--state-file"), "{refused}");
    let node = "n1".into();
    assert!(bound.hub().overrides().frozen(&node).is_none());
    let both = pb::FreezeRequest {
        all: true,
        nodes: vec!["n1".to_owned()],
        ..pb::FreezeRequest::default()
    };
    let refused = status(&bound).await.freeze(both).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}
