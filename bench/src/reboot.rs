//! `cargo xtask bench`: how soon a node that restarts without a control plane serves its first packet.
//!
//! The agent is the program as a user starts it, with a cache file and an empty kernel. Speeds gate
//! nothing; they are printed.

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::workload::{Workload, cluster_ip, endpoint, percentiles};
use kp_nodeagent::cache::Cache;
use kp_nodeagent::engine::{CheckpointSettings, Engine, Followers};
use kplane_dataplane::backend::noop;
use kplane_dataplane::plan::NodeSettings;
use kplane_desired_state::publish::{Cursor, Store};
use kplane_model::Cidr;
use kplane_tests::link::Route;
use kplane_tests::netns::NetNs;
use kplane_tests::plane::{EPOCH, collect, publish};

use crate::goal;

/// The node that there is.
const NODE: &str = "bench";
/// Starts of each size.
const ROUNDS: usize = 7;
/// Nothing here takes longer.
const DEADLINE: Duration = Duration::from_secs(60);
/// Time until a connection counts as not served.
const PATIENCE: Duration = Duration::from_millis(5);

pub(crate) fn main() {
    kplane_tests::userns::enter().unwrap();
    let runtime = crate::runtime().unwrap();
    println!(
        "a start without a control plane on an empty kernel, nftables, IPv4: from the start of the process to the \
         first connection through the last Service, {ROUNDS} times each\n"
    );
    println!(
        "{:>8} | {:>8} {:>8} {:>8} {:>8}",
        "services", "p50", "p90", "p99", "max"
    );
    for services in [1_000, 10_000] {
        let folder = tempfile::tempdir().unwrap();
        runtime.block_on(remember(folder.path(), services));
        let mut took: Vec<_> = (0..ROUNDS).map(|_| first_packet(folder.path(), services)).collect();
        took.sort();
        println!("{services:>8} | {}", percentiles(&took));
        if services == 10_000 {
            let median = took[ROUNDS / 2].as_secs_f64();
            goal::print("10,000 Services from the cache, p50", 0.15, median, "s");
        }
    }
}

/// Writes the cache file of an agent that served so many Services.
async fn remember(folder: &Path, services: u32) {
    let workload = Workload {
        services,
        endpoints: 2,
        companions: false,
    };
    let store = Store::new(EPOCH);
    publish(&store, workload.all());
    let (snapshot, _) = collect(&store, NODE, &mut Cursor::at(0)).unwrap();
    let restore = CheckpointSettings {
        cache: Some(Cache::new(folder, NODE.into())),
        ..CheckpointSettings::default()
    };
    let open = || Ok(noop::open());
    let engine = Engine::start(
        Box::new(open),
        NodeSettings::default(),
        Followers::default(),
        restore,
    )
    .await
    .unwrap();
    engine.submit(snapshot).await.unwrap().unwrap();
    let mut reports = engine.reports();
    drop(engine);
    while reports.changed().await.is_ok() {}
}

/// Starts the agent in a new namespace and connects until that succeeds.
fn first_packet(folder: &Path, services: u32) -> Duration {
    let ns = NetNs::new("reboot").unwrap();
    let last = services - 1;
    let _inside = ns.enter().unwrap();
    let links = ns.netlink().unwrap();
    links.bridge("pods").unwrap();
    links.up("pods").unwrap();
    // Both endpoints of the last Service are here, and its ClusterIP leads nowhere.
    let own = [2 * last, 2 * last + 1].map(|n| endpoint(n).addr);
    for addr in own {
        links.add_address("pods", addr.ip, 32).unwrap();
    }
    let any = Cidr::new([10, 96, 0, 0].into(), 12).unwrap();
    links.add_route(&Route::to(any).dev("pods")).unwrap();
    let _listeners = own.map(|addr| TcpListener::bind((addr.ip, addr.port)).unwrap());
    let to = SocketAddr::new(IpAddr::V4(cluster_ip(last)), 80);

    let mut command = Command::new(crate::program("kp-nodeagent").unwrap());
    command
        .args(["--node-name", NODE, "--control-plane", "http://127.0.0.1:9"])
        .args(["--healthz-bind-address=", "--metrics-bind-address="])
        .arg("--cache-dir")
        .arg(folder)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .stdout(Stdio::null());
    let started = Instant::now();
    let _agent = ns.command(command).unwrap();
    while TcpStream::connect_timeout(&to, PATIENCE).is_err() {
        assert!(started.elapsed() < DEADLINE, "no packet is served");
    }
    started.elapsed()
}
