//! `StatusService`: the fleet's status, for operators and tools.

mod fates;

use std::sync::Arc;

use kplane_agents::fleet::label;
use kplane_agents::hub::Hub;
use kplane_agents::identity::{Caller, Right, spawn_watch};
use kplane_agents::peers::{Collected, Peers};
use kplane_desired_state::publish::MAX_POINTS;
use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use kplane_proto::v1::status_service_server::StatusService;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::node_query::Agents;
use super::others::Others;
use super::pages::Snapshot;
use super::request::{MAX_NAME, WATCH_PAUSE, WATCH_REFRESH, bounded_names, charge, cost, detail};
use super::{
    Answer, Outbox, affinity, approval, broken, convergence, description, drops, flows, freeze,
    graph, neighbours, policies, probe, proxied, servers, services, views,
};

/// The server of the status API.
#[derive(Clone, Debug)]
pub struct StatusServer {
    hub: Arc<Hub>,
    /// The other replicas; `None` = this one answers alone.
    peers: Option<Arc<Peers>>,
    followers: drops::Audited,
}

impl StatusServer {
    /// Creates a server from a hub.
    pub fn new(hub: Arc<Hub>) -> Self {
        Self {
            hub,
            peers: None,
            followers: drops::Audited::default(),
        }
    }

    /// Asks other replicas as well.
    #[must_use]
    pub fn with(self, peers: Option<Arc<Peers>>) -> Self {
        Self { peers, ..self }
    }

    /// Returns what other replicas know of a Service.
    async fn others(&self, name: &ServiceName) -> Collected {
        match &self.peers {
            Some(peers) => peers.service(name).await,
            None => Collected::default(),
        }
    }

    fn agents<'a>(&'a self, others: &'a Collected) -> Agents<'a> {
        Agents {
            hub: &self.hub,
            peers: self.peers.as_deref(),
            others,
        }
    }

    /// Returns the cost of a question to the agents of all nodes.
    fn asking_cost(&self) -> u32 {
        asking_cost(self.hub.agents().count(), self.peers.as_deref())
    }

    /// Writes what an audited request does, unless its caller has just done it: who watches asks every few seconds.
    fn audit_news<T>(&self, request: &Request<T>, right: &Right, follower: u64, text: &str) {
        let caller = request.extensions().get::<Caller>();
        let who = caller.and_then(Caller::name).unwrap_or_default();
        if self.followers.is_news(&format!("{follower} {text} {who}")) {
            audit(request, right, text);
        }
    }

    /// Returns the cost of an answer about all nodes.
    fn nodes_cost(&self) -> u32 {
        nodes_cost(self.hub.agents().count(), self.peers.as_deref())
    }

    /// Returns the cost of an answer about all nodes and all Services.
    fn findings_cost(&self) -> u32 {
        let services = self.hub.index().summary().borrow().totals.services;
        self.nodes_cost().saturating_add(cost(services))
    }

    /// Returns what other replicas know of nodes.
    async fn nodes_elsewhere(&self) -> Arc<Collected> {
        match &self.peers {
            Some(peers) => peers.nodes().await,
            None => Arc::default(),
        }
    }
}

#[tonic::async_trait]
impl StatusService for StatusServer {
    type WatchFleetStream = ReceiverStream<Result<pb::Fleet, Status>>;

    async fn get_fleet(&self, request: Request<pb::GetFleetRequest>) -> Answer<pb::Fleet> {
        charge(&request, self.nodes_cost())?;
        let request = request.into_inner();
        let others = match &self.peers {
            Some(peers) if !request.page_token.is_empty() => peers.latest_nodes().await,
            _ => self.nodes_elsewhere().await,
        };
        let snapshot = Snapshot::with(&self.hub, &others);
        let page = match request.node.as_str() {
            "" => snapshot.only_those(&request).page(&request.page_token, nodes_of(&request)),
            node => snapshot.only(node),
        };
        Ok(Response::new(page))
    }

    async fn watch_fleet(
        &self,
        request: Request<pb::GetFleetRequest>,
    ) -> Answer<Self::WatchFleetStream> {
        charge(&request, self.nodes_cost())?;
        let caller = request.extensions().get::<Caller>().cloned();
        let (outbox, stream) = mpsc::channel(1);
        let request = request.into_inner();
        let last = outbox.clone();
        let watch = watch(Arc::clone(&self.hub), request, self.peers.clone(), outbox);
        spawn_watch(caller, last, watch)?;
        let mut answer = Response::new(ReceiverStream::new(stream));
        // Pictures follow each other too fast.
        answer.disable_compression();
        Ok(answer)
    }

    async fn list_services(
        &self,
        request: Request<pb::ListServicesRequest>,
    ) -> Answer<pb::ListServicesResponse> {
        let of = request.get_ref();
        let others = if of.findings || of.bad {
            charge(&request, self.findings_cost())?;
            Some(self.nodes_elsewhere().await)
        } else {
            charge(&request, services::list_cost(self.hub.index(), of))?;
            None
        };
        let page = services::list(&self.hub, others.as_deref(), request.into_inner()).await?;
        Ok(Response::new(page))
    }

    type WatchServicesStream = ReceiverStream<Result<pb::ServiceChanges, Status>>;

    async fn watch_services(
        &self,
        request: Request<pb::WatchServicesRequest>,
    ) -> Answer<Self::WatchServicesStream> {
        let services = self.hub.index().summary().borrow().totals.services;
        charge(&request, cost(services))?;
        let caller = request.extensions().get::<Caller>().cloned();
        let (outbox, stream) = mpsc::channel(1);
        let last = outbox.clone();
        let watch = services::watch(Arc::clone(&self.hub), request.into_inner(), outbox);
        spawn_watch(caller, last, watch)?;
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn describe_service(
        &self,
        request: Request<pb::DescribeServiceRequest>,
    ) -> Answer<pb::ServiceDescription> {
        // Agents with virtual servers are asked.
        let asked = self.hub.agents().with_servers().len();
        charge(&request, cost(asked).saturating_mul(10))?;
        let request = request.into_inner();
        let name = ServiceName::new(&request.namespace, &request.name);
        let detail = detail(self.hub.index(), &name).await?;
        let others = self.others(&name).await;
        let agents = self.agents(&others);
        let (servers, isolated) = tokio::join!(
            servers::of_all(agents, &name),
            policies::isolated(agents, &name, &detail)
        );
        let reported = (servers, isolated?);
        let description = description::description(&self.hub, &name, &detail, reported, &others);
        Ok(Response::new(description))
    }

    async fn explain(&self, request: Request<pb::ExplainRequest>) -> Answer<pb::Explanation> {
        charge(&request, self.nodes_cost())?;
        let reported = self.fate_of(request, false).await?;
        Ok(Response::new(reported.explanation.unwrap_or_default()))
    }

    async fn try_service(&self, request: Request<pb::ExplainRequest>) -> Answer<pb::TryResponse> {
        charge(
            &request,
            self.nodes_cost().saturating_add(COST_OF_CONNECTIONS),
        )?;
        let to = request.get_ref();
        let service = named(&to.namespace, &to.name);
        let without = match to.sender_pod.as_str() {
            "" => "the only node".to_owned(),
            pod => format!("the node of Pod {}", label(pod, 2 * MAX_NAME)),
        };
        let node = node_named(&to.node, &without);
        let text = format!("tried connections to {service} from {node}");
        audit(&request, &Right::Probe, &text);
        let reported = self.fate_of(request, true).await?;
        Ok(Response::new(reported))
    }

    type WatchConvergenceStream = ReceiverStream<Result<pb::Convergence, Status>>;

    async fn watch_convergence(
        &self,
        request: Request<pb::ConvergenceRequest>,
    ) -> Answer<Self::WatchConvergenceStream> {
        charge(&request, self.nodes_cost())?;
        let caller = request.extensions().get::<Caller>().cloned();
        let request = request.into_inner();
        bounded_names(&[&request.namespace, &request.name])?;
        let name = ServiceName::new(&request.namespace, &request.name);
        if !request.absent_ok {
            convergence::known(&self.hub, &name)?;
        }
        let (outbox, stream) = mpsc::channel(1);
        let last = outbox.clone();
        let watch = convergence::watch(Arc::clone(&self.hub), name, self.peers.clone(), outbox);
        spawn_watch(caller, last, watch)?;
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn approve(&self, request: Request<pb::ApproveRequest>) -> Answer<pb::ApproveResponse> {
        let approved = approval::approve_for_all(&self.hub, self.peers.as_ref(), request);
        Ok(Response::new(approved.await?))
    }

    async fn freeze(&self, request: Request<pb::FreezeRequest>) -> Answer<pb::FreezeResponse> {
        charge(&request, self.nodes_cost())?;
        let caller = request.extensions().get::<Caller>().cloned();
        let answer = freeze::freeze(&self.hub, caller.as_ref(), request.into_inner());
        Ok(Response::new(answer.await?))
    }

    async fn get_history(&self, request: Request<pb::GetHistoryRequest>) -> Answer<pb::History> {
        charge(&request, cost(MAX_POINTS))?;
        Ok(Response::new(pb::History {
            unasked_replicas: Peers::unasked(self.peers.as_deref()).await,
            ..views::history(self.hub.store())
        }))
    }

    async fn get_drain_status(
        &self,
        request: Request<pb::DrainStatusRequest>,
    ) -> Answer<pb::DrainStatus> {
        charge(&request, 1)?;
        let latest = self.hub.streams().departures.latest().into_iter().rev();
        let departures = latest.map(|(_, one)| pb::Departure::clone(&one)).collect();
        Ok(Response::new(pb::DrainStatus {
            departures,
            unasked_replicas: Peers::unasked(self.peers.as_deref()).await,
        }))
    }

    async fn get_affinity(
        &self,
        request: Request<pb::AffinityRequest>,
    ) -> Answer<pb::AffinityAnswer> {
        charge(&request, self.asking_cost())?;
        let of = request.get_ref();
        let service = named(&of.namespace, &of.name);
        let node = node_named(&of.node, "all nodes");
        let text = format!("read the clients of {service} on {node}");
        audit(&request, &Right::ReadClients, &text);
        let answer = affinity::ask(&self.hub, self.peers.as_deref(), of);
        Ok(Response::new(answer.await?))
    }

    async fn get_flows(&self, request: Request<pb::FlowsRequest>) -> Answer<pb::FlowsAnswer> {
        charge(&request, self.asking_cost())?;
        let of = request.get_ref();
        let service = named(&of.namespace, &of.name);
        let node = node_named(&of.node, "all nodes");
        let ends = flows::ends(of);
        let text = format!("read who is connected to {service} on {node}{ends}");
        self.audit_news(&request, &Right::ReadClients, 0, &text);
        let answer = flows::ask(&self.hub, self.peers.as_deref(), of);
        Ok(Response::new(answer.await?))
    }

    async fn get_graph(&self, request: Request<pb::GraphRequest>) -> Answer<pb::GraphAnswer> {
        charge(&request, self.asking_cost())?;
        let text = graph::audited(request.get_ref());
        self.audit_news(&request, &Right::ReadClients, 0, &text);
        let answer = graph::ask(&self.hub, self.peers.as_deref(), request.get_ref());
        Ok(Response::new(answer.await?))
    }

    async fn get_proxied(&self, request: Request<pb::ProxiedRequest>) -> Answer<pb::ProxiedAnswer> {
        charge(&request, self.asking_cost())?;
        let answer = proxied::ask(&self.hub, self.peers.as_deref(), request.get_ref());
        Ok(Response::new(answer.await?))
    }

    async fn probe_nodes(&self, request: Request<pb::ProbeRequest>) -> Answer<pb::ProbeReport> {
        charge(&request, self.asking_cost())?;
        let of = request.get_ref();
        if of.neighbours {
            audit(&request, &Right::Probe, "probed neighbours of nodes");
            let report = neighbours::probe(&self.hub, self.peers.as_deref());
            return Ok(Response::new(report.await));
        }
        let service = match of.name.as_str() {
            "" => "the default Service".to_owned(),
            name => named(&of.namespace, name),
        };
        let node = node_named(&of.node, "all nodes");
        let text = format!("probed {service} from {node}");
        audit(&request, &Right::Probe, &text);
        let report = probe::probe(&self.hub, self.peers.as_deref(), request.get_ref());
        Ok(Response::new(report.await?))
    }

    async fn list_findings(
        &self,
        request: Request<pb::ListFindingsRequest>,
    ) -> Answer<pb::FindingsAnswer> {
        charge(&request, self.findings_cost())?;
        let others = self.nodes_elsewhere().await;
        let answer = broken::answer(&self.hub, &others, request.into_inner()).await?;
        Ok(Response::new(answer))
    }

    async fn list_policies(
        &self,
        request: Request<pb::ListPoliciesRequest>,
    ) -> Answer<pb::ListPoliciesResponse> {
        // Each page counts the Pods of all policies.
        let policies = self.hub.index().summary().borrow().totals.policies;
        charge(&request, cost(policies))?;
        let page = policies::list(&self.hub, request.into_inner()).await?;
        Ok(Response::new(page))
    }

    async fn describe_policy(
        &self,
        request: Request<pb::DescribePolicyRequest>,
    ) -> Answer<pb::PolicyDescription> {
        let pods = self.hub.index().summary().borrow().totals.policy_pods;
        charge(&request, cost(pods))?;
        let policy = policies::describe(&self.hub, request.into_inner()).await?;
        Ok(Response::new(policy))
    }

    async fn judge_connection(
        &self,
        request: Request<pb::JudgeConnectionRequest>,
    ) -> Answer<pb::ConnectionJudgement> {
        let pods = self.hub.index().summary().borrow().totals.policy_pods;
        charge(&request, cost(pods))?;
        let judgement = policies::judge(&self.hub, self.peers.as_deref(), request.get_ref());
        Ok(Response::new(judgement.await?))
    }

    async fn get_drops(&self, request: Request<pb::DropsRequest>) -> Answer<pb::DropsAnswer> {
        charge(&request, self.nodes_cost())?;
        let request = pb::DropsRequest {
            follower: 0,
            ..request.into_inner()
        };
        let answer = drops::ask(&self.hub, self.peers.as_deref(), request).await?;
        Ok(Response::new(answer))
    }

    async fn follow_drops(&self, request: Request<pb::DropsRequest>) -> Answer<pb::DropsAnswer> {
        charge(&request, self.nodes_cost())?;
        let of = request.get_ref();
        if of.follower == 0 {
            return Err(Status::invalid_argument("the follower has no number"));
        }
        let pods = match (of.namespace.as_str(), of.pod.as_str()) {
            ("", _) => "all Pods".to_owned(),
            (namespace, "") => format!("Pods of {}", label(namespace, MAX_NAME)),
            (namespace, pod) => named(namespace, pod),
        };
        let node = node_named(&of.node, "all nodes");
        let text = format!("sampled packets that policies of {pods} deny on {node}");
        self.audit_news(&request, &Right::Sample, of.follower, &text);
        let answer = drops::ask(&self.hub, self.peers.as_deref(), request.into_inner());
        Ok(Response::new(answer.await?))
    }
}

/// Writes down who lets agents act, or learns who uses a Service. Requests in the same process have no caller.
fn audit<T>(request: &Request<T>, right: &Right, text: &str) {
    if let Some(caller) = request.extensions().get::<Caller>() {
        caller.did(right, text);
    }
}

/// Returns a Service as a caller has named it, for the audit log.
fn named(namespace: &str, name: &str) -> String {
    format!("{}/{}", label(namespace, MAX_NAME), label(name, MAX_NAME))
}

/// Returns the node that a request names, for the audit log, or what it means without one.
fn node_named(node: &str, without: &str) -> String {
    match node {
        "" => without.to_owned(),
        node => format!("node {}", label(node, MAX_NAME)),
    }
}

/// Cost of connections that an agent tries.
const COST_OF_CONNECTIONS: u32 = 10;

/// Returns the cost of an answer about every node: this replica's agents times the replicas.
fn nodes_cost(agents: usize, peers: Option<&Peers>) -> u32 {
    let replicas = peers.map_or(0, Peers::known) + 1;
    cost(agents.saturating_mul(replicas))
}

/// Returns the cost of a question to the agents of all replicas.
fn asking_cost(agents: usize, peers: Option<&Peers>) -> u32 {
    nodes_cost(agents, peers).saturating_mul(COST_OF_CONNECTIONS)
}

/// Returns the maximum number of nodes in an answer.
fn nodes_of(request: &pb::GetFleetRequest) -> usize {
    match request.page_size {
        0 => usize::MAX,
        most => usize::try_from(most).unwrap_or(usize::MAX),
    }
}

/// Sends a whole snapshot; returns false when the client has gone.
async fn send_snapshot(
    hub: &Hub,
    others: &Collected,
    request: &pb::GetFleetRequest,
    outbox: &Outbox<pb::Fleet>,
) -> bool {
    let snapshot = Snapshot::with(hub, others).only_those(request);
    let nodes = nodes_of(request);
    let mut token = String::new();
    loop {
        let page = snapshot.page(&token, nodes);
        token.clone_from(&page.next_page_token);
        if outbox.send(Ok(page)).await.is_err() {
            return false;
        }
        if token.is_empty() {
            return true;
        }
    }
}

async fn watch(
    hub: Arc<Hub>,
    request: pb::GetFleetRequest,
    peers: Option<Arc<Peers>>,
    outbox: Outbox<pb::Fleet>,
) {
    let mut others = match Others::follow(peers.as_ref(), None).await {
        Ok(others) => others,
        // The client may have gone.
        Err(status) => return drop(outbox.send(Err(status)).await),
    };
    let mut agents = hub.agents().changes();
    let mut head = hub.store().head();
    let mut summary = hub.index().summary();
    let mut upstream = hub.upstream().issue_changes();
    while send_snapshot(&hub, &others.latest(), &request, &outbox).await {
        tokio::time::sleep(WATCH_PAUSE).await;
        let alive = tokio::select! {
            changed = agents.changed() => changed.is_ok(),
            changed = head.changed() => changed.is_ok(),
            changed = summary.changed() => changed.is_ok(),
            changed = upstream.changed() => changed.is_ok(),
            () = others.changed() => true,
            () = tokio::time::sleep(WATCH_REFRESH) => true,
            () = outbox.closed() => false,
            () = hub.shutdown().cancelled() => false,
        };
        if !alive {
            return;
        }
    }
}
