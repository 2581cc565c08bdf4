//! Time and memory for a large cluster, printed:
//! `cargo test --release -p kplane-policy --lib -- --ignored --nocapture large_cluster`

use std::time::{Duration, Instant};

use super::cluster::*;
use crate::{Policies, PolicyChanges, Requirement, Selector};

const NAMESPACES: usize = 25_000;
const PODS: usize = 4;

/// Returns a number of `/proc/self/status` in MiB.
fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    let number = line.split_whitespace().nth(1).unwrap();
    number.parse::<u64>().unwrap() >> 10
}

fn add_namespace(index: &mut Policies, number: usize) {
    let namespace = format!("namespace-{number}");
    let team = format!("team-{}", number % 500);
    index.put_namespace(&namespace.as_str().into(), labels(&[("team", &team)]));
    for pod_number in 0..PODS {
        let host = number * PODS + pod_number;
        let address = format!("10.{}.{}.{}", host >> 16, host >> 8 & 255, host & 255);
        let app = if pod_number % 2 == 0 { "web" } else { "db" };
        let hash = format!("{:x}", host * 2_654_435_761 % 1_000_003);
        let mut pod = pod(
            &format!("{namespace}/{app}-{hash}"),
            &[&address],
            &[
                ("app", app),
                ("app.kubernetes.io/instance", &namespace),
                ("app.kubernetes.io/managed-by", "Helm"),
                ("pod-template-hash", &hash),
                ("tier", "backend"),
            ],
        );
        pod.node = format!("node-{}", host % 5_000).into();
        pod.ports = vec![named("http", kplane_model::Protocol::Tcp, 8080)];
        index.put_pod(pod);
    }
    let other = format!("namespace-{}", (number + 1) % NAMESPACES);
    let own = pods(None, Some(selector(&[("app", "web")])));
    let far = pods(
        Some(selector(&[("kubernetes.io/metadata.name", &other)])),
        Some(selector(&[("app", "web")])),
    );
    let db = [("app", "db")];
    index.put_policy(ingress(&format!("{namespace}/default-deny"), &[], &[]));
    index.put_policy(ingress(&format!("{namespace}/own"), &db, &[from(&[own])]));
    index.put_policy(ingress(&format!("{namespace}/other"), &db, &[from(&[far])]));
}

/// Returns the time that this thread has had a processor.
fn processor() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let nanos = stat.split(' ').next().unwrap();
    Duration::from_nanos(nanos.parse().unwrap())
}

/// Prints how long a change takes, and its objects.
fn time(what: &str, index: &mut Policies, change: impl FnOnce(&mut Policies)) -> PolicyChanges {
    let (start, start_on_processor) = (Instant::now(), processor());
    change(index);
    let put = start.elapsed();
    let changes = index.take();
    let (shared, own) = (changes.shared.len(), changes.own.len());
    let took = start.elapsed() - put;
    let both = processor() - start_on_processor;
    println!(
        "{what}: put {put:?}, take {took:?}, on a processor {both:?}; {shared} shared objects, {own} of some nodes"
    );
    changes
}

#[test]
#[ignore = "prints numbers, and takes gigabytes without optimisation"]
fn large_cluster() {
    let before = memory("VmRSS");
    let mut index = Policies::default();
    let everything = time("everything", &mut index, |index| {
        for number in 0..NAMESPACES {
            add_namespace(index, number);
        }
        println!("inputs: {} MiB", memory("VmRSS") - before);
    });
    println!("with objects: {} MiB", memory("VmRSS") - before);
    drop(everything);
    println!(
        "index: {} MiB, peak {} MiB",
        memory("VmRSS") - before,
        memory("VmHWM")
    );
    println!("{:?}", index.counts());
    time("Pod of a known workload", &mut index, |index| {
        index.put_pod(pod("namespace-7/new", &["10.250.0.1"], &[("app", "web")]));
    });
    time("Pod deleted", &mut index, |index| {
        index.delete_pod(&name("namespace-7/new"));
    });
    let group = |key: &str| from(&[pods(Some(selector(&[])), Some(selector(&[(key, "web")])))]);
    time(
        "policy with a new group of all namespaces",
        &mut index,
        |index| {
            index.put_policy(ingress("namespace-7/all", &[], &[group("app")]));
        },
    );
    time("policy with a key that no Pod has", &mut index, |index| {
        index.put_policy(ingress("namespace-7/key", &[], &[group("none")]));
    });
    time(
        "policy with a key that all Pods have",
        &mut index,
        |index| {
            index.put_policy(ingress("namespace-7/tier", &[], &[group("tier")]));
        },
    );
    time("labels of a namespace", &mut index, |index| {
        index.put_namespace(&"namespace-9".into(), labels(&[("team", "new")]));
    });
    let start = processor();
    let selected: usize = index.list().map(|line| line.pods).sum();
    println!("list: {:?}, {selected} selections", processor() - start);
}

/// What one tenant can have the index hold: `cargo test -p kplane-policy --lib -- --ignored --nocapture one_tenant`
#[test]
#[ignore = "prints numbers"]
fn one_tenant() {
    let mut cluster = Cluster::two().node("n", "10.0.0.0/8");
    for host in 0..5_000_usize {
        let (hash, of) = (host.to_string(), ["a", "b"][host % 2]);
        let address = format!("10.1.{}.{}", host >> 8, host & 255);
        let with = [("app", "web"), ("hash", &hash)];
        cluster = cluster.with(pod(&format!("{of}/{host}"), &[&address], &with));
    }
    cluster = cluster.policy(ingress("b/own", &[], &[from(&[pods(None, None)])]));
    let blocks = |policy: u32| {
        (0..6_000)
            .map(|number| {
                let host = policy * 6_000 + number;
                block(&format!("{}/32", std::net::Ipv4Addr::from(host)), &[])
            })
            .collect::<Vec<_>>()
    };
    let groups = |policy: u32| {
        let without = |number| format!("x{}", policy * 6_000 + number).into();
        (0..6_000)
            .map(|number| {
                let selector = Selector(vec![Requirement::DoesNotExist(without(number))]);
                pods(Some(Selector::default()), Some(selector))
            })
            .collect::<Vec<_>>()
    };
    for what in ["blocks", "groups"] {
        let peers = |policy| match what {
            "blocks" => blocks(policy),
            _ => groups(policy),
        };
        let mut index = cluster.index();
        drop(index.take());
        let before = memory("VmRSS");
        for policy in 0..1_000 {
            let rules = [from(&peers(policy))];
            index.put_policy(ingress(&format!("a/p{policy}"), &[], &rules));
        }
        time(what, &mut index, |_| {});
        println!(
            "{what}: {} MiB, {:?}",
            memory("VmRSS") - before,
            index.counts()
        );
    }
}
