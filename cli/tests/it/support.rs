//! A control plane with canned answers, and the real binary. Everything has a deadline.

use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::pin::Pin;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::spawn;
use std::time::Duration;

use kpctl_samples as samples;
use kplane_proto::v1 as pb;
use kplane_proto::v1::status_service_server::{StatusService, StatusServiceServer};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio_stream::wrappers::{TcpListenerStream, WatchStream};
use tokio_stream::{Stream, StreamExt};
use tonic::service::Routes;
use tonic::{Request, Response, Status};

/// Nothing here takes a hundredth of it.
const DEADLINE: Duration = Duration::from_secs(30);

/// A control plane that serves `samples`. Dropping it ends it.
pub(crate) struct ControlPlane {
    pub(crate) address: SocketAddr,
    pub(crate) fleet: watch::Sender<pb::Fleet>,
    /// What is told of every Service, whatever its name.
    pub(crate) convergence: watch::Sender<pb::Convergence>,
    pub(crate) lock: Lock,
    _runtime: Runtime,
}

impl ControlPlane {
    /// Serves this fleet, at a free port.
    pub(crate) fn start(fleet: pb::Fleet) -> Self {
        Self::start_at(([127, 0, 0, 1], 0).into(), fleet)
    }

    /// Serves this fleet at this address.
    pub(crate) fn start_at(address: SocketAddr, fleet: pb::Fleet) -> Self {
        let canned = Canned {
            fleet: watch::Sender::new(fleet),
            convergence: watch::Sender::default(),
        };
        let lock = Lock::default();
        let inside = lock.clone();
        let check = move |request: Request<()>| inside.check(request);
        let service = StatusServiceServer::with_interceptor(canned.clone(), check);
        Self::serve(address, canned, lock, Routes::new(service))
    }

    /// A gRPC server that is something else.
    pub(crate) fn start_other() -> Self {
        let (canned, lock) = (Canned::default(), Lock::default());
        Self::serve(([127, 0, 0, 1], 0).into(), canned, lock, Routes::default())
    }

    fn serve(address: SocketAddr, canned: Canned, lock: Lock, routes: Routes) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(address)).unwrap();
        let address = listener.local_addr().unwrap();
        let server = tonic::transport::Server::builder().add_routes(routes);
        runtime.spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        Self {
            address,
            fleet: canned.fleet,
            convergence: canned.convergence,
            lock,
            _runtime: runtime,
        }
    }
}

/// The credentials of callers: those that are wanted, and those that came last.
#[derive(Clone, Default)]
pub(crate) struct Lock {
    pub(crate) wanted: Arc<Mutex<Option<String>>>,
    seen: Arc<Mutex<Option<String>>>,
}

impl Lock {
    fn check(&self, request: Request<()>) -> Result<Request<()>, Status> {
        let header = request
            .metadata()
            .get("authorization")
            .map(|value| value.to_str().unwrap().to_owned());
        self.seen.lock().unwrap().clone_from(&header);
        match &*self.wanted.lock().unwrap() {
            Some(wanted) if header.as_ref() != Some(wanted) => {
                Err(Status::unauthenticated("the token is not valid any more"))
            }
            _ => Ok(request),
        }
    }

    /// Wants this header from now on.
    pub(crate) fn want(&self, header: &str) {
        *self.wanted.lock().unwrap() = Some(header.to_owned());
    }

    /// The header of the last call.
    pub(crate) fn seen(&self) -> Option<String> {
        self.seen.lock().unwrap().clone()
    }
}

/// The canned answers.
#[derive(Clone, Default)]
struct Canned {
    fleet: watch::Sender<pb::Fleet>,
    convergence: watch::Sender<pb::Convergence>,
}

#[tonic::async_trait]
impl StatusService for Canned {
    async fn get_fleet(
        &self,
        _: Request<pb::GetFleetRequest>,
    ) -> Result<Response<pb::Fleet>, Status> {
        Ok(Response::new(self.fleet.borrow().clone()))
    }

    type WatchFleetStream = Pin<Box<dyn Stream<Item = Result<pb::Fleet, Status>> + Send>>;

    async fn watch_fleet(
        &self,
        _: Request<pb::GetFleetRequest>,
    ) -> Result<Response<Self::WatchFleetStream>, Status> {
        let fleets = WatchStream::new(self.fleet.subscribe());
        // Nobody hears of an empty fleet: for tests of the deadline.
        let fleets = fleets.filter(|fleet| *fleet != pb::Fleet::default());
        Ok(Response::new(Box::pin(fleets.map(Ok))))
    }

    async fn list_services(
        &self,
        request: Request<pb::ListServicesRequest>,
    ) -> Result<Response<pb::ListServicesResponse>, Status> {
        let request = request.into_inner();
        let namespace = request.namespace;
        let wanted = |view: &pb::ServiceView| {
            namespace.is_empty() || view.key.as_ref().unwrap().namespace == namespace
        };
        // Two in a page, from the number of the token on.
        let from: usize = request.page_token.parse().unwrap_or(0);
        let wanted = samples::services().into_iter().filter(wanted);
        let mut rest = wanted.skip(from);
        let services: Vec<_> = rest.by_ref().take(2).collect();
        let more = rest.next().is_some();
        let next_page_token = more.then(|| (from + services.len()).to_string());
        Ok(Response::new(pb::ListServicesResponse {
            services,
            next_page_token: next_page_token.unwrap_or_default(),
        }))
    }

    type WatchServicesStream =
        Pin<Box<dyn Stream<Item = Result<pb::ServiceChanges, Status>> + Send>>;

    /// Begins with a snapshot of the first two ServicePorts, and changes with each revision of the fleet: the rest comes,
    /// then all but kube-dns is gone. A fleet of revision 0 is that of a control plane that has no such watch.
    async fn watch_services(
        &self,
        _: Request<pb::WatchServicesRequest>,
    ) -> Result<Response<Self::WatchServicesStream>, Status> {
        let revision = |fleet: &pb::Fleet| fleet.control_plane.as_ref().map_or(0, |of| of.revision);
        let first = revision(&self.fleet.borrow());
        if first == 0 {
            return Err(Status::unimplemented("no such method"));
        }
        let fleets = WatchStream::new(self.fleet.subscribe());
        let messages = fleets.map(move |fleet| {
            let all = samples::services();
            let id = |name: &str| pb::ServiceId {
                namespace: "shop".to_owned(),
                name: name.to_owned(),
            };
            let mut message = pb::ServiceChanges {
                complete: true,
                ..Default::default()
            };
            match revision(&fleet) - first {
                0 => {
                    message.snapshot = true;
                    message.services = all[..2].to_vec();
                }
                1 => message.services = all[2..].to_vec(),
                _ => message.replaced = vec![id("database"), id("web")],
            }
            Ok(message)
        });
        Ok(Response::new(Box::pin(messages)))
    }

    async fn describe_service(
        &self,
        request: Request<pb::DescribeServiceRequest>,
    ) -> Result<Response<pb::ServiceDescription>, Status> {
        let request = request.into_inner();
        match (request.namespace.as_str(), request.name.as_str()) {
            ("shop", "web") => Ok(Response::new(samples::description())),
            (_, "secret") => Err(Status::permission_denied("not \u{1b}[31mfor you")),
            _ => Err(Status::not_found("no such Service")),
        }
    }

    async fn try_service(
        &self,
        request: Request<pb::ExplainRequest>,
    ) -> Result<Response<pb::TryResponse>, Status> {
        let explanation = self.explain(request).await?.into_inner();
        Ok(Response::new(pb::TryResponse {
            explanation: Some(explanation),
            attempts: Vec::new(),
            error: "only TCP connections can be tried".to_owned(),
        }))
    }

    async fn get_drain_status(
        &self,
        _: Request<pb::DrainStatusRequest>,
    ) -> Result<Response<pb::DrainStatus>, Status> {
        Err(Status::unimplemented("no such method"))
    }

    async fn get_affinity(
        &self,
        _: Request<pb::AffinityRequest>,
    ) -> Result<Response<pb::AffinityAnswer>, Status> {
        Err(Status::unimplemented("no such method"))
    }

    async fn get_flows(
        &self,
        request: Request<pb::FlowsRequest>,
    ) -> Result<Response<pb::FlowsAnswer>, Status> {
        let request = request.into_inner();
        match (request.name.as_str(), request.from.as_str()) {
            ("web", "outside") => Ok(Response::new(pb::FlowsAnswer {
                flows: Vec::new(),
                ..samples::flows()
            })),
            ("web", _) => {
                let mut answer = samples::flows();
                let group = answer.flows[0].group.as_mut().unwrap();
                // Each revision of the fleet is a connection more.
                group.established = self.fleet.borrow().control_plane.as_ref().unwrap().revision;
                Ok(Response::new(answer))
            }
            _ => Err(Status::not_found("no Service shop/x is known")),
        }
    }

    async fn get_graph(
        &self,
        request: Request<pb::GraphRequest>,
    ) -> Result<Response<pb::GraphAnswer>, Status> {
        let mut answer = samples::graph();
        if request.into_inner().namespace == "empty" {
            answer.edges.clear();
        }
        Ok(Response::new(answer))
    }

    async fn get_proxied(
        &self,
        _: Request<pb::ProxiedRequest>,
    ) -> Result<Response<pb::ProxiedAnswer>, Status> {
        Err(Status::unimplemented("no such method"))
    }

    async fn list_findings(
        &self,
        _: Request<pb::ListFindingsRequest>,
    ) -> Result<Response<pb::FindingsAnswer>, Status> {
        Err(Status::unimplemented("it has no findings"))
    }

    async fn list_policies(
        &self,
        request: Request<pb::ListPoliciesRequest>,
    ) -> Result<Response<pb::ListPoliciesResponse>, Status> {
        let request = request.into_inner();
        let mut policies = samples::policies();
        policies.retain(|of| request.namespace.is_empty() || of.namespace == request.namespace);
        // Two in a page.
        let next_page_token = match request.page_token.as_str() {
            "" if policies.len() > 2 => "2",
            _ => "",
        };
        let from = request.page_token.parse().unwrap_or(0);
        Ok(Response::new(pb::ListPoliciesResponse {
            policies: policies.into_iter().skip(from).take(2).collect(),
            next_page_token: next_page_token.to_owned(),
        }))
    }

    async fn describe_policy(
        &self,
        request: Request<pb::DescribePolicyRequest>,
    ) -> Result<Response<pb::PolicyDescription>, Status> {
        match request.get_ref().name.as_str() {
            "db" => Ok(Response::new(samples::policy_description())),
            _ => Err(Status::not_found("no NetworkPolicy shop/x is known")),
        }
    }

    async fn judge_connection(
        &self,
        request: Request<pb::JudgeConnectionRequest>,
    ) -> Result<Response<pb::ConnectionJudgement>, Status> {
        match request.get_ref().from.as_str() {
            "10.0.0.7" => Err(Status::failed_precondition(
                "nodes enforce no NetworkPolicies",
            )),
            _ => Ok(Response::new(samples::judgement())),
        }
    }

    async fn get_drops(
        &self,
        request: Request<pb::DropsRequest>,
    ) -> Result<Response<pb::DropsAnswer>, Status> {
        let mut drops = samples::drops();
        drops.packets.clear();
        match request.get_ref().pod.as_str() {
            "" => Ok(Response::new(drops)),
            _ => Err(Status::not_found("no Pod shop/x is known")),
        }
    }

    async fn follow_drops(
        &self,
        request: Request<pb::DropsRequest>,
    ) -> Result<Response<pb::DropsAnswer>, Status> {
        match request.get_ref().follower {
            0 => Err(Status::invalid_argument("the follower has no number")),
            _ => Ok(Response::new(samples::drops())),
        }
    }

    async fn probe_nodes(
        &self,
        _: Request<pb::ProbeRequest>,
    ) -> Result<Response<pb::ProbeReport>, Status> {
        Err(Status::unimplemented("no such method"))
    }

    async fn explain(
        &self,
        request: Request<pb::ExplainRequest>,
    ) -> Result<Response<pb::Explanation>, Status> {
        let request = request.into_inner();
        match (request.name.as_str(), request.node.as_str()) {
            ("web", "") if request.sender_pod == "shop/client-1" => {
                Ok(Response::new(samples::explanation()))
            }
            ("web", "") => Err(Status::invalid_argument(
                "there are several nodes: say which one",
            )),
            ("web", _) => Ok(Response::new(samples::explanation())),
            _ => Err(Status::not_found("no Service shop/x is known")),
        }
    }

    type WatchConvergenceStream =
        Pin<Box<dyn Stream<Item = Result<pb::Convergence, Status>> + Send>>;

    async fn watch_convergence(
        &self,
        request: Request<pb::ConvergenceRequest>,
    ) -> Result<Response<Self::WatchConvergenceStream>, Status> {
        let pb::ConvergenceRequest {
            namespace, name, ..
        } = request.into_inner();
        let answers = WatchStream::new(self.convergence.subscribe())
            .filter(|answer| *answer != pb::Convergence::default())
            .map(move |answer| pb::Convergence {
                namespace: namespace.clone(),
                name: name.clone(),
                ..answer
            });
        Ok(Response::new(Box::pin(answers.map(Ok))))
    }

    /// Lets go what was seen, and refuses if it is more.
    async fn approve(
        &self,
        request: Request<pb::ApproveRequest>,
    ) -> Result<Response<pb::ApproveResponse>, Status> {
        let seen = request.into_inner();
        let mut done = pb::ApproveResponse::default();
        let mut refused = false;
        self.fleet.send_modify(|fleet| {
            let plane = fleet.control_plane.as_mut().unwrap();
            let held = plane.held.take_if(|held| held.services <= seen.services);
            refused = plane.held.is_some();
            done.released = held;
            done.doubt = std::mem::take(&mut plane.doubt);
            done.revision = plane.revision;
        });
        if refused {
            return Err(Status::failed_precondition(
                "more objects are held than were approved",
            ));
        }
        Ok(Response::new(done))
    }

    /// Says that all nodes that an order names are frozen.
    async fn freeze(
        &self,
        request: Request<pb::FreezeRequest>,
    ) -> Result<Response<pb::FreezeResponse>, Status> {
        let request = request.into_inner();
        let frozen = if request.thaw { 0 } else { request.nodes.len() };
        Ok(Response::new(pb::FreezeResponse {
            nodes: request.nodes,
            frozen: frozen as u64,
        }))
    }

    /// Knows two publications.
    async fn get_history(
        &self,
        _: Request<pb::GetHistoryRequest>,
    ) -> Result<Response<pb::History>, Status> {
        Ok(Response::new(samples::history()))
    }
}

/// An address at which nobody listens.
pub(crate) fn nobody() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

/// The binary, without the terminal's say in how it looks.
pub(crate) fn kpctl(server: SocketAddr, args: &[&str]) -> Command {
    program(Path::new(env!("CARGO_BIN_EXE_kpctl")), server, args)
}

/// The binary by another name.
pub(crate) fn program(path: &Path, server: SocketAddr, args: &[&str]) -> Command {
    let mut command = Command::new(path);
    for name in ["NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE"] {
        command.env_remove(name);
    }
    command
        .args(args)
        .env("KPLANE_SERVER", server.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// The binary of a user with this home folder, who has named no server.
pub(crate) fn at_home(home: &Path, args: &[&str]) -> Command {
    let mut command = kpctl(nobody(), args);
    for name in ["KPLANE_SERVER", "KUBECONFIG", "HTTPS_PROXY", "https_proxy"] {
        command.env_remove(name);
    }
    command.env("HOME", home);
    command
}

/// What a program did.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs a command to its end.
pub(crate) fn run(command: &mut Command) -> Done {
    let mut running = Running::start(command);
    let (stdout, stderr) = (running.stdout.rest(), running.stderr.rest());
    Done {
        code: running.wait().code(),
        stdout,
        stderr,
    }
}

/// A program that runs; killed when it is dropped.
pub(crate) struct Running {
    child: Child,
    pub(crate) stdout: Lines,
    pub(crate) stderr: Lines,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.spawn().unwrap();
        Self {
            stdout: Lines::of(child.stdout.take().unwrap()),
            stderr: Lines::of(child.stderr.take().unwrap()),
            child,
        }
    }

    /// Its output has ended: so will it.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Lines of a pipe, as they come.
pub(crate) struct Lines(Receiver<String>);

impl Lines {
    fn of(pipe: impl Read + Send + 'static) -> Self {
        let (sender, receiver) = channel();
        spawn(move || {
            for line in BufReader::new(pipe).lines() {
                if sender.send(line.unwrap()).is_err() {
                    return;
                }
            }
        });
        Self(receiver)
    }

    /// The next line.
    pub(crate) fn next(&self) -> String {
        self.0.recv_timeout(DEADLINE).expect("one more line")
    }

    /// The next line that contains this.
    pub(crate) fn find(&self, text: &str) -> String {
        loop {
            let line = self.next();
            if line.contains(text) {
                return line;
            }
        }
    }

    /// All lines until the end.
    fn rest(&self) -> String {
        let mut rest = String::new();
        loop {
            match self.0.recv_timeout(DEADLINE) {
                Ok(line) => rest = rest + &line + "\n",
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return rest,
                Err(timeout) => panic!("{timeout}, so far:\n{rest}"),
            }
        }
    }
}
