//! `cargo xtask bench`: one UDP endpoint removed among many conntrack entries, made by real packets.
//!
//! A Service with many flows and one with few, ten endpoints each. Of each one endpoint is removed:
//! the time until the kernel holds the change and the report says so, and then until the flows
//! that led there are deleted. Beside it, what a list of all UDP flows takes. Then ten changes a second, each of which
//! removes an endpoint: the time from the commit until its flows are cut.

pub(crate) mod reported;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use kp_nodeagent::engine::Engine;
use kplane_dataplane::backend::{Kind, Settings};
use kplane_dataplane::conntrack::ConntrackTotals;
use kplane_dataplane::plan::NodeSettings;
use kplane_desired_state::publish::{Cursor, Published, Store};
use kplane_model::{Endpoint, EndpointAddr, Family, KeyParts, Protocol, ServiceKey, ServicePort};
use kplane_netlink::NfSocket;
use kplane_netlink::conntrack::{Flow, Selection};
use kplane_tests::plane::{EPOCH, collect, engine, publish, submit};
use kplane_tests::topology::{LINK, Topology};
use kplane_tests::wait::eventually;

const PORT: u16 = 53;
const ENDPOINTS: u8 = 10;
/// Flows of the Service with few.
const FEW: u32 = 100;
/// Source ports of one client address.
const PORTS: u32 = 50_000;
const FIRST_PORT: u32 = 10_000;
/// Changes of the Service with few flows, one after the other.
const CHANGES: u8 = 200;
const PACE: Duration = Duration::from_millis(100);
/// Nothing here takes longer.
const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) fn main() {
    kplane_tests::userns::enter().unwrap();
    println!(
        "\none of {ENDPOINTS} endpoints of a UDP Service removed among conntrack entries, IPv4"
    );
    println!(
        "{:>8} | {:>20} {:>8} {:>8} | {:>8}",
        "entries", "Service with", "applied", "cleaned", "deleted"
    );
    for flows in [1_000, 10_000, 100_000, 250_000] {
        run(flows);
    }
}

fn run(flows: u32) {
    let topology = topology();
    let runtime = crate::runtime().unwrap();
    let node = topology.node("node-1").unwrap().ns().clone();
    let engine = engine(
        Kind::Nftables,
        node.clone(),
        NodeSettings::default(),
        Settings::default(),
    );
    let engine = runtime.block_on(engine).unwrap();
    let store = Store::new(EPOCH);
    let mut cursor = Cursor::at(0);
    let mut apply = |services| {
        publish(&store, services);
        let (update, _) = collect(&store, "bench", &mut cursor).unwrap();
        let applied = runtime.block_on(submit(&engine, update));
        applied.unwrap().total
    };
    let all: Vec<u8> = (1..=ENDPOINTS).collect();
    let (many, few) = (1, 2);
    apply(vec![service(many, &all), service(few, &all)]);
    looked(&engine, 2);
    let client = topology.host("client").unwrap().ns();
    for (number, flows) in [(many, flows), (few, FEW)] {
        client.run(|| send(number, flows)).unwrap();
    }
    let (listed, took) = node.run(|| Ok(list())).unwrap();
    println!("{listed:>8} | list of all UDP flows: {took:.1?}");
    for (number, flows) in [(few, FEW), (many, flows)] {
        let before = totals(&engine);
        let applied = apply(vec![service(number, &all[1..])]);
        let cleaned = looked(&engine, before.looks() + 1);
        let deleted = totals(&engine).deleted - before.deleted;
        println!("{listed:>8} | {flows:>14} flows {applied:>8.1?} {cleaned:>8.1?} | {deleted:>8}");
        // The second look.
        looked(&engine, before.looks() + 2);
    }
    churn(&engine, &mut apply, &|| {
        client.run(|| send(few, FEW)).unwrap();
    });
}

/// Removes another endpoint of the Service with few flows ten times a second; prints how long its flows stay.
fn churn(
    engine: &Engine,
    apply: &mut dyn FnMut(Vec<(ServiceKey, Option<Published>)>) -> Duration,
    send: &dyn Fn(),
) {
    let (started, busy) = (Instant::now(), totals(engine).duration_sum);
    let mut stayed: Vec<Duration> = Vec::new();
    for change in 0..CHANGES {
        send();
        let without = change % ENDPOINTS + 1;
        let left: Vec<u8> = (1..=ENDPOINTS).filter(|octet| *octet != without).collect();
        let before = totals(engine).deleted;
        apply(vec![service(2, &left)]);
        let committed = Instant::now();
        while totals(engine).deleted == before && committed.elapsed() < DEADLINE {
            std::thread::sleep(Duration::from_micros(200));
        }
        stayed.push(committed.elapsed());
        std::thread::sleep((PACE * (u32::from(change) + 1)).saturating_sub(started.elapsed()));
    }
    stayed.sort_unstable();
    let at = |percent: usize| stayed[(stayed.len() * percent / 100).min(stayed.len() - 1)];
    let busy = (totals(engine).duration_sum - busy).as_secs_f64() / started.elapsed().as_secs_f64();
    println!(
        "{:>8} | ten changes a second: flows stay {:.1?} at the median, {:.1?} at p99; scans take {:.1} % of a core",
        "",
        at(50),
        at(99),
        busy * 100.0
    );
}

/// A client on a fabric, a node on it, and pods that answer nothing.
fn topology() -> Topology {
    let mut topology = Topology::standard(1).unwrap();
    for pod in 1..=ENDPOINTS {
        let ip = IpAddr::from([10, 244, 1, pod]);
        topology.add_pod("node-1", &format!("pod-{pod}"), &[ip]).unwrap();
    }
    let (client, node) = (topology.host("client"), topology.node("node-1"));
    let client = client.unwrap();
    client.route("10.96.0.0/16".parse().unwrap(), node.unwrap()).unwrap();
    for n in 1..6 {
        client.netlink().add_address(LINK, IpAddr::V4(client_ip(n)), 16).unwrap();
    }
    topology
}

fn client_ip(n: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::from(Ipv4Addr::new(172, 30, 200, 0)) + n)
}

fn cluster_ip(number: u8) -> IpAddr {
    IpAddr::from([10, 96, 0, number])
}

/// One packet from each of so many client ports.
fn send(to: u8, flows: u32) -> anyhow::Result<()> {
    let to = SocketAddr::new(cluster_ip(to), PORT);
    for n in 0..flows {
        let port = u16::try_from(FIRST_PORT + n % PORTS)?;
        let socket = UdpSocket::bind((client_ip(1 + n / PORTS), port))?;
        socket.send_to(b"?", to)?;
    }
    Ok(())
}

/// The number of all UDP flows and the time to list and read them.
fn list() -> (usize, Duration) {
    let mut socket = NfSocket::open().unwrap();
    let started = Instant::now();
    let mut listed = 0;
    let request = Selection::UDP.request(Family::V4);
    socket
        .dump_each(request, |message| {
            listed += usize::from(Flow::parse(message).is_some());
        })
        .unwrap();
    (listed, started.elapsed())
}

fn totals(engine: &Engine) -> ConntrackTotals {
    let [v4, _] = engine.conntrack().totals();
    assert_eq!(v4.failures, 0);
    v4
}

/// Waits for so many looks and returns what the last took.
fn looked(engine: &Engine, looks: u64) -> Duration {
    let mut before = totals(engine);
    eventually(DEADLINE, "a look", || {
        let now = totals(engine);
        if now.looks() >= looks {
            return Ok(now.duration_sum - before.duration_sum);
        }
        before = now;
        Err(before.looks())
    })
    .unwrap()
}

/// A Service and its endpoints.
fn service(number: u8, endpoints: &[u8]) -> (ServiceKey, Option<Published>) {
    let key = ServiceKey::from(KeyParts {
        protocol: Protocol::Udp,
        ..KeyParts::clone(&ServiceKey::sample("default", &format!("dns-{number}")))
    });
    let port = ServicePort {
        port: PORT,
        cluster_ip: cluster_ip(number),
        ..ServicePort::sample(key.clone())
    };
    let endpoint = |octet: &u8| Endpoint::ready(EndpointAddr::new([10, 244, 1, *octet], 5353));
    let endpoints: Vec<_> = endpoints.iter().map(endpoint).collect();
    (key, Some(Published::new(port, &endpoints)))
}
