//! `cargo xtask bench`: how long a change takes, in a real kernel.
//!
//! First the agent alone, fed with messages as they come from the wire: snapshot to kernel, and
//! one endpoint changed, at several sizes. Then both programs as a user starts them: memory, and
//! from writing a YAML file to the kernel. Speeds gate nothing; they are printed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a benchmark may panic"
)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use kp_controlplane::publish::{Cursor, Publication, Published, Store};
use kp_nodeagent::backend::{Kind, Settings};
use kp_nodeagent::desired::Collector;
use kp_nodeagent::engine::Engine;
use kp_nodeagent::plan::NodeSettings;
use kplane_model::select::variants;
use kplane_model::{
    Endpoint, EndpointAddr, Family, Protocol, ServiceKey, ServiceName, ServicePort, TrafficPolicy,
};
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_proto::v1::{self as pb, server_message};
use kplane_tests::netns::NetNs;
use kplane_tests::process::Process;
use prost::Message;

/// Changes that percentiles are taken from.
const CHANGES: usize = 2_000;
/// Edits of a file that percentiles are taken from.
const EDITS: usize = 100;
/// Services of the run with files.
const FILE_SERVICES: u32 = 10_000;
/// Services in one file.
const PER_FILE: u32 = 10;
const STATUS: &str = "127.0.0.1:7444";
/// Nothing here takes longer.
const DEADLINE: Duration = Duration::from_secs(120);

fn main() {
    kplane_tests::userns::enter().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    println!(
        "one agent, nftables, IPv4, 2 endpoints a Service; {CHANGES} changes of one endpoint each\n"
    );
    println!(
        "{:>8} {:>10} {:>10} {:>9} | {:>8} {:>8} {:>8} {:>8} | {:>6} {:>5}",
        "services", "snapshot", "encode", "to kernel", "p50", "p90", "p99", "max", "wire", "ops"
    );
    for services in [1_000, 10_000, 100_000] {
        let ns = NetNs::new("bench").unwrap();
        println!("{}", runtime.block_on(agent_alone(ns, services)));
    }
    println!(
        "\nkube-proxy v1.36.3, nftables, on such a machine (measured by hand once): 10,000 Services cold 9.4 s, one endpoint 3.2 s\n"
    );
    files(&runtime);
}

fn endpoint(n: u32) -> Endpoint {
    let ip = Ipv4Addr::from_bits(u32::from(Ipv4Addr::new(10, 128, 0, 0)) + n);
    Endpoint::ready(EndpointAddr {
        ip: IpAddr::V4(ip),
        port: 8080,
    })
}

fn cluster_ip(n: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::from(Ipv4Addr::new(10, 96, 0, 1)) + n)
}

fn service(n: u32, endpoints: &[Endpoint]) -> (ServiceKey, Option<Published>) {
    let key = ServiceKey {
        service: ServiceName::new("default", &format!("service-{n:05}")),
        port_name: "http".into(),
        protocol: Protocol::Tcp,
        family: Family::V4,
    };
    let port = ServicePort {
        key: key.clone(),
        port: 80,
        cluster_ip: cluster_ip(n).into(),
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        node_port: None,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        affinity_timeout_s: None,
        source_ranges: Vec::new(),
        health_check_node_port: None,
    };
    let variants = variants(&port, endpoints);
    (
        key,
        Some(Published {
            port,
            variants,
            local: BTreeMap::new(),
        }),
    )
}

fn publish(store: &Store, services: Vec<(ServiceKey, Option<Published>)>) {
    store.publish(&Publication {
        services,
        nodes: Vec::new(),
        service_cidrs: None,
        observed_at: SystemTime::now(),
    });
}

/// What the control plane would send to a node next, and its length on the wire.
fn messages(store: &Store, cursor: &mut Cursor, snapshot: bool) -> (Vec<pb::Update>, usize) {
    let (mut updates, mut bytes) = (Vec::new(), 0);
    loop {
        let piece = store.collect("bench", cursor);
        let last = piece.end.is_some();
        let update = pb::Update {
            objects: piece.objects,
            deleted: piece.deleted.iter().map(Into::into).collect(),
            snapshot: snapshot && updates.is_empty(),
            end: piece.end.map(|end| pb::UpdateEnd {
                revision: end.revision,
                digest: end.digest.to_bytes().to_vec(),
                changed_at_ms: 1_800_000_000_000,
            }),
        };
        let message = pb::ServerMessage {
            kind: Some(server_message::Kind::Update(update.clone())),
        };
        // gRPC puts five bytes in front of each.
        bytes += message.encoded_len() + 5;
        updates.push(update);
        if last {
            return (updates, bytes);
        }
    }
}

/// One line of the table.
async fn agent_alone(ns: NetNs, services: u32) -> String {
    let store = Store::new(1);
    store.ensure_node(&"bench".into());
    let all = (0..services)
        .map(|n| service(n, &[endpoint(2 * n), endpoint(2 * n + 1)]))
        .collect();
    let started = Instant::now();
    publish(&store, all);
    let encode = started.elapsed();
    let mut cursor = Cursor::at(0);
    let (snapshot, bytes) = messages(&store, &mut cursor, true);
    let open = move || {
        // The engine's thread lives in the namespace until it ends.
        std::mem::forget(ns.enter().unwrap());
        Kind::Nftables.open(&Settings::default())
    };
    let engine = Engine::spawn(open, NodeSettings::default()).await.unwrap();
    let cold = submit(&engine, snapshot).await.total;
    let mut took = Vec::with_capacity(CHANGES);
    let (mut wire, mut operations) = (0, 0);
    for change in 0..u32::try_from(CHANGES).unwrap() {
        // All over the place, a fresh address each time.
        let n = change.wrapping_mul(7_919) % services;
        let fresh = endpoint(1_000_000 + change);
        publish(&store, vec![service(n, &[endpoint(2 * n), fresh])]);
        let (update, bytes) = messages(&store, &mut cursor, false);
        let sync = submit(&engine, update).await;
        wire = wire.max(bytes);
        operations = operations.max(sync.operations);
        took.push(sync.total);
    }
    took.sort();
    format!(
        "{services:>8} {:>7} kB {:>10} {:>9} | {} | {wire:>4} B {operations:>5}",
        bytes / 1000,
        show(encode),
        show(cold),
        percentiles(&took)
    )
}

fn percentiles(sorted: &[Duration]) -> String {
    let at = |percent: usize| show(sorted[(sorted.len() - 1) * percent / 100]);
    format!("{:>8} {:>8} {:>8} {:>8}", at(50), at(90), at(99), at(100))
}

fn show(took: Duration) -> String {
    let us = took.as_secs_f64() * 1e6;
    match us {
        ..1_000.0 => format!("{us:.0} us"),
        ..100_000.0 => format!("{:.1} ms", us / 1e3),
        _ => format!("{:.0} ms", us / 1e3),
    }
}

/// Hands an update over and waits for the report that the kernel holds it.
async fn submit(engine: &Engine, pieces: Vec<pb::Update>) -> kp_nodeagent::report::Sync {
    let mut reports = engine.reports();
    let mut collector = Collector::new(1);
    let mut update = None;
    for piece in pieces {
        update = collector.push(piece).unwrap();
    }
    let update = update.expect("the last piece ends the update");
    let revision = update.position.revision;
    engine.submit(update).await.unwrap().unwrap();
    let applied = reports.wait_for(|r| r.applied.is_some_and(|p| p.revision >= revision));
    let report = tokio::time::timeout(DEADLINE, applied)
        .await
        .unwrap()
        .unwrap();
    report
        .last_sync
        .clone()
        .expect("an applied update has its times")
}

/// Both programs, as a user starts them, on a folder of files.
fn files(runtime: &tokio::runtime::Runtime) {
    let folder = std::env::temp_dir().join(format!("kplane-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for file in 0..FILE_SERVICES / PER_FILE {
        write(&folder, file, 0);
    }
    let ns = NetNs::new("bench-files").unwrap();
    let start = |program: &str, args: &[&str]| {
        let mut command = Command::new(programs().join(program));
        command
            .args(args)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .stdout(Stdio::null());
        ns.command(command).unwrap()
    };
    let manifests = folder.to_string_lossy().into_owned();
    let control_plane = start("kp-controlplane", &["--manifests", &manifests]);
    let agent = start(
        "kp-nodeagent",
        &[
            "--node-name",
            "bench",
            "--control-plane",
            "http://127.0.0.1:7443",
        ],
    );
    let inside = ns.enter().unwrap();
    let times = runtime.block_on(edits(&folder));
    drop(inside);
    println!(
        "both programs, {FILE_SERVICES} Services in {} files; {EDITS} edits of one file",
        FILE_SERVICES / PER_FILE
    );
    println!(
        "  from rename of the file until the control plane knows that the kernel holds it, polled:"
    );
    println!(
        "  {:>8} {:>8} {:>8} {:>8}\n  {}",
        "p50",
        "p90",
        "p99",
        "max",
        percentiles(&times)
    );
    println!(
        "  memory: kp-nodeagent {}, kp-controlplane {}",
        memory(&agent),
        memory(&control_plane)
    );
    drop((agent, control_plane));
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Where this benchmark's own programs are: `target/release/deps/..` has them two levels up.
fn programs() -> PathBuf {
    let me = std::env::current_exe().unwrap();
    me.parent().and_then(Path::parent).unwrap().to_owned()
}

/// Writes one file with its Services; `round` changes an endpoint.
fn write(folder: &Path, file: u32, round: u32) {
    let mut text = String::new();
    for n in file * PER_FILE..(file + 1) * PER_FILE {
        let (ip, a) = (cluster_ip(n), endpoint(2 * n).addr.ip);
        let b = endpoint(2 * n + 1 + 1_000_000 * u32::from(round > 0 && n % PER_FILE == 0) + round)
            .addr
            .ip;
        write!(text, "---\napiVersion: v1\nkind: Service\nmetadata: {{name: service-{n:05}}}\n\
            spec: {{clusterIP: {ip}, clusterIPs: [{ip}], ports: [{{name: http, port: 80}}]}}\n\
            ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
            metadata: {{name: service-{n:05}-x, labels: {{kubernetes.io/service-name: service-{n:05}}}}}\n\
            addressType: IPv4\nports: [{{name: http, port: 8080}}]\n\
            endpoints: [{{addresses: [{a}]}}, {{addresses: [{b}]}}]\n").unwrap();
    }
    let temporary = folder.join(".next");
    std::fs::write(&temporary, text).unwrap();
    std::fs::rename(temporary, folder.join(format!("{file:04}.yaml"))).unwrap();
}

async fn edits(folder: &Path) -> Vec<Duration> {
    let deadline = Instant::now() + DEADLINE;
    let mut client = loop {
        match StatusServiceClient::connect(format!("http://{STATUS}")).await {
            Ok(client) => break client.max_decoding_message_size(64 << 20),
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let mut before = applied(&mut client, 1).await;
    let mut took = Vec::with_capacity(EDITS);
    for round in 1..=u32::try_from(EDITS).unwrap() {
        let started = Instant::now();
        write(folder, round * 9, round);
        before = applied(&mut client, before + 1).await;
        took.push(started.elapsed());
    }
    took.sort();
    took
}

/// Polls until the agent has applied a revision of at least `least` that is all it should have.
async fn applied(client: &mut StatusServiceClient<tonic::transport::Channel>, least: u64) -> u64 {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let fleet = client
            .get_fleet(pb::GetFleetRequest {})
            .await
            .unwrap()
            .into_inner();
        let node = fleet
            .nodes
            .iter()
            .find(|node| node.state() == pb::NodeState::InSync);
        let applied = node
            .and_then(|n| n.report.as_ref())
            .map_or(0, |r| r.applied_revision);
        let services = fleet.control_plane.map_or(0, |c| c.services);
        if applied >= least && services == u64::from(FILE_SERVICES) {
            return applied;
        }
        assert!(Instant::now() < deadline, "revision {least} is not applied");
    }
}

/// Resident memory of a process.
fn memory(process: &Process) -> String {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    let rss = status
        .lines()
        .find(|line| line.starts_with("VmRSS"))
        .unwrap();
    let kb: u64 = rss.split_whitespace().nth(1).unwrap().parse().unwrap();
    format!("{:.1} MiB", kb as f64 / 1024.0)
}
