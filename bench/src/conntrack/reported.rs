//! `cargo xtask bench graph`: what `--flows` costs an agent: 10,000 connections a second through a Service, from many clients, begun by real packets.

use std::fs;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kp_nodeagent::service_connections::ServiceConnections;
use kplane_dataplane::backend::{Kind, Settings};
use kplane_dataplane::beginnings::Beginnings;
use kplane_dataplane::plan::NodeSettings;
use kplane_desired_state::publish::{Cursor, Store};
use kplane_tests::netns::NetNs;
use kplane_tests::plane::{EPOCH, collect, engine, publish, submit};
use kplane_tests::topology::LINK;
use nix::sys::resource::{UsageWho, getrusage};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::{ENDPOINTS, FIRST_PORT, PORT, client_ip, cluster_ip, list, service, topology};

/// Clients: with ten endpoints, 2,000 edges.
const CLIENTS: u32 = 200;
const RATE: u32 = 10_000;
const SECONDS: u32 = 10;
const ALL: u32 = RATE * SECONDS;
/// Connections begin in groups, one every 10 ms.
const GROUP: u32 = RATE / 100;
/// Time after which the kernel forgets a connection of the benchmark.
const OVER: Duration = Duration::from_secs(1);
/// Time in which the agent reads what is left.
const REST: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

pub(crate) fn main() {
    kplane_tests::userns::enter().unwrap();
    let topology = topology();
    let client = topology.host("client").unwrap();
    for n in 6..=CLIENTS {
        let ip = IpAddr::V4(client_ip(n));
        client.netlink().add_address(LINK, ip, 16).unwrap();
    }
    let runtime = crate::runtime().unwrap();
    let node = topology.node("node-1").unwrap().ns().clone();
    let (settings, backend) = (NodeSettings::default(), Settings::default());
    let engine = engine(Kind::Nftables, node.clone(), settings, backend);
    let engine = runtime.block_on(engine).unwrap();
    let store = Store::new(EPOCH);
    let endpoints: Vec<u8> = (1..=ENDPOINTS).collect();
    let published = service(1, &endpoints);
    publish(&store, vec![published.clone()]);
    let (update, _) = collect(&store, "bench", &mut Cursor::at(0)).unwrap();
    runtime.block_on(submit(&engine, update)).unwrap();

    println!("\nreports of connections (--flows): {RATE} connections a second for {SECONDS} s");
    for ends in [false, true] {
        let connections = Arc::new(if ends {
            ServiceConnections::with_edges()
        } else {
            ServiceConnections::default()
        });
        let (key, of) = &published;
        connections.learn(key, of.as_ref().map(|of| &of.port));
        node.run(|| {
            Ok(fs::write(
                "/proc/sys/net/netfilter/nf_conntrack_udp_timeout",
                "1",
            )?)
        })
        .unwrap();
        let reader = Reader::start(node.clone(), Arc::clone(&connections), ends);
        client.ns().run(begin).unwrap();
        // A list makes the kernel end what is over.
        thread::sleep(OVER);
        node.run(|| Ok(list())).unwrap();
        thread::sleep(REST);
        let busy = reader.stop();
        let counted = connections.edges(HOUR, |_| true).map(|sums| {
            let begun = sums.edges.iter().map(|(_, counts, _)| u64::from(counts.begun));
            (begun.sum::<u64>(), sums.edges.len(), sums.lost)
        });
        let each = busy.as_secs_f64() * 1e6 / f64::from(ALL);
        let option = if ends { "--flows" } else { "--count-connections" };
        println!(
            "{option:>20} | {each:.2} us of CPU a connection, {:.1} % of a core | {counted:?} = connections, edges, losses of {ALL}",
            each * f64::from(RATE) / 1e4
        );
    }
}

/// Begins connections at a constant rate, from all clients in turn.
fn begin() -> anyhow::Result<()> {
    let to = SocketAddr::new(cluster_ip(1), PORT);
    let started = Instant::now();
    for n in 0..ALL {
        if n % GROUP == 0 {
            let due = Duration::from_millis(10) * (n / GROUP);
            thread::sleep(due.saturating_sub(started.elapsed()));
        }
        let port = u16::try_from(FIRST_PORT + n / CLIENTS)?;
        let socket = UdpSocket::bind((client_ip(1 + n % CLIENTS), port))?;
        socket.send_to(b"?", to)?;
    }
    Ok(())
}

/// An agent's task that reads reports, on a thread of its own.
struct Reader {
    stop: oneshot::Sender<()>,
    thread: thread::JoinHandle<Duration>,
}

impl Reader {
    fn start(node: NetNs, connections: Arc<ServiceConnections>, ends: bool) -> Self {
        let (stop, stopped) = oneshot::channel();
        let (open, opened) = std::sync::mpsc::channel();
        let thread = thread::spawn(move || {
            let reports = node.run(|| Ok(Beginnings::open(ends)?)).unwrap();
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            open.send(()).unwrap();
            let before = cpu();
            runtime.block_on(async {
                let follow = connections.follow(reports);
                let until = async {
                    let _ = timeout(HOUR, stopped).await;
                };
                tokio::select! {
                    () = follow => panic!("connections are not counted"),
                    () = until => {}
                }
            });
            cpu() - before
        });
        opened.recv().unwrap();
        Self { stop, thread }
    }

    /// Returns the CPU time that the thread has taken, in the kernel too.
    fn stop(self) -> Duration {
        self.stop.send(()).unwrap();
        self.thread.join().unwrap()
    }
}

fn cpu() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).unwrap();
    let times = [usage.user_time(), usage.system_time()];
    let micros = times.map(|time| time.tv_sec() * 1_000_000 + time.tv_usec());
    Duration::from_micros(micros.iter().sum::<i64>().unsigned_abs())
}
