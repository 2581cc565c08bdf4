//! `cargo xtask bench`: how soon what others do to our rules is put right, and what others' commits to their
//! own rules cost ours.
//!
//! Speeds gate nothing; they are printed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::workload::{Workload, cluster_ip, endpoint, percentiles};
use kp_nodeagent::engine::Engine;
use kplane_dataplane::backend::nftables::{
    Element, ElementOp, Key, Set, push_delete_table, push_elements,
};
use kplane_dataplane::backend::{Kind, Settings};
use kplane_dataplane::plan::NodeSettings;
use kplane_desired_state::publish::{Cursor, Store};
use kplane_model::Family;
use kplane_netlink::{Batch, Generation, Label, Monitor, NfSocket, Operation};
use kplane_tests::netns::NetNs;
use kplane_tests::plane::{EPOCH, collect, engine, publish, submit};

/// The node that there is.
const NODE: &str = "bench";
/// Times that each thing is done to a table.
const ROUNDS: usize = 20;
/// Changes of ours that percentiles are taken from, at each rate of others.
const CHANGES: u32 = 500;
/// Commits a second of others.
const RATES: [u32; 5] = [0, 5, 50, 500, 1_000];
/// Nothing here takes longer.
const DEADLINE: Duration = Duration::from_secs(60);

/// linux/netfilter/nf_tables.h, with the subsystem in the upper byte.
const NFT_MSG_NEWTABLE: u16 = 10 << 8;
const NFT_MSG_DELTABLE: u16 = NFT_MSG_NEWTABLE | 2;
const NFT_MSG_DELRULE: u16 = NFT_MSG_NEWTABLE | 8;
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;

/// What others do to our table.
#[derive(Clone, Copy, Debug)]
enum Drift {
    Element,
    Chain,
    Table,
}

pub(crate) fn main() {
    kplane_tests::userns::enter().unwrap();
    let runtime = crate::runtime().unwrap();
    println!(
        "what others do to our rules, until they are as they were; nftables, IPv4, {ROUNDS} times each"
    );
    println!("(kube-proxy v1.36 looks after syncPeriod, 30 s by default)\n");
    println!(
        "{:>8} {:>8} | {:>8} {:>8} {:>8} {:>8}",
        "services", "what", "p50", "p90", "p99", "max"
    );
    for services in [1_000, 10_000] {
        let bench = runtime.block_on(Bench::new(services));
        for drift in [Drift::Element, Drift::Chain, Drift::Table] {
            let took = bench.meddle(drift);
            let name = format!("{drift:?}").to_lowercase();
            println!("{services:>8} {name:>8} | {}", percentiles(&took));
        }
    }
    println!(
        "\none endpoint changed while others commit to a table of theirs, {CHANGES} changes each\n"
    );
    println!(
        "{:>8} {:>8} | {:>8} {:>8} {:>8} {:>8}",
        "services", "others/s", "p50", "p90", "p99", "max"
    );
    for services in [1_000, 10_000] {
        let mut bench = runtime.block_on(Bench::new(services));
        for rate in RATES {
            let others = Others::start(&bench.ns, rate);
            let took = runtime.block_on(bench.changes());
            let real = others.stop();
            println!("{services:>8} {real:>8} | {}", percentiles(&took));
        }
    }
}

/// An agent that holds Services, and nothing changes.
struct Bench {
    ns: NetNs,
    workload: Workload,
    store: Store,
    cursor: Cursor,
    engine: Engine,
    next: u32,
}

impl Bench {
    async fn new(services: u32) -> Self {
        let ns = NetNs::new("bench-drift").unwrap();
        let workload = Workload {
            services,
            endpoints: 2,
            companions: false,
        };
        let store = Store::new(EPOCH);
        publish(&store, workload.all());
        let mut cursor = Cursor::at(0);
        let (snapshot, _) = collect(&store, NODE, &mut cursor).unwrap();
        let (node, backend) = (NodeSettings::default(), Settings::default());
        let engine = engine(Kind::Nftables, ns.clone(), node, backend).await.unwrap();
        submit(&engine, snapshot).await.unwrap();
        let mut reports = engine.reports();
        let verified = reports.wait_for(|report| report.verified.is_some());
        verified.await.unwrap();
        Self {
            ns,
            workload,
            store,
            cursor,
            engine,
            next: 0,
        }
    }

    /// How long each time takes until the engine has committed, sorted.
    fn meddle(&self, drift: Drift) -> Vec<Duration> {
        let _inside = self.ns.enter().unwrap();
        let mut socket = NfSocket::open().unwrap();
        let mut monitor = Monitor::open(socket.port().unwrap()).unwrap();
        let mut took = Vec::with_capacity(ROUNDS);
        for round in 0..u32::try_from(ROUNDS).unwrap() {
            monitor.drain(|_| {});
            let batch = drift.batch(round * 37 % self.workload.services);
            let started = Instant::now();
            socket.commit(batch.seal(None)).unwrap();
            let mut commits = 0;
            while commits < 2 {
                monitor.drain(|message| commits += u32::from(Generation::of(message).is_some()));
                assert!(started.elapsed() < DEADLINE, "{drift:?} is not put right");
            }
            took.push(started.elapsed());
            // The look that follows, and a pause that makes the next one the first again.
            thread::sleep(Duration::from_millis(1_500));
        }
        took.sort();
        took
    }

    /// How long each change takes, sorted.
    async fn changes(&mut self) -> Vec<Duration> {
        let mut took = Vec::new();
        for _ in 0..CHANGES {
            let n = self.next.wrapping_mul(7_919) % self.workload.services;
            let fresh = endpoint(2_000_000 + self.next);
            self.next += 1;
            publish(&self.store, vec![self.workload.service(n, Some(fresh))]);
            let (update, _) = collect(&self.store, NODE, &mut self.cursor).unwrap();
            took.push(submit(&self.engine, update).await.unwrap().total);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        took.sort();
        took
    }
}

impl Drift {
    fn batch(self, service: u32) -> Batch {
        let mut batch = Batch::new();
        match self {
            Self::Element => {
                let element = Element {
                    set: Set::ClusterIps,
                    key: Key::Ip(cluster_ip(service).into()),
                    data: None,
                };
                push_elements(&mut batch, Family::V4, ElementOp::Delete, [&element]);
            }
            Self::Chain => batch.push(operation(NFT_MSG_DELRULE), |w| {
                w.str(NFTA_RULE_TABLE, "kplane");
                w.str(NFTA_RULE_CHAIN, "services");
            }),
            Self::Table => push_delete_table(&mut batch, Family::V4),
        }
        batch
    }
}

fn operation(kind: u16) -> Operation {
    Operation {
        label: Label {
            action: "meddle",
            object: "rules",
        },
        kind,
        flags: 0,
        family: 2,
    }
}

/// Somebody who commits to a table of their own.
struct Others {
    over: Arc<AtomicBool>,
    thread: JoinHandle<u32>,
    since: Instant,
}

impl Others {
    fn start(ns: &NetNs, rate: u32) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let (ns, stop) = (ns.clone(), Arc::clone(&over));
        let thread = thread::spawn(move || {
            let _inside = ns.enter().unwrap();
            let mut socket = NfSocket::open().unwrap();
            let (started, mut commits) = (Instant::now(), 0);
            while !stop.load(Ordering::Relaxed) {
                if f64::from(commits) >= started.elapsed().as_secs_f64() * f64::from(rate) {
                    thread::sleep(Duration::from_micros(200));
                    continue;
                }
                let kind = [NFT_MSG_NEWTABLE, NFT_MSG_DELTABLE][commits as usize % 2];
                let mut batch = Batch::new();
                batch.push(operation(kind), |w| w.str(NFTA_TABLE_NAME, "others"));
                socket.commit(batch.seal(None)).unwrap();
                commits += 1;
            }
            commits
        });
        Self {
            over,
            thread,
            since: Instant::now(),
        }
    }

    /// Commits a second that there were.
    fn stop(self) -> u64 {
        self.over.store(true, Ordering::Relaxed);
        let took = self.since.elapsed();
        let commits = self.thread.join().unwrap();
        u64::from(commits) * 1_000 / u64::try_from(took.as_millis()).unwrap().max(1)
    }
}
