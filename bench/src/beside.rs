//! `cargo xtask bench beside`: how long a change of a Service takes while the agent reads, writes and removes a large table
//! of NetworkPolicies.

use std::time::{Duration, Instant};

use kp_nodeagent::engine::Engine;
use kp_nodeagent::report::Report;
use kplane_dataplane::backend::{Kind as Backend, Settings};
use kplane_dataplane::plan::NodeSettings;
use kplane_desired_state::admission::{Admission, Enforce};
use kplane_desired_state::index::Index;
use kplane_desired_state::k8s::Kind;
use kplane_desired_state::publish::{Cursor, Store};
use kplane_desired_state::source::Event;
use kplane_tests::netns::NetNs;
use kplane_tests::plane::{EPOCH, collect, engine, happen};
use kplane_tests::support::cluster::{apply, delete, node};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::goal;

/// Pods of the cluster, of which the node has one.
const PODS: u32 = 200_000;
const DEADLINE: Duration = Duration::from_secs(300);

pub(crate) fn main() {
    kplane_tests::userns::enter().unwrap();
    let runtime = crate::runtime().unwrap();
    println!("\na change of a Service beside NetworkPolicies that name {PODS} Pods\n");
    println!(
        "{:<44} | {:>7} | {:>10} {:>10} {:>10}",
        "meanwhile", "changes", "p50", "p99", "max"
    );
    let mut plane = Plane::start(&runtime);
    plane.measure("nothing", None, |_, _, changes| changes == 500);
    let is_applied =
        |report: &Report, since: u64, _| report.applied.is_some_and(|at| at.revision >= since);
    let policy = policy();
    let written = plane.measure(
        "the table is written",
        Some(apply(&policy).unwrap()),
        is_applied,
    );
    println!("{:<44} | {:>7}", "elements", plane.elements());
    // The agent reads it as soon as it is written. Nobody can see the end of that while Services change.
    let read = plane.measure("the table is read", None, |_, _, changes| changes == 50_000);
    let removed = plane.measure(
        "the table is removed",
        Some(delete(&policy).unwrap()),
        is_applied,
    );
    println!();
    let p99 = written.max(read).max(removed).as_secs_f64() * 1e3;
    goal::print("a change of a Service meanwhile, p99", 20.0, p99, "ms");
}

/// The control plane, and the agent of a node.
struct Plane<'a> {
    runtime: &'a Runtime,
    index: Index,
    store: Store,
    engine: Engine,
    cursor: Cursor,
    ports: u32,
}

impl<'a> Plane<'a> {
    fn start(runtime: &'a Runtime) -> Self {
        let ns = NetNs::new("beside").unwrap();
        let (node_settings, settings) = (NodeSettings::default(), Settings::default());
        let engine = engine(Backend::Nftables, ns, node_settings, settings);
        let mut plane = Self {
            runtime,
            index: Index::new(Admission {
                network_policies: Some(Enforce::On),
                ..Admission::default()
            }),
            store: Store::new(EPOCH),
            engine: runtime.block_on(engine).unwrap(),
            cursor: Cursor::at(0),
            ports: 0,
        };
        let kinds = Kind::WITH_POLICIES;
        let mut events: Vec<Event> = kinds.iter().copied().map(Event::Init).collect();
        events.extend(kinds.iter().copied().map(Event::InitDone));
        let objects = [node(1), node(2), namespace(), service(), slice(0)];
        events.extend(objects.iter().map(|object| apply(object).unwrap()));
        events.extend((0..PODS).map(|number| apply(&pod(number)).unwrap()));
        plane.offer(events);
        let revision = plane.revision();
        plane.wait(|report| report.verified.is_some_and(|at| at.revision >= revision));
        plane
    }

    fn revision(&self) -> u64 {
        self.store.head().borrow().revision
    }

    fn elements(&self) -> u64 {
        self.engine
            .reports()
            .borrow()
            .policies
            .iter()
            .map(|counts| counts.elements)
            .sum()
    }

    /// Brings changes to the agent; returns when it began to take them.
    fn offer(&mut self, events: impl IntoIterator<Item = Event>) -> Instant {
        happen(&mut self.index, &self.store, events.into_iter().collect());
        let name = node(1)["metadata"]["name"].as_str().unwrap().to_owned();
        let (update, _) = collect(&self.store, &name, &mut self.cursor).unwrap();
        let started = Instant::now();
        self.runtime.block_on(self.engine.submit(update)).unwrap().unwrap();
        started
    }

    fn wait(&self, reached: impl Fn(&Report) -> bool) {
        let mut reports = self.engine.reports();
        let waits = async {
            let waits = reports.wait_for(|report| reached(report));
            tokio::time::timeout(DEADLINE, waits).await.map(drop)
        };
        self.runtime.block_on(waits).expect("the engine gets there in time");
    }

    /// Changes a Service again and again until the report says so, after another change if there is one: the first change of
    /// the Service waits for it. Returns the 99th percentile.
    fn measure(
        &mut self,
        meanwhile: &str,
        other: Option<Event>,
        is_done: impl Fn(&Report, u64, usize) -> bool,
    ) -> Duration {
        let mut took = Vec::new();
        let begun = Instant::now();
        let mut started = self.offer(other);
        let since = self.revision();
        loop {
            assert!(begun.elapsed() < DEADLINE, "{meanwhile}: not done in time");
            self.ports += 1;
            self.offer([apply(&slice(self.ports)).unwrap()]);
            let revision = self.revision();
            self.wait(|report| report.last_sync.as_ref().is_some_and(|of| of.revision >= revision));
            took.push(started.elapsed());
            started = Instant::now();
            if is_done(&self.engine.reports().borrow(), since, took.len()) {
                break;
            }
        }
        took.sort_unstable();
        let [p50, p99, max] = [50, 99, 100].map(|percent| {
            let last = took.len().saturating_sub(1);
            took.get(last * percent / 100).copied().unwrap_or_default()
        });
        let count = took.len();
        println!("{meanwhile:<44} | {count:>7} | {p50:>10.1?} {p99:>10.1?} {max:>10.1?}");
        p99
    }
}

fn namespace() -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace",
        "metadata": {"name": "shop", "labels": {"kubernetes.io/metadata.name": "shop"}}})
}

fn pod(number: u32) -> Value {
    let [_, a, b, c] = number.to_be_bytes();
    let ip = format!("10.{}.{b}.{c}", 128 + a);
    let on = if number == 0 { 1 } else { 2 };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("pod-{number}"), "namespace": "shop", "uid": number.to_string(),
            "labels": {"app": format!("app-{}", number % 100)}, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"nodeName": node(on)["metadata"]["name"], "containers": []},
        "status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]},
    })
}

fn service() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "svc", "namespace": "shop"},
        "spec": {"clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10"], "ports": [{"port": 80, "protocol": "TCP"}]},
    })
}

/// The Service's endpoint, which changes its port.
fn slice(number: u32) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "svc-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "svc"}},
        "ports": [{"port": 1 + number % 60_000, "protocol": "TCP"}],
        "endpoints": [{"addresses": ["10.128.0.1"], "conditions": {"ready": true}}],
    })
}

/// A policy of the node's Pod, which names all others.
fn policy() -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "policy", "namespace": "shop", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"podSelector": {"matchLabels": {"app": "app-0"}},
            "ingress": [{"from": [{"podSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}}]}]},
    })
}
