//! `cargo xtask bench`: what the first packet of a connection costs, in a real kernel.
//!
//! UDP datagrams over loopback, each from a socket of its own, so that each makes a connection:
//! the time that send(2) takes, which includes delivery. Targets alternate, so that a busy machine
//! is busy for all of them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use crate::workload::{Workload, cluster_ip, endpoint, percentiles};
use kplane_dataplane::backend::{Kind, Settings};
use kplane_dataplane::plan::NodeSettings;
use kplane_desired_state::publish::{Cursor, Store};
use kplane_model::Protocol;
use kplane_tests::netns::NetNs;
use kplane_tests::plane::{EPOCH, collect, engine, publish, submit};

use crate::goal;

/// First packets a target.
const PACKETS: u32 = 20_000;
/// Endpoints listen here.
const PORT: u16 = 8080;

pub(crate) fn main() {
    kplane_tests::userns::enter().unwrap();
    let runtime = crate::runtime().unwrap();
    println!("\nfirst packet of a connection over loopback (UDP, IPv4, {PACKETS} each)\n");
    println!(
        "{:>8} | {:<34} | {:>8} {:>8} {:>8} {:>8}",
        "services", "to", "p50", "p90", "p99", "max"
    );
    let no_table = namespace();
    print("-", "an address, no table", &mut send(&no_table, direct));
    let mut sticky_medians = Vec::new();
    for services in [1_000, 10_000, 100_000] {
        for (companions, what) in [(false, "plain"), (true, "companions")] {
            let workload = Workload {
                services,
                endpoints: 2,
                companions,
            };
            let ns = namespace();
            let engine = runtime.block_on(filled(ns.clone(), workload));
            let name = services.to_string();
            let label = |to: &str| format!("{to} ({what})");
            print(&name, &label("an address"), &mut send(&ns, direct));
            let to = |n: u32| SocketAddr::new(cluster_ip(n % services).into(), 80);
            print(&name, &label("a ClusterIP"), &mut send(&ns, to));
            if companions {
                let mut took = send(&ns, |n: u32| to(n * 20));
                print(&name, &label("one with affinity"), &mut took);
                sticky_medians.push(took[took.len() / 2]);
            }
            drop(engine);
        }
    }
    let times = sticky_medians[2].div_duration_f64(sticky_medians[0]);
    let what = "session affinity at 100,000 Services, compared with 1,000,";
    goal::print(what, 2.0, times, "times");
}

/// A namespace in which all Services and endpoints are at home.
fn namespace() -> NetNs {
    let ns = NetNs::new("bench").unwrap();
    let netlink = ns.netlink().unwrap();
    // On loopback a prefix makes all its addresses local.
    for prefix in [[10, 96, 0, 0], [10, 128, 0, 0]] {
        let ip = IpAddr::from(prefix);
        netlink.add_address("lo", ip, 11).unwrap();
    }
    ns
}

async fn filled(ns: NetNs, workload: Workload) -> kp_nodeagent::engine::Engine {
    let store = Store::new(EPOCH);
    let services = (0..workload.services).map(|n| {
        let (mut key, mut published) = workload.service(n, None);
        key.protocol = Protocol::Udp;
        if let Some(published) = &mut published {
            published.port.key.protocol = Protocol::Udp;
        }
        (key, published)
    });
    publish(&store, services.collect());
    let (snapshot, _) = collect(&store, "bench", &mut Cursor::at(0)).unwrap();
    let engine = engine(
        Kind::Nftables,
        ns,
        NodeSettings::default(),
        Settings::default(),
    )
    .await
    .unwrap();
    submit(&engine, snapshot).await.unwrap();
    engine
}

/// An endpoint's own address.
fn direct(n: u32) -> SocketAddr {
    SocketAddr::new(endpoint(n % 1_000).addr.ip, PORT)
}

fn send(ns: &NetNs, to: impl Fn(u32) -> SocketAddr + Sync) -> Vec<Duration> {
    ns.run(|| {
        let sink = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT))?;
        sink.set_nonblocking(true)?;
        let mut took = Vec::new();
        for n in 0..PACKETS {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            let to = to(n.wrapping_mul(7_919));
            let started = Instant::now();
            socket.send_to(b"x", to)?;
            took.push(started.elapsed());
            let mut byte = [0];
            assert!(sink.recv(&mut byte).is_ok(), "{to} does not answer");
        }
        Ok(took)
    })
    .unwrap()
}

fn print(services: &str, to: &str, took: &mut [Duration]) {
    took.sort();
    println!("{services:>8} | {to:<34} | {}", percentiles(took));
}
