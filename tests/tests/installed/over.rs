//! From kube-proxy to kplane and back, node by node, under load between Pods.

use anyhow::{Context as _, Result, ensure};
use kplane_tests::real::{Mode, Proxy, RealCluster};
use kplane_tests::wait::eventually;

use crate::support::{DEADLINE, NAMESPACE, chart, cluster, kpctl, traffic, unharmed, verified};

pub(crate) fn kube_proxy_hands_over_node_by_node_and_takes_back() -> Result<()> {
    let cluster = cluster(Proxy::KubeProxy(Mode::Nftables))?;
    let load = traffic(&cluster)?;
    unharmed(&load).context("before kplane")?;
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
    for (node, served) in [
        ("node-1", &["node-1"][..]),
        ("node-2", &["node-1", "node-2"]),
    ] {
        kpctl(&cluster, &["migrate", "start", "--node", node])?;
        verified(&cluster, served)?;
        proxies(&cluster, 2 - served.len())?;
        unharmed(&load).with_context(|| format!("{node} moved\n{}", logs(&cluster)))?;
    }
    for (node, left) in [("node-2", 1), ("node-1", 2)] {
        kpctl(&cluster, &["migrate", "back", "--node", node])?;
        proxies(&cluster, left)?;
        unharmed(&load).with_context(|| format!("{node} moved back"))?;
    }
    for node in cluster.nodes() {
        let tables = node.exec("nft", &["list", "tables"])?;
        ensure!(!tables.contains("kplane"), "{tables}");
    }
    Ok(())
}

/// The agents' logs.
fn logs(cluster: &RealCluster) -> String {
    let of = "app.kubernetes.io/component=nodeagent";
    let logs = cluster.kubectl(&[
        "logs",
        "--namespace",
        NAMESPACE,
        "--selector",
        of,
        "--tail=-1",
    ]);
    logs.unwrap_or_else(|error| format!("{error:#}"))
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
