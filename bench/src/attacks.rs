//! `cargo xtask bench attacks`: what one tenant's NetworkPolicies cost everybody else. A control plane and the agents of two
//! nodes in this process; the tenant has Pods on the first node only. It creates and deletes what each attack says, and
//! meanwhile a Service and another tenant's policy change.

use std::fs;
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

/// Times that each attack comes and goes.
const ROUNDS: u32 = 5;
/// Changes of a Service, and as many of another policy, behind each step of an attack.
const CHANGES: u32 = 10;
/// Other tenants' Pods on each node, each with a policy of its own.
const OTHERS: u8 = 50;
/// Pods of the tenant on the first node.
const TENANTS: u8 = 20;
const DEADLINE: Duration = Duration::from_secs(600);

/// What the tenant writes.
type Attack = (&'static str, fn() -> Vec<Value>);

const ATTACKS: [Attack; 6] = [
    (
        "4,000 blocks with an exception, 2 objects",
        blocks_with_exceptions,
    ),
    ("34,000 single addresses", single_addresses),
    ("2,500 blocks x 6,000 ports", product),
    ("a label that all Pods have, no Pod selected", nobody),
    ("20 Pods, each as much as it may", everything),
    ("200 objects of 190 kB", large_objects),
];

pub(crate) fn main() {
    kplane_tests::userns::enter().unwrap();
    let runtime = crate::runtime().unwrap();
    println!(
        "\nattacks of a tenant by NetworkPolicies; {OTHERS} Pods of others on each of 2 nodes, {ROUNDS} rounds\n"
    );
    println!(
        "{:<44} | {:>9} {:>9} | {:>9} {:>9} | {:>9} {:>9} | {:>10} {:>10} {:>8}",
        "attack", "p50", "p99", "p50", "p99", "CPU", "RSS", "to node 1", "to node 2", "cut off"
    );
    println!(
        "{:<44} | {:^19} | {:^19} | {:^19} | {:^21} {:^8}",
        "", "a Service", "another's policy", "both parts", "bytes a round", "others"
    );
    let mut worst = Worst::default();
    for (name, objects) in ATTACKS {
        measure(&runtime, name, &objects(), &mut worst);
    }
    println!();
    for (what, p99_ms) in ["a Service", "another's policy"].iter().zip(worst.p99_ms) {
        let what = format!("a change of {what} meanwhile, p99");
        goal::print(&what, 100.0, p99_ms, "ms");
    }
    goal::print(
        "memory of control plane and two agents",
        192.0,
        worst.rss_mib,
        "MiB more",
    );
    goal::print(
        "bytes to an agent without a Pod of the tenant",
        0.0,
        worst.bytes,
        "bytes a round",
    );
    goal::print(
        "Pods of others that are cut off",
        0.0,
        worst.cut_off,
        "Pods",
    );
}

/// The worst of all attacks.
#[derive(Default)]
struct Worst {
    p99_ms: [f64; 2],
    rss_mib: f64,
    bytes: f64,
    cut_off: f64,
}

/// The control plane, and the agents of two nodes.
struct Fleet<'a> {
    runtime: &'a Runtime,
    index: Index,
    store: Store,
    agents: [(String, Engine, Cursor); 2],
}

impl<'a> Fleet<'a> {
    fn start(runtime: &'a Runtime) -> Self {
        let agents = [1_u8, 2].map(|number| {
            let ns = NetNs::new("attacks").unwrap();
            let engine = engine(
                Backend::Nftables,
                ns,
                NodeSettings::default(),
                Settings::default(),
            );
            let name = node(number)["metadata"]["name"].as_str().unwrap().to_owned();
            (name, runtime.block_on(engine).unwrap(), Cursor::at(0))
        });
        let index = Index::new(Admission {
            network_policies: Some(Enforce::On),
            ..Admission::default()
        });
        let mut fleet = Self {
            runtime,
            index,
            store: Store::new(EPOCH),
            agents,
        };
        let kinds = Kind::WITH_POLICIES;
        let mut events: Vec<Event> = kinds.iter().copied().map(Event::Init).collect();
        events.extend(kinds.iter().copied().map(Event::InitDone));
        events.extend(others().iter().map(|object| apply(object).unwrap()));
        fleet.offer(events);
        fleet.settle();
        fleet
    }

    /// Hands a change to both agents; returns the number of bytes for each. The control plane gets the objects one by one,
    /// as a watch brings them.
    fn offer(&mut self, events: impl IntoIterator<Item = Event>) -> [usize; 2] {
        for event in events {
            happen(&mut self.index, &self.store, vec![event]);
        }
        let mut sizes = [0; 2];
        for ((name, engine, cursor), size) in self.agents.iter_mut().zip(&mut sizes) {
            let (update, bytes) = collect(&self.store, name, cursor).unwrap();
            // An update that says nothing but its revision.
            let is_empty = update.changes.is_empty();
            *size = if is_empty { 0 } else { bytes };
            self.runtime.block_on(engine.submit(update)).unwrap().unwrap();
        }
        sizes
    }

    /// Waits until the kernels hold everything.
    fn settle(&self) {
        self.wait(|report| Some(report.applied?.revision));
    }

    /// Waits until the kernels hold the Services.
    fn serve(&self) {
        self.wait(|report| Some(report.last_sync.as_ref()?.revision));
    }

    fn wait(&self, reached: impl Fn(&Report) -> Option<u64>) {
        let wanted = self.store.head().borrow().revision;
        for (_, engine, _) in &self.agents {
            let mut reports = engine.reports();
            let applied = reports.wait_for(|report| reached(report) >= Some(wanted));
            let applied = self
                .runtime
                .block_on(async { tokio::time::timeout(DEADLINE, applied).await.map(drop) });
            applied.expect("a change is in the kernel in time");
        }
    }

    /// Returns the number of Pods of others that are not served as written.
    fn cut_off(&self) -> usize {
        self.agents
            .iter()
            .flat_map(|(_, engine, _)| engine.reports().borrow().failures.clone())
            .filter(|failure| !format!("{:?} {}", failure.about, failure.reason).contains("tenant"))
            .count()
    }
}

fn measure(runtime: &Runtime, name: &str, objects: &[Value], worst: &mut Worst) {
    let mut fleet = Fleet::start(runtime);
    let before = memory("VmRSS");
    // The peak begins anew.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let cpu = cpu_time();
    let (mut took, mut bytes, mut cut_off) = ([Vec::new(), Vec::new()], [0; 2], 0);
    for round in 0..ROUNDS {
        for make in [apply, delete] {
            let sizes = fleet.offer(objects.iter().map(|object| make(object).unwrap()));
            for (sum, size) in bytes.iter_mut().zip(sizes) {
                *sum += size;
            }
            for number in round * CHANGES..(round + 1) * CHANGES {
                let started = Instant::now();
                fleet.offer(apply(&slice(number)));
                fleet.serve();
                took[0].push(started.elapsed());
                let started = Instant::now();
                fleet.offer(apply(&policy("p1", number)));
                fleet.settle();
                took[1].push(started.elapsed());
            }
            cut_off = cut_off.max(fleet.cut_off());
        }
    }
    let grown = memory("VmHWM").saturating_sub(before);
    let [[p50, p99], [others_p50, others_p99]] = took.map(|mut took| {
        took.sort_unstable();
        [50, 99].map(|percent| took[(took.len() - 1) * percent / 100])
    });
    println!(
        "{name:<44} | {p50:>9.1?} {p99:>9.1?} | {others_p50:>9.1?} {others_p99:>9.1?} | {:>9.1?} {grown:>5} MiB | {:>10} \
         {:>10} {cut_off:>8}",
        (cpu_time() - cpu) / (2 * ROUNDS),
        bytes[0] / ROUNDS as usize,
        bytes[1] / ROUNDS as usize,
    );
    for (worst, p99) in worst.p99_ms.iter_mut().zip([p99, others_p99]) {
        *worst = worst.max(p99.as_secs_f64() * 1e3);
    }
    worst.rss_mib = worst.rss_mib.max(grown as f64);
    worst.bytes = worst.bytes.max((bytes[1] / ROUNDS as usize) as f64);
    worst.cut_off = worst.cut_off.max(cut_off as f64);
}

/// Returns a size of this process, in MiB.
fn memory(which: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(which)).unwrap();
    let size = line.split_whitespace().nth(1).unwrap();
    size.parse::<u64>().unwrap() >> 10
}

fn cpu_time() -> Duration {
    use nix::sys::resource::{UsageWho, getrusage};
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    let times = [usage.user_time(), usage.system_time()];
    let seconds = times.map(|time| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6);
    Duration::from_secs_f64(seconds.iter().sum())
}

/// The nodes, and what others have.
fn others() -> Vec<Value> {
    let mut objects = vec![node(1), node(2), namespace("tenant"), namespace("other")];
    for on in [1, 2] {
        for number in 0..OTHERS {
            let name = format!("o{on}-{number}");
            objects.push(pod("other", &name, on, number));
        }
    }
    objects.extend((0..OTHERS).map(|number| policy(&format!("p{number}"), u32::from(number))));
    objects
        .extend((0..TENANTS).map(|number| pod("tenant", &format!("t{number}"), 1, 100 + number)));
    objects.push(json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "svc", "namespace": "other"},
        "spec": {"clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10"], "ports": [{"port": 80, "protocol": "TCP"}]},
    }));
    objects.push(slice(0));
    objects
}

fn namespace(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name}}})
}

fn pod(namespace: &str, name: &str, on: u8, number: u8) -> Value {
    let ip = format!("10.244.{on}.{}", number + 1);
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "uid": name, "labels": {"app": name, "common": "yes"},
            "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"nodeName": node(on)["metadata"]["name"], "containers": []},
        "status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]},
    })
}

/// The Service's endpoint, which changes its port.
fn slice(number: u32) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "svc-1", "namespace": "other", "labels": {"kubernetes.io/service-name": "svc"}},
        "ports": [{"port": 8000 + number, "protocol": "TCP"}],
        "endpoints": [{"addresses": ["10.244.1.1"], "conditions": {"ready": true}}],
    })
}

/// Another tenant's policy, which allows another port.
fn policy(name: &str, number: u32) -> Value {
    object(
        "other",
        name,
        &json!({
            "podSelector": {"matchLabels": {"common": "yes"}},
            "ingress": [{"from": [{"podSelector": {}}], "ports": [{"port": 8000 + number}]}],
        }),
    )
}

fn object(namespace: &str, name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": namespace, "creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": spec,
    })
}

fn block(number: u32, length: u8) -> String {
    let [_, a, b, c] = number.to_be_bytes();
    format!("100.{a}.{b}.{c}/{length}")
}

fn allowing(name: &str, blocks: &[Value], ports: &Value) -> Value {
    object(
        "tenant",
        name,
        &json!({"podSelector": {}, "ingress": [{"from": blocks, "ports": ports}]}),
    )
}

fn blocks_with_exceptions() -> Vec<Value> {
    let of = |object: u32| {
        let range = |number: u32| {
            let number = object * 2_000 + number;
            json!({"ipBlock": {"cidr": "0.0.0.0/0", "except": [block(number << 8, 24)]}})
        };
        allowing(
            &format!("b{object}"),
            &Vec::from_iter((0..2_000).map(range)),
            &json!([]),
        )
    };
    (0..2).map(of).collect()
}

fn single_addresses() -> Vec<Value> {
    let of = |object: u32| {
        let range =
            |number: u32| json!({"ipBlock": {"cidr": block((object * 3_400 + number) * 2, 32)}});
        allowing(
            &format!("s{object}"),
            &Vec::from_iter((0..3_400).map(range)),
            &json!([{"port": 80}]),
        )
    };
    (0..10).map(of).collect()
}

fn product() -> Vec<Value> {
    let blocks = (0..2_500).map(|number| json!({"ipBlock": {"cidr": block(number << 8, 24)}}));
    let ports = (0..6_000).map(|number| json!({"port": 1_000 + 2 * number}));
    vec![allowing(
        "x",
        &Vec::from_iter(blocks),
        &Value::from_iter(ports),
    )]
}

fn nobody() -> Vec<Value> {
    vec![object(
        "tenant",
        "n",
        &json!({
            "podSelector": {"matchLabels": {"app": "nobody"}},
            "ingress": [{"from": [{"namespaceSelector": {}, "podSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}}]}],
        }),
    )]
}

fn everything() -> Vec<Value> {
    let of = |pod: u8| {
        let blocks =
            (0..99).map(|number: u32| json!({"ipBlock": {"cidr": block(number << 8, 24)}}));
        let ports = (0..1_000).map(|number| json!({"port": 1_000 + 2 * number}));
        object(
            "tenant",
            &format!("e{pod}"),
            &json!({
                "podSelector": {"matchLabels": {"app": format!("t{pod}")}},
                "ingress": [{"from": Vec::from_iter(blocks), "ports": Vec::from_iter(ports)}],
            }),
        )
    };
    (0..TENANTS).map(of).collect()
}

fn large_objects() -> Vec<Value> {
    let of = |object: u32| {
        let range =
            |number: u32| json!({"ipBlock": {"cidr": block((object * 6_000 + number) * 2, 32)}});
        allowing(
            &format!("l{object}"),
            &Vec::from_iter((0..6_000).map(range)),
            &json!([{"port": 80}]),
        )
    };
    (0..200).map(of).collect()
}
