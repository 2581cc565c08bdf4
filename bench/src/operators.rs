//! What operators wait for: the time and size of kpctl's answers about 5,000 nodes and 10,000 Services.
//!
//! `cargo xtask bench operators` prints a table.
//! The control plane is the real one, and so is kpctl. Agents are streams that hold everything; some have problems.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use kp_controlplane::app::{Bound, Config, Origin, build};
use kplane_proto::v1::agent_service_client::AgentServiceClient;
use kplane_proto::v1::{self as pb, AgentMessage, agent_message};
use kplane_rig::browser::Browser;
use kplane_rig::netns::NetNs;
use nix::sys::resource::{UsageWho, getrusage};
use tokio::io::{AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};

const NODES: usize = 5_000;
const SERVICES: usize = 10_000;
/// Connections of each node to the Service of which `kpctl get flows` asks: 100,000 in all.
const CONNECTIONS: usize = 20;
/// Services of the largest cluster that kube-proxy's users report.
const MANY_SERVICES: usize = 17_000;
/// Agents on one connection.
const SHARED: usize = 16;
/// Runs of each command, of which the median counts.
const RUNS: usize = 7;
/// A deadline far above anything that is measured.
const DEADLINE: Duration = Duration::from_secs(300);

/// The commands about the fleet, each with its goal in milliseconds.
const COMMANDS: [(&[&str], u128); 10] = [
    (&["status"], 300),
    (&["status", "--all"], 300),
    (&["status", "ip-10-0-0-3.eu-west-1.compute.internal"], 300),
    (&["check"], 300),
    (
        &["describe", "service", "team-7/a-service-of-a-team-00007"],
        300,
    ),
    (
        &[
            "why",
            "team-7/a-service-of-a-team-00007",
            "--from",
            "node/ip-10-0-0-3.eu-west-1.compute.internal",
        ],
        300,
    ),
    (&["get", "service", "team-7/a-service-of-a-team-00007"], 300),
    (&["flows", "team-7/a-service-of-a-team-00007"], 2_000),
    (&["get", "nodes"], 1_000),
    (&["get", "services"], 1_000),
];

fn node(n: usize) -> String {
    format!(
        "ip-10-{}-{}-{}.eu-west-1.compute.internal",
        n >> 16,
        n >> 8 & 255,
        n & 255
    )
}

/// Returns so many Services with two endpoints each.
fn manifests(folder: &Path, services: usize) {
    for file in 0..services / 1_000 {
        let mut text = String::new();
        for n in file * 1_000..(file + 1) * 1_000 {
            let (high, low) = (n >> 8, n & 255);
            let name = format!("a-service-of-a-team-{n:05}");
            let endpoints: String = (0..2)
                .map(|e| {
                    let node = node((n * 2 + e) % NODES);
                    format!(
                        "  - {{addresses: [10.{}.{high}.{low}], nodeName: {node}, \
                         conditions: {{ready: true}}}}\n",
                        128 + e
                    )
                })
                .collect();
            write!(
                text,
                "apiVersion: v1\nkind: Service\nmetadata: {{namespace: team-{team}, name: {name}}}\n\
                 spec:\n  clusterIP: 10.96.{high}.{low}\n  clusterIPs: [10.96.{high}.{low}]\n  \
                 ports: [{{name: http, port: 80, targetPort: 8080, protocol: TCP}}]\n---\n\
                 apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  namespace: team-{team}\n  \
                 name: {name}-x\n  labels: {{kubernetes.io/service-name: {name}}}\naddressType: IPv4\n\
                 ports: [{{name: http, port: 8080, protocol: TCP}}]\nendpoints:\n{endpoints}---\n",
                team = n % 40,
            )
            .unwrap();
        }
        std::fs::write(folder.join(format!("{file}.yaml")), text).unwrap();
    }
}

async fn control_plane(folder: &Path, services: usize) -> Bound {
    manifests(folder, services);
    let any = Some("127.0.0.1:0".parse().unwrap());
    let config = Config {
        agent_listen: any,
        status_listen: any,
        ..Config::new(Origin::Manifests(folder.to_owned()))
    };
    let bound = build(config).await.unwrap();
    let mut head = bound.hub().store().head();
    let synced = head.wait_for(|head| head.synced);
    tokio::time::timeout(DEADLINE, synced).await.unwrap().unwrap();
    bound
}

/// Returns the report of an agent that holds everything.
fn report(n: usize, epoch: u64, revision: u64) -> pb::Report {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let now = u64::try_from(now.as_millis()).unwrap();
    let family = |family: pb::Family| pb::FamilyStatus {
        family: family.into(),
        programmed: true,
        verified_at_ms: now,
        ..pb::FamilyStatus::default()
    };
    let mut report = pb::Report {
        epoch,
        received_revision: revision,
        applied_revision: revision,
        verified_revision: revision,
        families: vec![family(pb::Family::Ipv4), family(pb::Family::Ipv6)],
        objects: Some(pb::ObjectCounts {
            services: SERVICES as u64,
            endpoints: 2 * SERVICES as u64,
        }),
        last_sync: Some(pb::SyncStats {
            revision,
            finished_at_ms: now,
            total_us: 400 + n as u64 % 97,
            plan_us: 30,
            encode_us: 40,
            kernel_us: 300,
            operations: 2,
            bytes: 208,
            end_to_end_ms: 4,
        }),
        round_trip_us: 200 + n as u64 % 89,
        syncs_ok: 42,
        ..pb::Report::default()
    };
    if n % 700 == 3 {
        report.failures.push(pb::ObjectFailure {
            key: Some(pb::ServiceKey {
                namespace: "team-7".to_owned(),
                name: "a-service-of-a-team-00007".to_owned(),
                port_name: "http".to_owned(),
                protocol: pb::Protocol::Tcp.into(),
                family: pb::Family::Ipv4.into(),
            }),
            reason: "node port 30080 is in use by another program; stop it or choose another port"
                .to_owned(),
            since_ms: now - 60_000,
            ..pb::ObjectFailure::default()
        });
    }
    report
}

/// Begins the stream of an agent that holds everything already, and keeps it.
async fn agent(n: usize, channel: Channel, bound: Arc<Bound>) {
    let (store, node) = (bound.hub().store(), node(n));
    let revision = store.head().borrow().revision;
    let hello = pb::Hello {
        protocol_version: 1,
        node_name: node.clone(),
        agent_version: "0.1.0".to_owned(),
        backend: "nftables".to_owned(),
        instance: n as u64 + 1,
        resume: Some(pb::ResumeToken {
            schema: kplane_proto::DIGEST_SCHEMA,
            epoch: store.epoch(),
            revision,
            digest: store.digest(&node).to_bytes().to_vec(),
        }),
        ..pb::Hello::default()
    };
    let (send, outbound) = mpsc::channel(4);
    let message = |kind| AgentMessage { kind: Some(kind) };
    send.send(message(agent_message::Kind::Hello(hello))).await.unwrap();
    let mut answers = AgentServiceClient::new(channel)
        .sync(ReceiverStream::new(outbound))
        .await
        .unwrap()
        .into_inner();
    let report = report(n, store.epoch(), revision);
    send.send(message(agent_message::Kind::Report(report))).await.unwrap();
    while let Ok(Some(answer)) = answers.message().await {
        let reply = match answer.kind {
            Some(pb::server_message::Kind::Ping(ping)) => {
                agent_message::Kind::Pong(pb::Pong { token: ping.token })
            }
            Some(pb::server_message::Kind::Inspect(asked)) => {
                agent_message::Kind::Inspection(pb::Inspection {
                    token: asked.token,
                    connected: asked.connected.map(|asked| connected(n, asked.most as usize)),
                    ..pb::Inspection::default()
                })
            }
            _ => continue,
        };
        let _ = send.send(message(reply)).await;
    }
}

/// Returns the connections of a node, each of another client, as far as so many groups are wanted.
fn connected(n: usize, most: usize) -> pb::Connected {
    let groups = (0..CONNECTIONS).map(|client| pb::ConnectedGroup {
        client: format!("10.{}.{}.{client}", 64 + (n >> 8), n & 255),
        endpoint: "10.128.0.7:8080".to_owned(),
        table: pb::ConnectionTable::Conntrack.into(),
        established: 1,
        ..pb::ConnectedGroup::default()
    });
    pb::Connected {
        groups: groups.take(most).collect(),
        more: CONNECTIONS.saturating_sub(most) as u64,
        read: CONNECTIONS as u64,
        error: String::new(),
    }
}

/// A relay to an address, which counts the bytes that come back.
async fn counted(to: SocketAddr) -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let bytes = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&bytes);
    tokio::spawn(async move {
        while let Ok((mut here, _)) = listener.accept().await {
            let counter = Arc::clone(&counter);
            tokio::spawn(async move {
                let mut there = TcpStream::connect(to).await.unwrap();
                let back = copy_bidirectional(&mut here, &mut there).await;
                counter.fetch_add(back.map_or(0, |(_, back)| back), Ordering::SeqCst);
            });
        }
    });
    (address, bytes)
}

/// Runs a command several times; prints the median time, and its bytes on the wire and on standard output.
async fn measure(server: SocketAddr, args: &'static [&'static str], goal_ms: u128) {
    let (relay, wire) = counted(server).await;
    let mut times = Vec::new();
    let mut printed = 0;
    for _ in 0..RUNS {
        let run = tokio::task::spawn_blocking(move || {
            let mut command = Command::new(crate::program("kpctl").unwrap());
            command.args(args).env("KPLANE_SERVER", relay.to_string());
            command.stdin(Stdio::null()).env_remove("KUBECONFIG");
            let started = Instant::now();
            let output = command.output().unwrap();
            (started.elapsed(), output)
        });
        let (took, output) = run.await.unwrap();
        times.push(took);
        printed = output.stdout.len();
        assert!(
            printed > 0,
            "{args:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    // The relay counts when a connection has ended.
    tokio::time::sleep(Duration::from_millis(50)).await;
    times.sort();
    let (median, wire) = (
        times[RUNS / 2].as_millis(),
        wire.load(Ordering::SeqCst) / RUNS as u64,
    );
    let late = if median > goal_ms { "  too slow" } else { "" };
    println!(
        "{:<62} {median:>6} ms {:>8} KB {:>8} KB{late}",
        args.join(" "),
        wire / 1_000,
        printed / 1_000
    );
}

async fn fleet() {
    let folder = tempfile::tempdir().unwrap();
    let bound = Arc::new(control_plane(folder.path(), SERVICES).await);
    let agents = format!("http://{}", bound.agent_addr.unwrap());
    let mut streams = JoinSet::new();
    let mut channel = None;
    for n in 0..NODES {
        if n % SHARED == 0 {
            let endpoint = Endpoint::from_shared(agents.clone()).unwrap();
            channel = Some(endpoint.connect().await.unwrap());
        }
        streams.spawn(agent(n, channel.clone().unwrap(), Arc::clone(&bound)));
    }
    let mut changes = bound.hub().agents().changes();
    let all_there = async {
        loop {
            let records = bound.hub().agents().records();
            if records.iter().filter(|(_, of)| of.report.is_some()).count() == NODES {
                return;
            }
            changes.changed().await.unwrap();
        }
    };
    tokio::time::timeout(DEADLINE, all_there).await.unwrap();
    println!(
        "{NODES} nodes, {SERVICES} Services{:>48} {:>11} {:>11}",
        "time", "wire", "printed"
    );
    let status = bound.status_addr.unwrap();
    for (command, goal_ms) in COMMANDS {
        measure(status, command, goal_ms).await;
    }
    tokio::task::spawn_blocking(move || page(status)).await.unwrap();
    viewers(status).await;
}

/// Shows the page to a real browser: the first paint, the bytes on the wire, and the memory of the page after a while.
fn page(status: SocketAddr) {
    /// Time for which the page is open before its memory is measured.
    const OPEN: Duration = Duration::from_secs(60);
    let here = NetNs::current("bench").unwrap();
    let browser = Browser::start(&here).unwrap();
    println!("\n{:<62} {:>9} {:>11}", "the page", "painted", "wire");
    let service = "service?namespace=team-7&name=a-service-of-a-team-00007";
    let node = "node?name=ip-10-0-0-3.eu-west-1.compute.internal";
    for sheet in [
        "fleet", "nodes", "services", "changes", "reasons", service, node,
    ] {
        let tab = browser.tab().unwrap();
        assert_eq!(
            tab.open(&format!("http://{status}/page/{sheet}")).unwrap(),
            200
        );
        let cost = tab.cost().unwrap();
        let (painted, bytes) = (cost.first_paint.as_millis(), cost.bytes / 1_000);
        println!("{sheet:<62} {painted:>6} ms {bytes:>8} KB");
    }
    let tab = browser.tab().unwrap();
    tab.open(&format!("http://{status}/page/fleet")).unwrap();
    std::thread::sleep(OPEN);
    println!(
        "{:<62} {:>6} KB",
        "memory of the fleet's sheet after a minute",
        tab.heap().unwrap() / 1_000
    );
}

/// Lets many viewers follow the sheet of the fleet, and measures what they cost the process.
async fn viewers(status: SocketAddr) {
    const VIEWERS: usize = 100;
    const WATCHED: Duration = Duration::from_secs(20);
    let used = || {
        let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
        let times = [usage.user_time(), usage.system_time()];
        let micros = times.map(|time| time.tv_sec() * 1_000_000 + time.tv_usec());
        Duration::from_micros(micros.iter().sum::<i64>().try_into().unwrap())
    };
    let measured = || async {
        let before = used();
        tokio::time::sleep(WATCHED).await;
        (used() - before).as_secs_f64() / WATCHED.as_secs_f64()
    };
    let alone = measured().await;
    let mut streams = JoinSet::new();
    for _ in 0..VIEWERS {
        let mut stream = TcpStream::connect(status).await.unwrap();
        let request = format!("GET /page/live?sheet=fleet HTTP/1.1\r\nHost: {status}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        streams.spawn(async move {
            let mut sink = tokio::io::sink();
            tokio::io::copy(&mut stream, &mut sink).await
        });
    }
    let with = measured().await;
    println!(
        "{VIEWERS} viewers of the fleet's sheet: {:.1} % of a core (the process without them: {:.1} %)",
        (with - alone) * 100.0,
        alone * 100.0
    );
}

async fn many_services() {
    let folder = tempfile::tempdir().unwrap();
    let bound = control_plane(folder.path(), MANY_SERVICES).await;
    println!("{MANY_SERVICES} Services");
    let status = bound.status_addr.unwrap();
    measure(status, &["get", "services"], 1_000).await;
    measure(status, &["get", "endpoints"], 1_000).await;
    measure(status, &["get", "services", "-o", "json"], 1_000).await;
    measure(
        status,
        &["get", "services", "-n", "team-7", "--sort-by", "name"],
        1_000,
    )
    .await;
}

#[tokio::main]
pub(crate) async fn main() {
    fleet().await;
    many_services().await;
}
