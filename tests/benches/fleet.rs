//! `cargo xtask bench`: many agents with certificates at one control plane. The agents are simulated: real TLS and
//! the real protocol, no kernel. Control plane and agents share the machine.

#![allow(clippy::unwrap_used, reason = "a benchmark may panic")]

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use floods::beside_floods;
use hyper_util::rt::TokioIo;
use kplane_http::client::becomes;
use kplane_proto::v1::agent_service_client::AgentServiceClient;
use kplane_proto::v1::{self as pb, AgentMessage, Hello, agent_message, server_message};
use kplane_rig::usage;
use kplane_tests::bench::workload::{percentiles, show};
use kplane_tests::netns::NetNs;
use kplane_tls::{ClientFiles, Files as _, KeyPair, greet};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tempfile::TempDir;
use tokio::net::TcpSocket;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;

/// Numbers of agents, and of Services that each gets.
const FLEETS: [(u32, u32); 4] = [(1_000, 1), (10_000, 1), (5_000, 10_000), (10_000, 10_000)];
/// Agents beside floods.
const BESIDE: u32 = 1_000;
/// Changes of one endpoint.
const CHANGES: usize = 20;
/// Nothing here takes longer.
const DEADLINE: Duration = Duration::from_secs(120);
const AGENT_PORT: u16 = 7443;
/// Address of the first agent: 127.1.0.1.
const OWN: u32 = 0x7f01_0001;
const READINESS: ([u8; 4], u16) = ([127, 0, 0, 1], 7445);

#[path = "fleet/floods.rs"]
mod floods;

/// The last revision that an agent has, and when it came.
type Seen = (u64, Instant);

fn main() {
    kplane_tests::userns::enter().unwrap();
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    println!("agents with mutual TLS at one control plane, all on one machine\n");
    println!(
        "{:>7} {:>8} | {:>9} {:>11} {:>8} {:>11} | change at all agents: {:>8} {:>8} {:>8} {:>8} {:>12}",
        "agents",
        "Services",
        "connected",
        "CPU",
        "memory",
        "each",
        "p50",
        "p90",
        "p99",
        "max",
        "CPU per agent"
    );
    for (agents, services) in FLEETS {
        apart(measure(agents, services));
    }
    println!("\n{BESIDE} agents beside floods from another address\n");
    println!(
        "{:>12} | {:>11} {:>11} | change at all agents: {:>8} {:>8} {:>8} {:>8} {:>8}",
        "flood", "connections", "CPU a second", "p50", "p90", "p99", "max", "p99"
    );
    apart(beside_floods(BESIDE));
}

/// Runs a measurement in a network of its own.
fn apart(measurement: impl Future<Output = ()>) {
    let ns = NetNs::new("fleet").unwrap();
    let _inside = ns.enter().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(measurement);
}

/// A control plane, which ends with this value.
struct Plane(Child);

impl Drop for Plane {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A control plane with simulated agents.
struct Fleet {
    // Fields drop in order: the control plane before its files.
    plane: Plane,
    seen: Vec<watch::Receiver<Seen>>,
    certs: PathBuf,
    manifests: PathBuf,
    revision: u64,
    /// Number of the last change.
    change: u8,
    _folder: TempDir,
}

impl Fleet {
    /// Starts a control plane that knows the agents, and nobody else.
    async fn start(agents: u32, services: u32) -> Self {
        let folder = TempDir::new().unwrap();
        let certs = folder.path().join("certs");
        let manifests = folder.path().join("objects");
        fs::create_dir(&manifests).unwrap();
        write_objects(&manifests, agents, services);
        write_endpoint(&manifests, 1);
        make_certs(&certs, &names(agents));
        Self {
            plane: start(&certs, &manifests).await,
            seen: Vec::new(),
            certs,
            manifests,
            revision: 0,
            change: 1,
            _folder: folder,
        }
    }

    /// Connects all agents, and waits until they have everything.
    async fn connect(&mut self, agents: u32) {
        let begun = Instant::now();
        for name in names(agents) {
            let (seen, follow) = watch::channel((0, begun));
            tokio::spawn(agent(self.certs.clone(), name, seen));
            self.seen.push(follow);
        }
        self.revision = newest(&mut self.seen, 0).await;
    }

    /// Changes an endpoint again and again; returns the sorted times until each agent had each change, and the CPU
    /// time of the control plane.
    async fn change(&mut self) -> (Vec<Duration>, Duration) {
        let pid = [self.plane.0.id()];
        let (mut latencies, mut spent) = (Vec::new(), Duration::ZERO);
        for _ in 0..CHANGES {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let cpu = usage::cpu(&pid).unwrap();
            let changed = Instant::now();
            self.change += 1;
            write_endpoint(&self.manifests, self.change);
            self.revision = newest(&mut self.seen, self.revision).await;
            let arrived = self.seen.iter().map(|seen| seen.borrow().1 - changed);
            latencies.extend(arrived);
            spent += usage::cpu(&pid).unwrap() - cpu;
        }
        latencies.sort_unstable();
        (latencies, spent)
    }
}

fn names(agents: u32) -> Vec<String> {
    (0..agents).map(|number| format!("n{number}")).collect()
}

async fn measure(agents: u32, services: u32) {
    let mut fleet = Fleet::start(agents, services).await;
    let pid = [fleet.plane.0.id()];
    let before = (usage::memory(&pid).unwrap(), usage::cpu(&pid).unwrap());
    let begun = Instant::now();
    fleet.connect(agents).await;
    let connected = begun.elapsed();
    let (memory, cpu) = (usage::memory(&pid).unwrap(), usage::cpu(&pid).unwrap());
    let each = (memory.now - before.0.now) / 1_024 / u64::from(agents);
    let (latencies, spent) = fleet.change().await;
    let per_agent = spent / u32::try_from(CHANGES).unwrap() / agents;
    println!(
        "{agents:>7} {services:>8} | {:>9} {:>11} {:>4} MiB {:>7} KiB |                       {} {:>12}",
        show(connected),
        show(cpu - before.1),
        memory.now >> 20,
        each,
        percentiles(&latencies),
        show(per_agent),
    );
}

/// Waits until all agents have a newer revision; returns it.
async fn newest(fleet: &mut [watch::Receiver<Seen>], before: u64) -> u64 {
    let mut newest = before;
    for seen in fleet {
        let newer = seen.wait_for(|(revision, _)| *revision > before);
        let newer = tokio::time::timeout(DEADLINE, newer).await.unwrap();
        newest = newest.max(newer.unwrap().0);
    }
    newest
}

/// An agent that connects until it is served, after growing random pauses as real ones do.
async fn agent(certs: PathBuf, name: String, seen: watch::Sender<Seen>) {
    for attempt in 1_u64.. {
        // Whatever the reason: an agent that was not served comes back.
        let _ = stream(&certs, &name, &seen).await;
        if seen.borrow().0 > 0 {
            return;
        }
        let pause = rand::random_range(0..100 << attempt.min(6));
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }
}

/// A stream that takes updates, and answers pings.
async fn stream(
    certs: &Path,
    name: &str,
    seen: &watch::Sender<Seen>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let pair = |kind: &str| certs.join(format!("nodes/{name}.{kind}"));
    let files = ClientFiles {
        authorities: certs.join("ca.crt"),
        pair: Some(KeyPair {
            certificate: pair("crt"),
            key: pair("key"),
        }),
    };
    let config = files.load()?;
    let address = SocketAddr::from(([127, 0, 0, 1], AGENT_PORT));
    // As in a cluster, each agent has an address of its own.
    let number: u32 = name.trim_start_matches('n').parse()?;
    let own = std::net::Ipv4Addr::from(OWN + number);
    let connect = move |_| {
        let config = Arc::clone(&config);
        async move {
            let socket = TcpSocket::new_v4()?;
            socket.bind((own, 0).into())?;
            let stream = socket.connect(address).await?;
            greet(stream, Some(config), "localhost")
                .await
                .map(TokioIo::new)
        }
    };
    let endpoint = Endpoint::from_static("https://localhost");
    let channel = endpoint.connect_with_connector(tower::service_fn(connect));
    let channel = channel.await?;
    let (outbox, messages) = mpsc::channel(4);
    let send = |kind| outbox.try_send(AgentMessage { kind: Some(kind) }).is_ok();
    let hello = Hello {
        protocol_version: kplane_proto::PROTOCOL_VERSION,
        node_name: name.to_owned(),
        ..Hello::default()
    };
    assert!(send(agent_message::Kind::Hello(hello)));
    let mut client = AgentServiceClient::new(channel);
    let answer = client.sync(ReceiverStream::new(messages)).await?;
    let mut stream = answer.into_inner();
    while let Some(message) = stream.message().await? {
        match message.kind {
            Some(server_message::Kind::Update(pb::Update { end: Some(end), .. })) => {
                seen.send_replace((end.revision, Instant::now()));
            }
            Some(server_message::Kind::ComeBackLater(later)) => {
                tokio::time::sleep(Duration::from_millis(later.after_ms.into())).await;
                return Ok(());
            }
            Some(server_message::Kind::Ping(ping)) => {
                let pong = pb::Pong { token: ping.token };
                send(agent_message::Kind::Pong(pong));
            }
            _ => {}
        }
    }
    Ok(())
}

async fn start(certs: &Path, manifests: &Path) -> Plane {
    let file = |name: &str| certs.join(name);
    let program = std::env::current_exe().unwrap();
    // The benchmark is in target/PROFILE/deps.
    let program = program.ancestors().nth(2).unwrap().join("kp-controlplane");
    let child = Command::new(program)
        .args([
            "--http-listen",
            &SocketAddr::from(READINESS).to_string(),
            "--audit-log=",
        ])
        .args(["--manifests".as_ref(), manifests.as_os_str()])
        .args(["--tls-cert-file".as_ref(), file("server.crt").as_os_str()])
        .args([
            "--tls-private-key-file".as_ref(),
            file("server.key").as_os_str(),
        ])
        .args(["--client-ca-file".as_ref(), file("ca.crt").as_os_str()])
        .env("RUST_LOG", "error")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let plane = Plane(child);
    becomes(READINESS.into(), "/readyz", 200).await;
    // Until work that the start has left over is done.
    tokio::time::sleep(Duration::from_secs(2)).await;
    plane
}

fn make_certs(folder: &Path, nodes: &[String]) {
    use kp_controlplane::certs::{Command, run};
    let (dir, host) = (folder.to_owned(), Vec::new());
    run(&Command::Init { dir, host }).unwrap();
    let (dir, names) = (folder.to_owned(), nodes.to_vec());
    run(&Command::Node { dir, names }).unwrap();
}

/// Writes Nodes, the Service whose endpoint changes, and further Services with two endpoints each.
fn write_objects(folder: &Path, nodes: u32, services: u32) {
    let mut text = String::from(
        "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\n\
         spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{name: http, port: 80}]}\n",
    );
    for number in 1..services {
        let [_, _, high, low] = number.to_be_bytes();
        text += &format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: s{number}, namespace: bench}}\n\
             spec: {{clusterIP: 10.97.{high}.{low}, ports: [{{name: http, port: 80}}]}}\n---\n\
             apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n\
             metadata: {{name: s{number}-1, namespace: bench, labels: {{kubernetes.io/service-name: s{number}}}}}\n\
             ports: [{{name: http, port: 8080}}]\n\
             endpoints: [{{addresses: [10.245.{high}.{low}]}}, {{addresses: [10.246.{high}.{low}]}}]\n"
        );
    }
    for node in 0..nodes {
        text += &format!("---\napiVersion: v1\nkind: Node\nmetadata: {{name: n{node}}}\n");
    }
    fs::write(folder.join("objects.yaml"), text).unwrap();
}

/// Writes the Service's one endpoint.
fn write_endpoint(folder: &Path, number: u8) {
    let text = format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n\
         metadata: {{name: web-1, namespace: shop, labels: {{kubernetes.io/service-name: web}}}}\n\
         ports: [{{name: http, port: 8080}}]\n\
         endpoints: [{{addresses: [10.244.0.{number}], conditions: {{ready: true}}}}]\n"
    );
    let new = folder.join("slice.new");
    fs::write(&new, text).unwrap();
    fs::rename(new, folder.join("slice.yaml")).unwrap();
}
