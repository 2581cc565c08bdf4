//! From kube-proxy to kplane and back, node by node, under load between Pods.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::load::Load;
use kplane_tests::real::{self, Mode, Proxy, RealCluster};
use kplane_tests::wait::eventually;

use crate::gone::{self, Traces};
use crate::support::{
    DEADLINE, NAMESPACE, chart, cluster, hardly_harmed, kpctl, reached, traffic, unharmed, verified,
};

pub(crate) fn kube_proxy_hands_over_node_by_node_and_takes_back() -> Result<()> {
    let cluster = cluster(Proxy::KubeProxy(Mode::Nftables))?;
    let load = traffic(&cluster)?;
    unharmed(&load).context("before kplane")?;
    installed(&cluster)?;
    unharmed(&load).context("kplane serves no node yet")?;
    moved(&cluster, &load, unharmed)?;
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

/// kplane takes the mode over. It leaves nothing behind, and kube-proxy's own rules stay.
pub(crate) fn kube_proxy_in_mode_iptables_gets_all_nodes_back_before_kplane_leaves() -> Result<()> {
    let cluster = cluster(Proxy::KubeProxy(Mode::Iptables))?;
    let load = traffic(&cluster)?;
    hardly_harmed(&load).context("before kplane")?;
    let before = Traces::of(&cluster)?;
    let start = Instant::now();
    installed(&cluster)?;
    hardly_harmed(&load).context("kplane serves no node yet")?;
    moved(&cluster, &load, hardly_harmed)?;
    println!("all nodes moved after {:.1?}", start.elapsed());
    gone::seen(&cluster)?;
    // Without a proxy, no Service would work.
    let refused = kpctl(&cluster, &["uninstall", "--yes"]).err();
    let refused = format!("{:#}", refused.context("kpctl removes the only proxy")?);
    ensure!(refused.contains("kpctl migrate back --all"), "{refused}");
    verified(&cluster, &["node-1", "node-2"])?;

    kpctl(&cluster, &["migrate", "back", "--all"])?;
    proxies(&cluster, 2)?;
    hardly_harmed(&load).with_context(|| format!("moved back\n{}", logs(&cluster)))?;
    println!("all nodes moved back after {:.1?}", start.elapsed());
    gone::removed(&cluster, &before)?;
    hardly_harmed(&load).context("kplane has gone")?;
    println!("nothing is left after {:.1?}", start.elapsed());
    // Rules of kube-proxy that kplane would have removed are not there for new Services either.
    let late = real::service("default", "late");
    let api = cluster.api();
    api.apply(&real::pod("default", "late", "node-2"))?;
    api.apply(&late)?;
    reached(&cluster, "default/client", "late").map(drop)
}

/// Installs kplane, which serves no node yet.
fn installed(cluster: &RealCluster) -> Result<()> {
    let settings = [
        "migration.enabled=true",
        "agent.kubeProxyConfig.copyFrom.name=kube-proxy",
    ];
    chart(cluster, "install", &settings)?;
    cluster.kubectl(&[
        "rollout",
        "status",
        "--namespace",
        NAMESPACE,
        "--timeout=2m",
        "deployment/kplane-controlplane",
    ])?;
    Ok(())
}

/// kplane gets one node after the other.
fn moved(cluster: &RealCluster, load: &Load, unharmed: fn(&Load) -> Result<()>) -> Result<()> {
    for (node, served) in [
        ("node-1", &["node-1"][..]),
        ("node-2", &["node-1", "node-2"]),
    ] {
        kpctl(cluster, &["migrate", "start", "--node", node])?;
        verified(cluster, served)?;
        proxies(cluster, 2 - served.len())?;
        unharmed(load).with_context(|| format!("{node} moved\n{}", logs(cluster)))?;
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
