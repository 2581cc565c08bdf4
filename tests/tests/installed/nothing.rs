//! A cluster that never had a Service proxy.

use std::time::Instant;

use anyhow::{Result, ensure};
use kplane_tests::real::{Proxy, RealCluster};
use kplane_tests::wait::eventually;
use serde_json::json;

use crate::support::{
    DEADLINE, NAMESPACE, chart, cluster, helm_of, kpctl, traffic, unharmed, verified,
};

const NODES: [&str; 2] = ["node-1", "node-2"];
const TAINT: &str = "kplane.io/not-ready";
/// What both the installation and the upgrade set.
const SETTINGS: [&str; 2] = [
    "agent.clusterCIDR=10.244.0.0/16",
    "startupTaint.enabled=true",
];

pub(crate) fn from_nothing_to_all_nodes_verified_and_off_again() -> Result<()> {
    let cluster = cluster(Proxy::None)?;
    let taint = json!({ "key": TAINT, "effect": "NoSchedule" });
    for node in NODES {
        let spec = json!({ "spec": { "taints": [taint] } });
        cluster.api().patch("Node", node, &spec)?;
    }
    checked(&cluster)?;
    let since = Instant::now();
    chart(&cluster, "install", &SETTINGS)?;
    verified(&cluster, &NODES)?;
    println!(
        "from `helm install` to all nodes verified: {:.1?}",
        since.elapsed()
    );
    untainted(&cluster)?;
    let load = traffic(&cluster)?;
    let named = eventually(DEADLINE, "a name leads to the Service", || {
        cluster.exec("default/client", &["/pod", "get", "http://web:81/"])
    })?;
    ensure!(named.starts_with("web-"), "{named}");

    // Agents and control planes are replaced one after the other; rules stay meanwhile.
    let settings = [
        SETTINGS[0],
        SETTINGS[1],
        "agent.logLevel=debug",
        "controlPlane.logLevel=debug",
    ];
    chart(&cluster, "upgrade", &settings)?;
    rolled(&cluster)?;
    unharmed(&load)?;
    helm_of(
        &cluster,
        &["rollback", "kplane", "1", "--namespace", NAMESPACE],
    )?;
    rolled(&cluster)?;
    unharmed(&load)?;
    drop(load);
    removed(&cluster)
}

/// A Pod on each node checks it before anything is installed, and goes.
fn checked(cluster: &RealCluster) -> Result<()> {
    let since = Instant::now();
    let args = ["check", "--pre", "--nodes", "-o", "json"];
    let text = kpctl(cluster, &args).or_else(|error| match error.to_string() {
        // Exit code 1: without a Service proxy some checks fail.
        text if text.contains("\"checks\"") => Ok(text),
        _ => Err(error),
    })?;
    for expected in [
        "2 of 2 nodes were checked",
        "works on this kernel (all 2 nodes)",
    ] {
        ensure!(text.contains(expected), "no {expected:?}: {text}");
    }
    println!("`kpctl check --pre --nodes`: {:.1?}", since.elapsed());
    let pods = cluster.api().list("Pod", Some("kube-system"))?;
    let left = pods
        .iter()
        .any(|pod| pod.to_string().contains("kplane-check"));
    ensure!(!left, "{pods:?}");
    Ok(())
}

/// Waits until all pods are replaced, and all nodes verified.
fn rolled(cluster: &RealCluster) -> Result<()> {
    for of in [
        "deployment/kplane-controlplane",
        "daemonset/kplane-nodeagent",
    ] {
        let args = [
            "rollout",
            "status",
            "--namespace",
            NAMESPACE,
            "--timeout=2m",
            of,
        ];
        cluster.kubectl(&args)?;
    }
    verified(cluster, &NODES)
}

/// Waits until Nodes have lost the start-up taint: their canaries have answered.
fn untainted(cluster: &RealCluster) -> Result<()> {
    eventually(DEADLINE, "no node has the taint", || {
        let nodes = cluster.api().list("Node", None)?;
        let tainted = nodes
            .iter()
            .filter(|node| node["spec"].to_string().contains(TAINT));
        ensure!(tainted.count() == 0);
        Ok(())
    })
}

/// Nothing of kplane is left in the cluster or on its nodes.
fn removed(cluster: &RealCluster) -> Result<()> {
    helm_of(
        cluster,
        &["uninstall", "kplane", "--namespace", NAMESPACE, "--wait"],
    )?;
    cluster.kubectl(&["delete", "namespace", NAMESPACE, "--timeout=2m"])?;
    let everywhere = "clusterroles,clusterrolebindings,priorityclasses";
    let listed = cluster.kubectl(&["get", everywhere, "--output", "name"])?;
    ensure!(!listed.contains("kplane"), "{listed}");
    for node in cluster.nodes() {
        eventually(DEADLINE, "the agent has gone", || {
            let found = node.exec("sh", &["-c", "pgrep kp-nodeagent || true"])?;
            ensure!(found.trim().is_empty(), "{found}");
            Ok(())
        })?;
    }
    Ok(())
}
