//! A control plane with TLS, and callers of its ports with any credentials.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use hyper_util::rt::TokioIo;
use kplane_model::DesiredObject;
use kplane_proto::convert::decode_object;
use kplane_proto::v1::agent_service_client::AgentServiceClient;
use kplane_proto::v1::desired_state_service_client::DesiredStateServiceClient;
use kplane_proto::v1::peer_service_client::PeerServiceClient;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_proto::v1::{
    self as pb, AgentMessage, Hello, ServerMessage, agent_message, server_message,
};
use kplane_tests::cluster::guard::Guard;
use kplane_tests::netns::NetNs;
use kplane_tests::process::Process;
use kplane_tests::wait::eventually;
use kplane_tls::{ClientFiles, Files as _, KeyPair, greet};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};

use super::World;
use super::world::{DEADLINE, product};

/// Longest wait for one answer: a review takes 5 s at most.
const ANSWER: Duration = Duration::from_secs(15);

/// The number of the next agent's process.
static INSTANCES: AtomicU64 = AtomicU64::new(1);

/// The name in certificates that a control plane makes itself.
pub(crate) const OWN_NAME: &str = "kplane-controlplane.kplane.svc";

/// A control plane with TLS on both gRPC ports.
pub(crate) struct SecurePlane {
    _process: Process,
    agents: SocketAddr,
    status: SocketAddr,
    certs: PathBuf,
    /// The server's name, which its certificate must have.
    name: &'static str,
    /// The control plane's namespace, in which callers are too.
    ns: NetNs,
    runtime: Runtime,
    _guard: Guard,
}

/// A caller with credentials.
pub(crate) struct Caller<'a> {
    plane: &'a SecurePlane,
    /// File of the authorities that the caller trusts.
    authorities: PathBuf,
    pair: Option<KeyPair>,
    token: Option<String>,
}

/// A method of the status port.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Method {
    GetFleet,
    WatchFleet,
    ListServices,
    DescribeService,
    WatchConvergence,
    WatchNode,
    Approve,
    Collect,
    ProbeNodes,
}

impl Method {
    /// All methods: those that read, those about the desired state, the one that acts, the one of other replicas,
    /// those that make agents act.
    pub(crate) const ALL: [Self; 9] = [
        Self::GetFleet,
        Self::WatchFleet,
        Self::ListServices,
        Self::DescribeService,
        Self::WatchConvergence,
        Self::WatchNode,
        Self::Approve,
        Self::Collect,
        Self::ProbeNodes,
    ];
}

/// An open stream of an agent.
pub(crate) struct Stream<'a> {
    plane: &'a SecurePlane,
    pub(crate) outbox: mpsc::Sender<AgentMessage>,
    inbox: Streaming<ServerMessage>,
}

impl SecurePlane {
    /// Starts a control plane beside the world's own ones, with the account of control planes, and certificates
    /// from files.
    pub(crate) fn start(world: &World) -> Result<Self> {
        let certs = world.cluster.folder().join("certs");
        make_certs(&certs)?;
        let file = |name: &str| certs.join(name).display().to_string();
        let flags = [
            "--tls-cert-file".to_owned(),
            file("server.crt"),
            "--tls-private-key-file".to_owned(),
            file("server.key"),
            "--client-ca-file".to_owned(),
            file("ca.crt"),
        ];
        let plane = Self::launch(world, 0, &flags, (certs, "127.0.0.1"))?;
        let bob = plane.caller(Some("users/bob"), None)?;
        eventually(DEADLINE, "the control plane serves", || {
            let code = bob.call(Method::GetFleet)?;
            ensure!(code == Code::Ok, "{code:?}");
            anyhow::Ok(())
        })?;
        Ok(plane)
    }

    /// Starts a control plane that makes its own certificates. Callers trust `ca.crt` in the folder `certs`.
    pub(crate) fn start_own(world: &World, replica: u16, certs: &Path) -> Result<Self> {
        let flags = [
            "--certificates-in".to_owned(),
            "kplane".to_owned(),
            // Not once a minute, for which tests would wait.
            "--certificates-interval=1".to_owned(),
            // The first two replicas.
            "--peers=127.0.0.1:7644,127.0.0.1:7654".to_owned(),
        ];
        let trusted = (certs.to_owned(), OWN_NAME);
        Self::launch(world, replica, &flags, trusted)
    }

    fn launch(
        world: &World,
        replica: u16,
        flags: &[String],
        (certs, name): (PathBuf, &'static str),
    ) -> Result<Self> {
        let ns = world.topology.host("control")?.ns();
        let at = |port| SocketAddr::new(IpAddr::from([127, 0, 0, 1]), port + 10 * replica);
        let log = format!("plane-secure-{replica}");
        let mut command = world.program(&product()?.control_plane, &log)?;
        let audit = world.cluster.folder().join("audit");
        command
            .args(["--kubeconfig".as_ref(), world.account.as_os_str()])
            .args(["--audit-log".as_ref(), audit.as_os_str()])
            .args(flags)
            .arg(format!("--agent-listen={}", at(7643)))
            .arg(format!("--status-listen={}", at(7644)))
            .arg(format!("--http-listen={}", at(7645)));
        let guard = Guard::new(ns)?;
        let process = guard.start(command)?;
        let runtime = {
            let _inside = ns.enter()?;
            let mut runtime = Builder::new_multi_thread();
            runtime.worker_threads(1).enable_all().build()?
        };
        Ok(Self {
            _process: process,
            agents: at(7643),
            status: at(7644),
            certs,
            name,
            ns: ns.clone(),
            runtime,
            _guard: guard,
        })
    }

    /// Waits for a future in the namespace.
    fn wait<F: Future>(&self, within: Duration, future: F) -> Result<Option<F::Output>> {
        let _inside = self.ns.enter()?;
        let waited = async { timeout(within, future).await };
        Ok(self.runtime.block_on(waited).ok())
    }

    /// Returns a caller with a certificate of this control plane's authority, a token, both or none.
    pub(crate) fn caller(&self, pair: Option<&str>, token: Option<&str>) -> Result<Caller<'_>> {
        let pair = pair.map(|name| KeyPair::in_folder(&self.certs, name));
        Ok(Caller {
            plane: self,
            authorities: self.certs.join("ca.crt"),
            pair,
            token: token.map(str::to_owned),
        })
    }

    /// Returns a caller with a token, who trusts the authorities of `ca.crt` in a folder.
    pub(crate) fn caller_who_trusts(&self, folder: &Path, token: &str) -> Caller<'_> {
        Caller {
            plane: self,
            authorities: folder.join("ca.crt"),
            pair: None,
            token: Some(token.to_owned()),
        }
    }
}

/// Makes certificates for two nodes and two users with the product's own program.
fn make_certs(folder: &Path) -> Result<()> {
    let program = &product()?.control_plane;
    for args in [
        &["init", "--host", "127.0.0.1"][..],
        &["node", "node-1", "node-2"],
        &["user", "alice"],
        &["user", "bob", "--admin"],
    ] {
        let (task, rest) = args.split_first().context("no task")?;
        let made = Command::new(program).args(["certs", task]).arg(folder).args(rest).output()?;
        ensure!(
            made.status.success(),
            "{}",
            String::from_utf8_lossy(&made.stderr)
        );
    }
    Ok(())
}

impl<'a> Caller<'a> {
    /// Connects anew, as a program that starts does.
    async fn connect(&self, to: SocketAddr) -> Result<Channel, Status> {
        let files = ClientFiles {
            authorities: self.authorities.clone(),
            pair: self.pair.clone(),
        };
        let config = files.load().map_err(|error| Status::internal(error.to_string()))?;
        let name = self.plane.name;
        let connect = move |_| {
            let config = config.clone();
            async move {
                let stream = TcpStream::connect(to).await?;
                greet(stream, Some(config), name).await.map(TokioIo::new)
            }
        };
        let endpoint = Endpoint::from_static("https://127.0.0.1");
        let channel = endpoint.connect_with_connector(tower::service_fn(connect)).await;
        channel.map_err(|error| Status::unknown(format!("{error:?}")))
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let header = self.token.as_ref().and_then(|token| format!("Bearer {token}").parse().ok());
        if let Some(header) = header {
            request.metadata_mut().insert("authorization", header);
        }
        request
    }

    /// Calls a method of the status port; returns the status of the answer.
    pub(crate) fn call(&self, method: Method) -> Result<Code> {
        let call = async {
            let channel = self.connect(self.plane.status).await?;
            let mut status = StatusServiceClient::new(channel.clone());
            let fleet = pb::GetFleetRequest::default();
            match method {
                Method::GetFleet => status.get_fleet(self.request(fleet)).await.map(drop),
                Method::WatchFleet => status.watch_fleet(self.request(fleet)).await.map(drop),
                Method::ListServices => {
                    let list = pb::ListServicesRequest::default();
                    status.list_services(self.request(list)).await.map(drop)
                }
                Method::DescribeService => {
                    let (namespace, name) = ("default".to_owned(), "kubernetes".to_owned());
                    let describe = pb::DescribeServiceRequest { namespace, name };
                    status.describe_service(self.request(describe)).await.map(drop)
                }
                Method::WatchConvergence => {
                    let watch = status.watch_convergence(self.request(no_service()));
                    watch.await.map(drop)
                }
                Method::Approve => {
                    let approve = pb::ApproveRequest::default();
                    status.approve(self.request(approve)).await.map(drop)
                }
                Method::ProbeNodes => {
                    let probe = self.request(pb::ProbeRequest::default());
                    status.probe_nodes(probe).await.map(drop)
                }
                Method::Collect => {
                    let mut peer = PeerServiceClient::new(channel);
                    let collect = self.request(pb::CollectRequest::default());
                    peer.collect(collect).await.map(drop)
                }
                Method::WatchNode => {
                    let watch = self.request(pb::WatchNodeRequest {
                        node_name: "node-1".to_owned(),
                        ..pb::WatchNodeRequest::default()
                    });
                    let mut desired = DesiredStateServiceClient::new(channel);
                    desired.watch_node(watch).await.map(drop)
                }
            }
        };
        let answer = self.plane.wait(ANSWER, call)?.with_context(|| format!("{method:?}"))?;
        Ok(answer.map_or_else(|status| status.code(), |()| Code::Ok))
    }

    /// Returns the first page of the fleet.
    pub(crate) fn fleet(&self) -> Result<pb::Fleet> {
        let call = async {
            let channel = self.connect(self.plane.status).await?;
            let request = self.request(pb::GetFleetRequest::default());
            StatusServiceClient::new(channel).get_fleet(request).await
        };
        let answer = self.plane.wait(ANSWER, call)?.context("no answer")?;
        Ok(answer?.into_inner())
    }

    /// Opens a stream as the agent of a node, and waits for its Welcome.
    pub(crate) fn speak_for(&self, node: &str) -> Result<Result<Stream<'a>, Status>> {
        let open = async {
            let channel = self.connect(self.plane.agents).await?;
            let (outbox, messages) = mpsc::channel(4);
            let hello = Hello {
                protocol_version: kplane_proto::PROTOCOL_VERSION,
                node_name: node.to_owned(),
                // Each stream is of another process, so that none takes the place of an older one.
                instance: INSTANCES.fetch_add(1, Ordering::Relaxed),
                ..Hello::default()
            };
            let kind = Some(agent_message::Kind::Hello(hello));
            let _ = outbox.send(AgentMessage { kind }).await;
            let request = self.request(ReceiverStream::new(messages));
            let answer = AgentServiceClient::new(channel).sync(request).await?;
            let mut inbox = answer.into_inner();
            inbox.message().await?;
            Ok(Stream {
                plane: self.plane,
                outbox,
                inbox,
            })
        };
        let opened = self.plane.wait(ANSWER, open)?;
        opened.with_context(|| format!("a stream for {node}"))
    }

    /// Opens a stream as the agent of a node; returns the status.
    pub(crate) fn hello(&self, node: &str) -> Result<Code> {
        let opened = self.speak_for(node)?;
        Ok(opened.map_or_else(|status| status.code(), |_| Code::Ok))
    }
}

/// A stream that is read in the background.
pub(crate) struct Following {
    services: Arc<Mutex<BTreeSet<String>>>,
    /// Ends with the runtime of the control plane at the latest.
    task: JoinHandle<()>,
}

impl Following {
    /// Returns the names of all Services that have come so far.
    pub(crate) fn services(&self) -> BTreeSet<String> {
        self.services.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns whether the stream has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.task.is_finished()
    }
}

impl Stream<'_> {
    /// Goes on to read the stream in the background, and answers every message.
    pub(crate) fn follow(mut self) -> Following {
        let services = Arc::<Mutex<BTreeSet<String>>>::default();
        let seen = Arc::clone(&services);
        let runtime = &self.plane.runtime;
        let task = runtime.spawn(async move {
            while let Ok(Some(message)) = self.inbox.message().await {
                let kind = Some(agent_message::Kind::Ping(pb::Ping { token: 1 }));
                let _ = self.outbox.try_send(AgentMessage { kind });
                let Some(server_message::Kind::Update(update)) = message.kind else {
                    continue;
                };
                let objects = update.objects.into_iter().map(decode_object);
                let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                seen.extend(
                    objects.flatten().flatten().filter_map(|object| match object {
                        DesiredObject::Service(program) => {
                            Some(program.port.key.service.name.to_string())
                        }
                        _ => None,
                    }),
                );
            }
        });
        Following { services, task }
    }

    /// Reads until the stream ends, and answers nothing but pings; returns the status at the end.
    pub(crate) fn end(mut self, within: Duration) -> Result<Status> {
        let read = async {
            loop {
                match self.inbox.message().await {
                    Err(status) => return status,
                    Ok(None) => return Status::ok("closed"),
                    Ok(Some(_)) => {
                        let kind = Some(agent_message::Kind::Ping(pb::Ping { token: 1 }));
                        let _ = self.outbox.try_send(AgentMessage { kind });
                    }
                }
            }
        };
        let ended = self.plane.wait(within, read)?;
        ended.context("the stream is still open")
    }
}

/// A Service that does not exist, which is an answer and not an error.
fn no_service() -> pb::ConvergenceRequest {
    pb::ConvergenceRequest {
        absent_ok: true,
        ..pb::ConvergenceRequest::default()
    }
}
