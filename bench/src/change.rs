//! `cargo xtask bench`: how long a change takes, in a real kernel.
//!
//! First the agent alone, fed with messages as they come from the wire: snapshot to kernel, and
//! one endpoint changed, at several sizes. Then both programs as a user starts them: memory, and
//! from writing a YAML file to the kernel. Speeds gate nothing; they are printed.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::workload::{Workload, cluster_ip, endpoint, percentiles, show};
use kplane_dataplane::backend::{Kind, Settings};
use kplane_dataplane::plan::NodeSettings;
use kplane_desired_state::publish::{Cursor, Store};
use kplane_proto::v1 as pb;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_tests::netns::NetNs;
use kplane_tests::plane::{EPOCH, collect, engine, publish, submit};
use kplane_tests::process::Process;
use kplane_tests::usage;

use crate::goal;

/// The node that there is.
const NODE: &str = "bench";
/// Nothing here takes longer.
const DEADLINE: Duration = Duration::from_secs(120);
/// Changes that percentiles are taken from.
const CHANGES: usize = 2_000;
/// Edits of a file that percentiles are taken from.
const EDITS: usize = 100;
/// Services of the run with files.
const FILE_SERVICES: u32 = 10_000;
/// Services in one file.
const PER_FILE: u32 = 10;
const STATUS: &str = "127.0.0.1:7466";

pub(crate) fn main() {
    kplane_tests::userns::enter().unwrap();
    let runtime = crate::runtime().unwrap();
    println!("one agent, nftables, IPv4; {CHANGES} changes of one endpoint each");
    println!("'userspace': the userspace proxy serves all Services, with nftables behind it (G6)");
    println!(
        "'companions': 5 % of the Services have a load balancer with source ranges and a node port,\n\
         external policy Local, and session affinity\n"
    );
    println!(
        "{:>8} {:>9} {:>10} | {:>10} {:>10} {:>9} | {:>8} {:>8} {:>8} {:>8} | {:>6} {:>5}",
        "services",
        "endpoints",
        "kind",
        "snapshot",
        "encode",
        "to kernel",
        "p50",
        "p90",
        "p99",
        "max",
        "wire",
        "ops"
    );
    let sizes = [(1_000, 2), (10_000, 2), (100_000, 2), (5_000, 50)];
    for (services, endpoints) in sizes {
        for companions in [false, true] {
            let ns = NetNs::new("bench").unwrap();
            let workload = Workload {
                services,
                endpoints,
                companions,
            };
            println!(
                "{}",
                runtime.block_on(agent_alone(ns, Kind::Nftables, workload))
            );
        }
    }
    let workload = Workload {
        services: 10_000,
        endpoints: 2,
        companions: false,
    };
    let ns = NetNs::new("bench").unwrap();
    println!(
        "{}",
        runtime.block_on(agent_alone(ns, Kind::Userspace, workload))
    );
    println!(
        "\nkube-proxy v1.36.3, nftables, on such a machine (measured by hand once): 10,000 Services cold 9.4 s, one endpoint 3.2 s\n"
    );
    files(&runtime);
}

/// One line of the table.
async fn agent_alone(ns: NetNs, kind: Kind, workload: Workload) -> String {
    let services = workload.services;
    let store = Store::new(EPOCH);
    let all = workload.all();
    let started = Instant::now();
    publish(&store, all);
    let encode = started.elapsed();
    let mut cursor = Cursor::at(0);
    let (snapshot, bytes) = collect(&store, NODE, &mut cursor).unwrap();
    let engine = engine(kind, ns, NodeSettings::default(), Settings::default()).await.unwrap();
    let cold = submit(&engine, snapshot).await.unwrap().total;
    let mut took = Vec::with_capacity(CHANGES);
    let (mut wire, mut operations) = (0, 0);
    for change in 0..u32::try_from(CHANGES).unwrap() {
        // All over the place, a fresh address each time.
        let n = change.wrapping_mul(7_919) % services;
        let fresh = endpoint(2_000_000 + change);
        publish(&store, vec![workload.service(n, Some(fresh))]);
        let (update, bytes) = collect(&store, NODE, &mut cursor).unwrap();
        let sync = submit(&engine, update).await.unwrap();
        wire = wire.max(bytes);
        operations = operations.max(sync.operations);
        took.push(sync.total);
    }
    took.sort();
    format!(
        "{services:>8} {:>9} {:>10} | {:>7} kB {:>10} {:>9} | {} | {wire:>4} B {operations:>5}",
        workload.endpoints,
        match (kind, workload.companions) {
            (Kind::Userspace, _) => "userspace",
            (_, true) => "companions",
            (_, false) => "plain",
        },
        bytes / 1000,
        show(encode),
        show(cold),
        percentiles(&took)
    )
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
        let mut command = Command::new(crate::program(program).unwrap());
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
            "http://127.0.0.1:7465",
            "--cache-dir",
            "",
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
    let [agent_mib, plane_mib] = [&agent, &control_plane].map(memory);
    println!("  memory: kp-nodeagent {agent_mib:.1} MiB, kp-controlplane {plane_mib:.1} MiB");
    goal::print(
        "memory of an agent with 10,000 Services",
        25.0,
        agent_mib,
        "MiB",
    );
    let what = "memory of a control plane with a folder of 10,000 Services";
    goal::print(what, 70.0, plane_mib, "MiB");
    drop((agent, control_plane));
    std::fs::remove_dir_all(&folder).unwrap();
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
        let answer = client.get_fleet(pb::GetFleetRequest::default()).await;
        let fleet = match answer {
            Ok(fleet) => fleet.into_inner(),
            // One client may not ask as often as it can.
            Err(status) if status.code() == tonic::Code::ResourceExhausted => {
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            }
            Err(status) => panic!("{status}"),
        };
        let node = fleet.nodes.iter().find(|node| node.state() == pb::NodeState::InSync);
        let applied = node.and_then(|n| n.report.as_ref()).map_or(0, |r| r.applied_revision);
        let services = fleet.control_plane.map_or(0, |c| c.services);
        if applied >= least && services == u64::from(FILE_SERVICES) {
            return applied;
        }
        assert!(Instant::now() < deadline, "revision {least} is not applied");
    }
}

/// Resident memory of a process, in MiB.
fn memory(process: &Process) -> f64 {
    usage::memory(&[process.id()]).unwrap().now as f64 / f64::from(1 << 20)
}
