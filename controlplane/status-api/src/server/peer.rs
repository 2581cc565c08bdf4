//! `PeerService`: what this replica knows of its own agents, for other replicas. It asks no other replica.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::SystemTime;

use futures_util::StreamExt as _;
use kplane_agents::failure_detector;
use kplane_agents::hub::Hub;
use kplane_agents::identity::Right;
use kplane_agents::node_query::Reply;
use kplane_desired_state::publish::Followed;
use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use kplane_proto::v1::collected::Kind;
use kplane_proto::v1::peer_service_server::PeerService;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::convergence::durations;
use super::pages::Snapshot;
use super::service_on_node::ServiceOnNode;
use super::views::node_status;
use super::{Answer, Outbox, approval, node_query, recorder, servers};

/// Maximum number of answers that are given at once.
const ANSWERS: usize = 64;
/// Maximum number of Services in a question.
const MAX_SERVICES: usize = 1_024;
/// Longest name of an object, in bytes.
const MAX_NAME: usize = 253;
/// Number of messages that are ready before they are sent.
const AHEAD: usize = 64;

/// The server of the questions of other replicas.
#[derive(Clone, Debug)]
pub struct PeerServer {
    hub: Arc<Hub>,
    answers: Arc<Semaphore>,
}

type Streamed<T> = Response<ReceiverStream<Result<T, Status>>>;

impl PeerServer {
    /// Creates a server from a hub.
    pub fn new(hub: Arc<Hub>) -> Self {
        Self {
            hub,
            answers: Arc::new(Semaphore::new(ANSWERS)),
        }
    }

    fn begin(&self) -> Result<OwnedSemaphorePermit, Status> {
        let permit = Arc::clone(&self.answers).try_acquire_owned();
        permit.map_err(|_| Status::resource_exhausted("too many replicas ask at once"))
    }

    /// Begins an answer of many messages.
    fn stream<T: Send + 'static, F: Future<Output = ()> + Send + 'static>(
        &self,
        permit: OwnedSemaphorePermit,
        tell: impl FnOnce(Arc<Hub>, Outbox<T>) -> F,
    ) -> Streamed<T> {
        let (outbox, stream) = mpsc::channel(AHEAD);
        let shutdown = self.hub.shutdown().clone();
        let announcing = tell(Arc::clone(&self.hub), outbox.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = announcing => {}
                () = outbox.closed() => {}
                () = shutdown.cancelled() => {}
            }
            drop(permit);
        });
        Response::new(ReceiverStream::new(stream))
    }
}

#[tonic::async_trait]
impl PeerService for PeerServer {
    type CollectStream = ReceiverStream<Result<pb::Collected, Status>>;

    async fn collect(&self, request: Request<pb::CollectRequest>) -> Answer<Self::CollectStream> {
        let permit = self.begin()?;
        let request = request.into_inner();
        let services = names(&request.services)?;
        Ok(self.stream(permit, |hub, outbox| async move {
            tell(&hub, &request, services, &outbox).await;
        }))
    }

    async fn approve(&self, request: Request<pb::ApproveRequest>) -> Answer<pb::ApproveResponse> {
        let nobody = BTreeSet::new();
        let (response, _) = approval::approve(&self.hub, request, &Right::PeerAct, &nobody).await?;
        Ok(Response::new(response))
    }

    async fn recorded(
        &self,
        request: Request<pb::ServiceHistoryRequest>,
    ) -> Answer<pb::ServiceHistory> {
        let _permit = self.begin()?;
        let answer = recorder::of_own_agents(&self.hub, request.get_ref());
        Ok(Response::new(answer))
    }

    type InspectStream = ReceiverStream<Result<pb::InspectedNode, Status>>;

    async fn inspect(
        &self,
        request: Request<pb::InspectServiceRequest>,
    ) -> Answer<Self::InspectStream> {
        let permit = self.begin()?;
        let request = request.into_inner();
        let service = names(request.service.as_slice())?
            .pop()
            .ok_or_else(|| Status::invalid_argument("no Service is named"))?;
        let nodes = match request.destination {
            Some(_) => vec![request.node.as_str().into()],
            None => self.hub.agents().with_servers(),
        };
        let question = Arc::new(pb::Inspect {
            destination: request.destination,
            attempts: request.attempts,
            ..node_query::about(&service)
        });
        Ok(self.stream(permit, |hub, outbox| async move {
            let nodes = nodes.into_iter().map(|node| (node, Arc::clone(&question)));
            let answers =
                kplane_agents::node_query::ask(hub.agents(), nodes.collect(), node_query::SERVICE);
            let mut answers = std::pin::pin!(answers);
            while let Some(heard) = answers.next().await {
                let answer = inspected(&question, &service, heard);
                if outbox.send(answer).await.is_err() {
                    return;
                }
            }
        }))
    }

    async fn suspect(&self, request: Request<pb::SuspectRequest>) -> Answer<pb::SuspectResponse> {
        let _permit = self.begin()?;
        let alive = failure_detector::receive(&self.hub, request.get_ref());
        Ok(Response::new(pb::SuspectResponse { alive }))
    }

    type AskStream = ReceiverStream<Result<pb::AskedNode, Status>>;

    async fn ask(&self, request: Request<pb::AskRequest>) -> Answer<Self::AskStream> {
        let permit = self.begin()?;
        let request = request.into_inner();
        Ok(self.stream(permit, |hub, outbox| async move {
            node_query::answer_replica(hub.agents(), request, &outbox).await;
        }))
    }
}

/// Returns the answer of an agent about virtual servers, or about a destination.
fn inspected(
    question: &pb::Inspect,
    service: &ServiceName,
    heard: Reply,
) -> Result<pb::InspectedNode, Status> {
    let node = heard.node.to_string();
    if question.destination.is_none() {
        return Ok(pb::InspectedNode {
            node,
            servers: Some(servers::servers(heard, service)),
            ..pb::InspectedNode::default()
        });
    }
    let answer = heard.outcome.map_err(Status::unavailable)?;
    Ok(pb::InspectedNode {
        node,
        kernel: answer.kernel,
        attempts: answer.attempts,
        ..pb::InspectedNode::default()
    })
}

/// Reads the names of Services.
fn names(services: &[pb::ServiceRef]) -> Result<Vec<ServiceName>, Status> {
    let longest = services.iter().map(|of| of.namespace.len().max(of.name.len()));
    if services.len() > MAX_SERVICES || longest.max().is_some_and(|longest| longest > MAX_NAME) {
        return Err(Status::invalid_argument(
            "too many Services, or names that are too long",
        ));
    }
    Ok(services.iter().map(|of| ServiceName::new(&of.namespace, &of.name)).collect())
}

/// Sends an answer.
async fn tell(
    hub: &Hub,
    request: &pb::CollectRequest,
    services: Vec<ServiceName>,
    outbox: &Outbox<pb::Collected>,
) {
    let state = state(hub);
    let services: Vec<_> = services
        .into_iter()
        .map(|name| {
            let mut followed = Followed::new(name);
            hub.store().follow(&mut followed);
            followed
        })
        .collect();
    let unchanged = state == request.seen;
    let replica = replica(hub, &services, state, unchanged);
    let send = async |kind| outbox.send(Ok(pb::Collected { kind: Some(kind) })).await.is_ok();
    if !send(Kind::Replica(replica)).await || unchanged || request.from == hub.store().epoch() {
        return;
    }
    let snapshot = Snapshot::now(hub);
    for (name, node) in snapshot.nodes() {
        let Some(record) = node.record.as_deref() else {
            continue;
        };
        let facts = node.facts.as_deref();
        let status = request.statuses.then(|| {
            let stranger = snapshot.stranger(facts);
            node_status(hub, name, Some(record), facts, stranger)
        });
        let standings = services
            .iter()
            .map(|of| ServiceOnNode::here(hub, of, name, Some(record)).to_wire());
        let age = record.since.elapsed();
        let agent = pb::PeerAgent {
            node: name.to_string(),
            connected: record.connected,
            for_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
            status,
            services: standings.collect(),
        };
        if !send(Kind::Agent(agent)).await {
            return;
        }
    }
    send(Kind::End(pb::PeerEnd {})).await;
}

/// Returns a number that changes with everything in an answer. Time alone does not change it.
fn state(hub: &Hub) -> u64 {
    let mut hasher = DefaultHasher::new();
    let head = *hub.store().head().borrow();
    let agents = *hub.agents().changes().borrow();
    (head.revision, head.synced, head.trust, agents).hash(&mut hasher);
    hasher.finish().max(1)
}

fn replica(hub: &Hub, services: &[Followed], state: u64, unchanged: bool) -> pb::PeerReplica {
    let agents = if unchanged {
        Vec::new()
    } else {
        hub.agents().records().into_keys().collect()
    };
    let published = services.iter().map(|followed| {
        let wanted = agents.iter().map(|node| hub.store().wanted_of_service(node, followed));
        pb::PublishedService {
            digest: hub.store().digest_of_service(followed).to_bytes().to_vec(),
            durations: durations(hub, wanted.max().unwrap_or(0)).map(|all| all.to_wire()),
        }
    });
    pb::PeerReplica {
        epoch: hub.store().epoch(),
        now_ms: super::millis(SystemTime::now()),
        services: published.collect(),
        state,
        unchanged,
        enforcement: hub.store().enforcement().into(),
    }
}
