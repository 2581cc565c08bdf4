//! From kube-proxy to kplane and back, node by node, under load between Pods.

use anyhow::{Result, ensure};
use kplane_tests::real::{Mode, Proxy, RealCluster};
use kplane_tests::wait::eventually;
use serde_json::json;

use crate::support::{DEADLINE, NAMESPACE, chart, cluster, traffic, unharmed, verified};

/// The label of a node that kplane serves.
const LABEL: &str = "kplane.io/proxy";
const KUBE_PROXY: &str = "kube-system/kube-proxy";

pub(crate) fn kube_proxy_hands_over_node_by_node_and_takes_back() -> Result<()> {
    let cluster = cluster(Proxy::KubeProxy(Mode::Nftables))?;
    let load = traffic(&cluster)?;
    unharmed(&load)?;
    let settings = [
        "migration.enabled=true",
        "agent.kubeProxyConfig.copyFrom.name=kube-proxy",
    ];
    chart(&cluster, "install", &settings)?;
    cluster.kubectl(&[
        "rollout",
        "status",
        "--namespace",
        NAMESPACE,
        "--timeout=2m",
        "deployment/kplane-controlplane",
    ])?;
    keep_off(&cluster)?;
    for (node, served) in [
        ("node-1", &["node-1"][..]),
        ("node-2", &["node-1", "node-2"]),
    ] {
        label(&cluster, node, Some("kplane"))?;
        verified(&cluster, served)?;
        proxies(&cluster, 2 - served.len())?;
        unharmed(&load)?;
    }
    for (node, left) in [("node-2", 1), ("node-1", 2)] {
        label(&cluster, node, None)?;
        proxies(&cluster, left)?;
        cluster.wait_for_pods("kube-system", "k8s-app=kube-proxy", left)?;
        unharmed(&load)?;
    }
    Ok(())
}

/// Keeps kube-proxy off the nodes that kplane serves.
fn keep_off(cluster: &RealCluster) -> Result<()> {
    let without = json!({ "matchExpressions": [{ "key": LABEL, "operator": "NotIn", "values": ["kplane"] }] });
    let terms = json!({ "nodeSelectorTerms": [without] });
    let affinity =
        json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": terms } });
    let spec = json!({ "spec": { "template": { "spec": { "affinity": affinity } } } });
    cluster.api().patch("DaemonSet", KUBE_PROXY, &spec)?;
    cluster.kubectl(&[
        "rollout",
        "status",
        "--namespace",
        "kube-system",
        "--timeout=2m",
        "daemonset/kube-proxy",
    ])?;
    Ok(())
}

fn label(cluster: &RealCluster, node: &str, value: Option<&str>) -> Result<()> {
    let labels = json!({ "metadata": { "labels": { LABEL: value } } });
    cluster.api().patch("Node", node, &labels).map(drop)
}

/// Waits until kube-proxy runs on so many nodes.
fn proxies(cluster: &RealCluster, count: usize) -> Result<()> {
    eventually(
        DEADLINE,
        &format!("kube-proxy runs on {count} nodes"),
        || {
            let mut pods = cluster.api().list("Pod", Some("kube-system"))?;
            pods.retain(|pod| pod["metadata"]["labels"]["k8s-app"] == "kube-proxy");
            ensure!(pods.len() == count, "{} run", pods.len());
            Ok(())
        },
    )
}
