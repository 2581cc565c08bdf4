//! Files of certificates, tokens and rights are replaced one after the other, while agents have streams, changes come
//! and callers connect again and again: no stream is lost, no change is missed, no right caller is refused.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use kp_controlplane::app as control_plane;
use kp_nodeagent::app;
use kplane_agents::identity::{self, Port, RefusalReason};
use kplane_proto::v1::agent_service_client::AgentServiceClient;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_proto::v1::{self as pb, AgentMessage, agent_message};
use kplane_tls::{ClientFiles, Files as _, INTERVAL, KeyPair, ServerFiles, greet};
use tempfile::TempDir;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use crate::support::agent_of;
use crate::support::certs::Certs;

/// Longest that anything may take on a busy machine.
const DEADLINE: Duration = Duration::from_secs(30);
/// Pause between two looks, two changes, two callers.
const PAUSE: Duration = Duration::from_millis(50);

// === files ===

/// A folder in the form of a projected volume: files are links, and all of them change at once.
struct Volume {
    folder: PathBuf,
    number: AtomicU64,
}

impl Volume {
    fn new(folder: PathBuf, files: &[(&str, Vec<u8>)]) -> Self {
        fs::create_dir(&folder).unwrap();
        for (name, _) in files {
            symlink(Path::new("..data").join(name), folder.join(name)).unwrap();
        }
        let number = AtomicU64::new(0);
        let volume = Self { folder, number };
        volume.replace(files);
        volume
    }

    fn replace(&self, files: &[(&str, Vec<u8>)]) {
        let data = format!("..{}", self.number.fetch_add(1, Ordering::Relaxed));
        fs::create_dir(self.folder.join(&data)).unwrap();
        for (name, content) in files {
            fs::write(self.folder.join(&data).join(name), content).unwrap();
        }
        let new = self.folder.join("..data_tmp");
        symlink(data, &new).unwrap();
        fs::rename(new, self.folder.join("..data")).unwrap();
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn pair(&self, name: &str) -> KeyPair {
        KeyPair::in_folder(&self.folder, name)
    }
}

/// Replaces a file as editors and tools do.
fn replace(file: &Path, content: &str) {
    let new = file.with_extension("new");
    fs::write(&new, content).unwrap();
    fs::rename(new, file).unwrap();
}

// === control plane, agents ===

/// A control plane from a folder, in which an endpoint changes all the time.
struct Plane {
    bound: control_plane::Bound,
    manifests: PathBuf,
    changes: AbortOnDropHandle<()>,
}

impl Plane {
    async fn start(folder: &Path, files: &Volume, identity: identity::AuthenticatorConfig) -> Self {
        let manifests = folder.join("objects");
        fs::create_dir(&manifests).unwrap();
        let service = "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\n\
             spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{name: http, port: 80}]}\n";
        fs::write(manifests.join("web.yaml"), service).unwrap();
        write_endpoint(&manifests, 1);
        let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        let bound = control_plane::build(control_plane::Config {
            agent_listen: any,
            status_listen: any,
            protection: control_plane::Protection::Files(ServerFiles {
                pair: files.pair("server"),
                client_authorities: Some(files.file("ca.crt")),
            }),
            identity,
            ..control_plane::Config::new(control_plane::Origin::Manifests(manifests.clone()))
        })
        .await
        .unwrap();
        let changing = manifests.clone();
        let changes = tokio::spawn(async move {
            for number in (2..=250).cycle() {
                write_endpoint(&changing, number);
                sleep(PAUSE).await;
            }
        });
        Self {
            bound,
            manifests,
            changes: AbortOnDropHandle::new(changes),
        }
    }

    fn agents(&self) -> SocketAddr {
        self.bound.agent_addr.unwrap()
    }

    fn status(&self) -> SocketAddr {
        self.bound.status_addr.unwrap()
    }

    /// Returns when the stream of a node's agent began; `None` while there is none.
    fn stream(&self, node: &str) -> Option<Instant> {
        let record = self.bound.hub().agents().record(node)?;
        record.connected.then_some(record.since)
    }

    /// Returns the number of refusals of agents.
    fn refusals(&self) -> u64 {
        self.bound
            .authenticator()
            .refusals()
            .into_iter()
            .filter(|(port, ..)| *port == Port::Agents)
            .map(|(.., count)| count)
            .sum()
    }

    /// Stops the changes, and wants the agents to hold the last of them.
    async fn is_complete(&self, agents: &[&app::Bound]) {
        self.changes.abort();
        write_endpoint(&self.manifests, 251);
        let mut head = self.bound.hub().store().head();
        // The last change is one more revision than those before.
        let quiet = async { while timeout(PAUSE * 10, head.changed()).await.is_ok() {} };
        timeout(DEADLINE, quiet).await.unwrap();
        let revision = head.borrow().revision;
        assert!(revision > 50, "{revision} changes");
        for agent in agents {
            let mut reports = agent.reports();
            let held = reports.wait_for(|report| {
                report.applied.filter(|applied| applied.revision == revision).is_some()
                    && report.applied == report.held
                    && report.failures.is_empty()
            });
            timeout(DEADLINE, held).await.unwrap().unwrap();
        }
    }
}

/// Writes the Service's one endpoint.
fn write_endpoint(folder: &Path, number: u8) {
    let text = format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n\
         metadata: {{name: web-1, namespace: shop, labels: {{kubernetes.io/service-name: web}}}}\n\
         ports: [{{name: http, port: 8080}}]\n\
         endpoints: [{{addresses: [10.244.0.{number}], conditions: {{ready: true}}}}]\n"
    );
    replace(&folder.join("slice.yaml"), &text);
}

/// Starts an agent that programs nothing, and waits for its stream.
async fn agent(plane: &Plane, node: &str, to: SocketAddr, flags: &[(&str, PathBuf)]) -> app::Bound {
    let mut line = vec![
        "kp-nodeagent".to_owned(),
        format!("--control-plane=https://localhost:{}", to.port()),
        format!("--node-name={node}"),
    ];
    let flags = flags.iter();
    line.extend(flags.map(|(flag, file)| format!("--{flag}={}", file.display())));
    let agent = agent_of(line).await;
    until("the agent has a stream", async || {
        plane.stream(node).is_some()
    })
    .await;
    agent
}

/// A relay whose connections can be cut.
struct Relay {
    address: SocketAddr,
    connections: Arc<Mutex<JoinSet<()>>>,
    _accepting: AbortOnDropHandle<()>,
}

impl Relay {
    async fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::<Mutex<JoinSet<()>>>::default();
        let accepted = Arc::clone(&connections);
        let accepting: JoinHandle<()> = tokio::spawn(async move {
            while let Ok((mut one, _)) = listener.accept().await {
                accepted.lock().unwrap().spawn(async move {
                    if let Ok(mut other) = TcpStream::connect(to).await {
                        let _ = copy_bidirectional(&mut one, &mut other).await;
                    }
                });
            }
        });
        Self {
            address,
            connections,
            _accepting: AbortOnDropHandle::new(accepting),
        }
    }

    /// Cuts the connections, and waits until the agent of a node has a new stream.
    async fn cut(&self, plane: &Plane, node: &str) {
        let before = plane.stream(node);
        self.connections.lock().unwrap().abort_all();
        until("the agent is back", async || {
            let now = plane.stream(node);
            now.is_some() && now != before
        })
        .await;
    }
}

/// Waits until something holds.
async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let looks = async {
        while !holds().await {
            sleep(PAUSE).await;
        }
    };
    assert!(
        timeout(DEADLINE, looks).await.is_ok(),
        "not in time: {what}"
    );
}

// === callers ===

/// The credentials of a caller.
#[derive(Clone)]
struct Caller {
    authorities: PathBuf,
    pair: Option<KeyPair>,
    token: Option<&'static str>,
}

impl Caller {
    async fn connect(&self, to: SocketAddr) -> Result<Channel, Status> {
        let files = ClientFiles {
            authorities: self.authorities.clone(),
            pair: self.pair.clone(),
        };
        let config = files.load().unwrap();
        let stream = TcpStream::connect(to).await?;
        let mut wire = Some(greet(stream, Some(config), "localhost").await?);
        let connector = tower::service_fn(move |_| {
            let wire = wire.take().ok_or(std::io::ErrorKind::NotConnected);
            std::future::ready(wire.map(TokioIo::new).map_err(std::io::Error::from))
        });
        let endpoint = Endpoint::from_static("https://localhost");
        let channel = endpoint.connect_with_connector(connector).await;
        channel.map_err(|error| Status::unknown(format!("{error:?}")))
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(token) = self.token {
            let header = format!("Bearer {token}").parse().unwrap();
            request.metadata_mut().insert("authorization", header);
        }
        request
    }

    /// Connects anew, and asks for the state of the fleet.
    async fn asks(&self, plane: &Plane) -> Result<(), Status> {
        let mut client = StatusServiceClient::new(self.connect(plane.status()).await?);
        let request = self.request(pb::GetFleetRequest::default());
        client.get_fleet(request).await.map(drop)
    }

    /// Connects anew as the agent of node n9, until it is welcome.
    async fn serves(&self, plane: &Plane) -> Result<(), Status> {
        let hello = pb::Hello {
            protocol_version: kplane_proto::PROTOCOL_VERSION,
            node_name: "n9".to_owned(),
            ..pb::Hello::default()
        };
        let kind = Some(agent_message::Kind::Hello(hello));
        let messages = tokio_stream::once(AgentMessage { kind });
        let messages = tokio_stream::StreamExt::chain(messages, tokio_stream::pending());
        let mut client = AgentServiceClient::new(self.connect(plane.agents()).await?);
        let answer = client.sync(self.request(messages)).await?;
        answer.into_inner().message().await.map(drop)
    }
}

/// Callers that connect again and again, and must not fail: a user and an agent.
struct Probes {
    callers: Arc<tokio::sync::Mutex<[Caller; 2]>>,
    outcomes: Arc<Mutex<(u64, Vec<String>)>>,
    _task: AbortOnDropHandle<()>,
}

impl Probes {
    fn start(plane: &Arc<Plane>, callers: [Caller; 2]) -> Self {
        let callers = Arc::new(tokio::sync::Mutex::new(callers));
        let outcomes = Arc::<Mutex<(u64, Vec<String>)>>::default();
        let (theirs, reported, plane) = (
            Arc::clone(&callers),
            Arc::clone(&outcomes),
            Arc::clone(plane),
        );
        let task = tokio::spawn(async move {
            loop {
                {
                    let callers = theirs.lock().await;
                    let tried = tokio::join!(callers[0].asks(&plane), callers[1].serves(&plane));
                    let mut reported = reported.lock().unwrap();
                    reported.0 += 2;
                    let failed = [tried.0, tried.1].into_iter().filter_map(Result::err);
                    reported.1.extend(failed.map(|status| format!("{status:?}")));
                }
                sleep(PAUSE).await;
            }
        });
        Self {
            callers,
            outcomes,
            _task: AbortOnDropHandle::new(task),
        }
    }

    /// Gives the callers other credentials, between two of their calls.
    async fn change(&self, change: impl FnOnce(&mut [Caller; 2])) {
        change(&mut *self.callers.lock().await);
    }

    /// Wants all calls so far to have had an answer.
    fn have_not_failed(&self) {
        let (calls, failures) = &*self.outcomes.lock().unwrap();
        assert!(
            failures.is_empty(),
            "{} of {calls}: {failures:?}",
            failures.len()
        );
        assert!(*calls > 50, "{calls} calls");
    }
}

// === tests ===

/// Agents with certificates of one authority, and another authority.
struct Stage {
    old: Certs,
    new: Certs,
    of_plane: Volume,
    of_agent: Volume,
    plane: Arc<Plane>,
    relay: Relay,
    /// The agent of n1, whose connection can be cut, and that of n2.
    agents: [app::Bound; 2],
    _folder: TempDir,
}

/// Returns the files of a control plane.
fn server(certificate: &Certs, key: &Certs, authorities: &[u8]) -> [(&'static str, Vec<u8>); 3] {
    [
        ("server.crt", certificate.read("server.crt")),
        ("server.key", key.read("server.key")),
        ("ca.crt", authorities.to_vec()),
    ]
}

/// Returns the files of the agent of n1.
fn client(own: &Certs, authorities: &[u8]) -> [(&'static str, Vec<u8>); 3] {
    [
        ("n1.crt", own.read("nodes/n1.crt")),
        ("n1.key", own.read("nodes/n1.key")),
        ("ca.crt", authorities.to_vec()),
    ]
}

impl Stage {
    async fn build() -> Self {
        let folder = TempDir::new().unwrap();
        let (old, new) = (Certs::new(), Certs::new());
        let authority = old.read("ca.crt");
        let of_plane = Volume::new(folder.path().join("plane"), &server(&old, &old, &authority));
        let of_agent = Volume::new(folder.path().join("agent"), &client(&old, &authority));
        let plane = Plane::start(
            folder.path(),
            &of_plane,
            identity::AuthenticatorConfig::default(),
        )
        .await;
        let plane = Arc::new(plane);
        let relay = Relay::start(plane.agents()).await;
        let flags = |pair: KeyPair| {
            let names = ["client-certificate", "client-key", "certificate-authority"];
            let files = [pair.certificate, pair.key, of_agent.file("ca.crt")];
            names.into_iter().zip(files).collect::<Vec<_>>()
        };
        let own = of_agent.pair("n1");
        let agents = [
            agent(&plane, "n1", relay.address, &flags(own)).await,
            agent(&plane, "n2", plane.agents(), &flags(old.pair("nodes/n2"))).await,
        ];
        Self {
            old,
            new,
            of_plane,
            of_agent,
            plane,
            relay,
            agents,
            _folder: folder,
        }
    }

    /// Returns a caller who trusts what the agent trusts.
    fn caller(&self, certs: &Certs, name: &str) -> Caller {
        Caller {
            authorities: self.of_agent.file("ca.crt"),
            pair: Some(certs.pair(name)),
            token: None,
        }
    }

    /// Returns a user who trusts the new authority alone.
    fn modern(&self, certs: &Certs) -> Caller {
        let authorities = self.new.file("ca.crt");
        let caller = self.caller(certs, "users/alice");
        Caller {
            authorities,
            ..caller
        }
    }

    fn callers(&self, certs: &Certs) -> [Caller; 2] {
        ["users/alice", "nodes/n9"].map(|name| self.caller(certs, name))
    }

    fn streams(&self) -> [Option<Instant>; 2] {
        ["n1", "n2"].map(|node| self.plane.stream(node))
    }
}

#[tokio::test]
async fn every_certificate_may_be_replaced_while_agents_work() {
    let stage = Stage::build().await;
    let (old, new, plane) = (&stage.old, &stage.new, &stage.plane);
    let both = [old.read("ca.crt"), new.read("ca.crt")].concat();
    let since = stage.streams();
    let probes = Probes::start(plane, stage.callers(old));

    // The authorities of clients: both. Then those of servers, and the agent's own certificate.
    stage.of_plane.replace(&server(old, old, &both));
    let newcomer = stage.caller(new, "users/alice");
    until("the new authority counts", async || {
        newcomer.asks(plane).await.is_ok()
    })
    .await;
    stage.of_agent.replace(&client(new, &both));
    probes.change(|now| *now = stage.callers(new)).await;

    // The server's certificate, and later its key: the previous pair serves meanwhile.
    stage.of_plane.replace(&server(new, old, &both));
    sleep(INTERVAL * 2).await;
    let modern = stage.modern(new);
    let early = modern.asks(plane).await;
    assert!(early.is_err(), "a certificate without its key");
    stage.of_plane.replace(&server(new, new, &both));
    until("the new certificate serves", async || {
        modern.asks(plane).await.is_ok()
    })
    .await;
    assert_eq!(stage.streams(), since);
    stage.relay.cut(plane, "n1").await;

    // The old authority goes.
    let last = server(new, new, &new.read("ca.crt"));
    stage.of_plane.replace(&last);
    let outdated = stage.modern(old);
    until("the old authority is gone", async || {
        outdated.asks(plane).await.is_err()
    })
    .await;
    stage.relay.cut(plane, "n1").await;
    let now = stage.streams();
    assert_eq!(now[1], since[1], "a stream stays with its certificate");

    probes.have_not_failed();
    drop(probes);
    assert_eq!(plane.refusals(), 0);
    let [moving, staying] = &stage.agents;
    plane.is_complete(&[moving, staying]).await;
}

/// The tokens and the rights of the callers: those of before, those of afterwards, or both.
fn tokens(of: &[u8]) -> String {
    of.iter()
        .map(|number| {
            format!("agent-{number},system:node:n1,1,system:nodes\nalice-{number},alice,2,\n")
        })
        .collect::<String>()
        + "n9,system:node:n9,3,system:nodes\nbob,bob,4,\n"
}

fn rights(of: &str) -> String {
    format!("rules: [{{users: [{of}], verbs: [get], paths: [/kplane/status]}}]\n")
}

#[tokio::test]
async fn every_token_and_right_may_be_replaced_while_agents_work() {
    let folder = TempDir::new().unwrap();
    let certs = Certs::new();
    let file = |name: &str| folder.path().join(name);
    let of_plane = ["server.crt", "server.key", "ca.crt"].map(|name| (name, certs.read(name)));
    let of_plane = Volume::new(file("plane"), &of_plane);
    let of_agent = Volume::new(file("agent"), &[("token", b"agent-1\n".to_vec())]);
    fs::write(file("tokens.csv"), tokens(&[1])).unwrap();
    fs::write(file("rights.yaml"), rights("alice")).unwrap();
    let identity = identity::AuthenticatorConfig {
        token_auth_file: Some(file("tokens.csv")),
        authorization_file: Some(file("rights.yaml")),
        ..identity::AuthenticatorConfig::default()
    };
    let plane = Arc::new(Plane::start(folder.path(), &of_plane, identity).await);
    let relay = Relay::start(plane.agents()).await;
    let authorities = of_plane.file("ca.crt");
    let flags = [
        ("certificate-authority", authorities.clone()),
        ("token-file", of_agent.file("token")),
    ];
    let agent = agent(&plane, "n1", relay.address, &flags).await;
    let since = plane.stream("n1");
    let caller = |token| Caller {
        authorities: authorities.clone(),
        pair: None,
        token: Some(token),
    };
    let probes = Probes::start(&plane, ["alice-1", "n9"].map(caller));

    // The agent has its new token before the control plane does: its stream stays.
    of_agent.replace(&[("token", b"agent-2\n".to_vec())]);
    until("the agent sends its token", async || plane.refusals() > 0).await;
    replace(&file("tokens.csv"), &tokens(&[1, 2]));
    let newcomer = caller("alice-2");
    until("both tokens count", async || {
        newcomer.asks(&plane).await.is_ok()
    })
    .await;
    assert_eq!(plane.stream("n1"), since);
    relay.cut(&plane, "n1").await;
    probes.change(|now| now[0] = newcomer).await;

    // The old tokens go.
    replace(&file("tokens.csv"), &tokens(&[2]));
    let outdated = caller("alice-1");
    until("the old token is gone", async || {
        let asked = outdated.asks(&plane).await;
        asked.is_err_and(|status| status.code() == Code::Unauthenticated)
    })
    .await;
    relay.cut(&plane, "n1").await;

    // Rights come and go.
    let bob = caller("bob");
    assert_eq!(
        bob.asks(&plane).await.unwrap_err().code(),
        Code::PermissionDenied
    );
    replace(&file("rights.yaml"), &rights("alice, bob"));
    until("bob may read", async || bob.asks(&plane).await.is_ok()).await;
    replace(&file("rights.yaml"), &rights("alice"));
    until("bob may not read", async || bob.asks(&plane).await.is_err()).await;

    probes.have_not_failed();
    drop(probes);
    let refusals = plane.bound.authenticator().refusals().into_iter();
    let of_agents = refusals.filter(|(port, _, count)| *port == Port::Agents && *count > 0);
    let refused: Vec<_> = of_agents.map(|(_, reason, count)| (reason, count)).collect();
    assert_eq!(
        refused,
        [(RefusalReason::BadCredential, 1)],
        "the early token, once"
    );
    plane.is_complete(&[&agent]).await;
}
