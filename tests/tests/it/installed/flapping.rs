//! A Pod that is ready and not ready in turn.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kplane_tests::client::Probe;
use kplane_tests::load::Load;
use kplane_tests::real::{self, RealCluster};
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use crate::installed::support::{DEADLINE, load, reached, unharmed, verified};

const NAME: &str = "flapping";
/// A condition that the kubelet takes into account. It asks containers once a second at most.
const GATE: &str = "kplane.io/test";
/// Time between two changes.
const BEAT: Duration = Duration::from_millis(100);
/// Number of changes; the last one says not ready.
const CHANGES: u32 = 49;

/// Connections meet the endpoints that are there, however often one of them comes and goes.
pub(crate) fn ten_times_a_second(cluster: &RealCluster, others: &Load) -> Result<()> {
    let api = cluster.api();
    for (name, node) in [("steady", "node-1"), ("gated", "node-2")] {
        let mut pod = real::pod("default", name, node);
        pod["metadata"]["labels"]["app"] = json!(NAME);
        if name == "gated" {
            pod["spec"]["readinessGates"] = json!([{ "conditionType": GATE }]);
        }
        api.apply(&pod)?;
    }
    api.apply(&real::service("default", NAME))?;
    ready(cluster, true)?;
    cluster.wait_for_pods("default", "app=flapping", 2)?;
    let load = load(cluster, NAME)?;
    let before = generation(cluster)?;
    let start = Instant::now();
    for change in 1..=CHANGES {
        ready(cluster, change % 2 == 0)?;
        sleep((start + BEAT * change).saturating_duration_since(Instant::now()));
    }
    let took = start.elapsed();
    let seen = generation(cluster)? - before;
    println!("{CHANGES} changes of a Pod in {took:.1?}: its EndpointSlice changed {seen} times");
    ensure!(seen >= 10, "the endpoint changed {seen} times only");
    unharmed(&load)?;
    // Agents have kept up: what they do is what was said last.
    answers(cluster, &["steady"])?;
    ready(cluster, true)?;
    answers(cluster, &["gated", "steady"])?;
    verified(cluster, &["node-1", "node-2"])?;
    unharmed(&load)?;
    unharmed(others)
}

/// Waits until exactly these Pods answer.
fn answers(cluster: &RealCluster, names: &[&str]) -> Result<()> {
    let probe = Probe::tcp(reached(cluster, "default/client", NAME)?);
    let client = cluster.pod_ns("default/client")?;
    eventually(DEADLINE, &format!("{names:?} answer"), || {
        let spread = probe.spread(&client, 30)?;
        ensure!(spread.keys().eq(names.iter()), "{spread:?}");
        Ok(())
    })
}

/// Sets the condition that the Pod's readiness depends on, and the readiness itself: the kubelet, which would derive one
/// from the other, takes seconds.
fn ready(cluster: &RealCluster, ready: bool) -> Result<()> {
    let status = if ready { "True" } else { "False" };
    let pod = json!({
        "kind": "Pod",
        "metadata": { "name": "gated", "namespace": "default" },
        "status": { "conditions": [
            { "type": GATE, "status": status }, { "type": "Ready", "status": status },
        ] },
    });
    cluster.api().apply_status(&pod).map(drop)
}

/// Returns the number of changes of the Service's EndpointSlice so far.
fn generation(cluster: &RealCluster) -> Result<i64> {
    let slices = cluster.api().list("EndpointSlice", Some("default"))?;
    let ours = |slice: &&Value| slice["metadata"]["labels"]["kubernetes.io/service-name"] == NAME;
    let slice = slices.iter().find(ours).context("no EndpointSlice")?;
    let generation = slice["metadata"]["generation"].as_i64();
    generation.context("a slice without a generation")
}
