//! A cluster that never had a Service proxy.

use anyhow::{Result, ensure};
use kplane_tests::load::Load;
use kplane_tests::real::{Proxy, RealCluster};
use kplane_tests::wait::eventually;
use serde_json::json;

use crate::installed::gone::{self, Traces};
use crate::installed::support::{
    DEADLINE, cluster, ended, rolled, step, traffic, unharmed, verified,
};
use crate::installed::typed::{tried, typed, typed_with};
use crate::installed::{flapping, nodes};

const NODES: [&str; 2] = ["node-1", "node-2"];
const TAINT: &str = "kplane.io/not-ready";

pub(crate) fn from_nothing_to_all_nodes_verified_and_off_again() -> Result<()> {
    let cluster = step("a cluster", || cluster(Proxy::None))?;
    let before = Traces::before(&cluster)?;
    step("a check of all nodes", || checked(&cluster))?;
    step("installed, all nodes verified", || installed(&cluster))?;
    let load = traffic(&cluster)?;
    step("Services and DNS", || serves(&cluster))?;
    type Event = fn(&RealCluster, &Load) -> Result<()>;
    let events: [(&str, Event); 6] = [
        // First: Kubernetes removes the Pods of a deleted Node a minute later, and until then the namespace stays.
        ("a node added and deleted", nodes::come_and_gone),
        ("an upgrade and back", upgraded),
        (
            "a roll of both replicas and an application",
            rolled_together,
        ),
        ("a node drained, rebooted, uncordoned", nodes::drained),
        ("readiness flaps", flapping::ten_times_a_second),
        (
            "a replica's node lost, and back again",
            nodes::lost_and_back,
        ),
    ];
    for (name, event) in events {
        step(name, || event(&cluster, &load))?;
    }
    ended(load)?;
    gone::seen(&cluster)?;
    step("uninstalled", || gone::removed(&cluster, &before))
}

/// A Pod on each node checks it before anything is installed, and goes.
fn checked(cluster: &RealCluster) -> Result<()> {
    // Without a Service proxy some checks fail.
    let (code, text) = tried(cluster, "kpctl check --pre --nodes", &["-o", "json"])?;
    for expected in [
        "2 of 2 nodes were checked",
        "works on this kernel (all 2 nodes)",
    ] {
        ensure!(text.contains(expected), "{code:?}, no {expected:?}: {text}");
    }
    let pods = cluster.api().list("Pod", Some("kube-system"))?;
    let left = pods.iter().any(|pod| pod.to_string().contains("kplane-check"));
    ensure!(!left, "{pods:?}");
    Ok(())
}

/// Installs kplane on nodes that have the start-up taint, and waits until all is well.
fn installed(cluster: &RealCluster) -> Result<()> {
    let taint = json!({ "key": TAINT, "effect": "NoSchedule" });
    for node in NODES {
        let spec = json!({ "spec": { "taints": [taint] } });
        cluster.api().patch("Node", node, &spec)?;
    }
    typed_with(
        cluster,
        "helm install kplane deploy/chart --namespace kplane --create-namespace \
         --set kubernetesServiceHost=192.0.2.1 --set agent.clusterCIDR=10.244.0.0/16",
        &["--set", "startupTaint.enabled=true"],
    )?;
    verified(cluster, &NODES)?;
    // Canaries have answered.
    eventually(DEADLINE, "no node has the taint", || {
        let nodes = cluster.api().list("Node", None)?;
        let tainted = nodes.iter().filter(|node| node["spec"].to_string().contains(TAINT));
        ensure!(tainted.count() == 0);
        Ok(())
    })
}

/// Pods reach Services by name, and kpctl finds nothing wrong.
fn serves(cluster: &RealCluster) -> Result<()> {
    let named = eventually(DEADLINE, "a name leads to the Service", || {
        cluster.exec("default/client", &["/pod", "get", "http://web:81/"])
    })?;
    ensure!(named.starts_with("web-"), "{named}");
    let status = typed(cluster, "kpctl status")?;
    for node in NODES {
        ensure!(status.contains(node), "{status}");
    }
    // Agents ask CoreDNS through their own data paths.
    eventually(DEADLINE, "all nodes reach DNS", || {
        let probed = typed(cluster, "kpctl probe --dns")?;
        ensure!(probed.contains("2 of 2 work"), "{probed}");
        Ok(())
    })?;
    let (code, text) = tried(cluster, "kpctl probe --dns=nobody.cluster.local", &[])?;
    ensure!(
        code == Some(1) && text.contains("NXDOMAIN"),
        "{code:?}: {text}"
    );
    eventually(DEADLINE, "no check is bad", || {
        typed(cluster, "kpctl check")
    })?;
    Ok(())
}

/// Agents and control planes are replaced one after the other, and back. Rules stay meanwhile.
fn upgraded(cluster: &RealCluster, load: &Load) -> Result<()> {
    let replaced = || {
        rolled(cluster)?;
        verified(cluster, &NODES)?;
        unharmed(load)
    };
    let levels = "agent.logLevel=debug,controlPlane.logLevel=debug";
    typed_with(
        cluster,
        "helm upgrade kplane deploy/chart --namespace kplane --reset-then-reuse-values",
        &["--set", levels],
    )?;
    replaced()?;
    typed(cluster, "helm rollback kplane --namespace kplane")?;
    replaced()
}

/// Both replicas of the control plane are replaced, and meanwhile all Pods of an application. Agents reach one of the new
/// replicas before the old ones end, so each change of the application's endpoints arrives in time.
fn rolled_together(cluster: &RealCluster, load: &Load) -> Result<()> {
    typed(
        cluster,
        "kubectl rollout restart deployment/kplane-controlplane --namespace kplane",
    )?;
    for _ in 0..2 {
        typed(
            cluster,
            "kubectl rollout restart deployment/web --namespace default",
        )?;
        let status = "kubectl rollout status deployment/web --namespace default";
        typed_with(cluster, status, &["--timeout=2m"])?;
        unharmed(load)?;
    }
    rolled(cluster)?;
    verified(cluster, &NODES)?;
    unharmed(load)
}
