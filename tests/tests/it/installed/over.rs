//! From kube-proxy to kplane and back, node by node, under load between Pods.

use std::sync::Arc;

use anyhow::{Context as _, Error, Result, anyhow, ensure};
use kplane_tests::load::Load;
use kplane_tests::real::{self, Mode, Proxy, RealCluster};
use kplane_tests::wait::eventually;

use crate::installed::gone::{self, Traces};
use crate::installed::support::{
    DEADLINE, cluster, ended, reached, rolled, step, traffic, unharmed, verified,
};
use crate::installed::typed::{tried, typed, typed_on, typed_with};

const NODES: [&str; 2] = ["node-1", "node-2"];

/// Nodes move by name, by label and all at once. kube-proxy's DaemonSet goes, and comes back as it was.
pub(crate) fn kube_proxy_in_mode_nftables_hands_over_node_by_node_and_takes_back() -> Result<()> {
    let cluster = step("a cluster", || cluster(Proxy::KubeProxy(Mode::Nftables)))?;
    let load = traffic(&cluster)?;
    unharmed(&load).context("before kplane")?;
    let before = Traces::before(&cluster)?;
    step("installed", || installed(&cluster))?;
    unharmed(&load).context("kplane serves no node yet")?;
    step("over, node by node", || one_by_one(&cluster, &load))?;
    step("one back and over again", || {
        typed(&cluster, "kpctl migrate back --node node-1")?;
        served(&cluster, &load, &["node-2"])?;
        typed(&cluster, "kpctl migrate start --all --at-a-time 5")?;
        served(&cluster, &load, &NODES)
    })?;
    step("finished", || finished(&cluster, &load))?;
    step("all back", || back(&cluster, &load))?;
    step("uninstalled", || gone::removed(&cluster, &before))?;
    let good = unharmed(&load).context("kplane has gone");
    good.map_err(|error| explained(&cluster, &error))?;
    ended(load)
}

/// In this mode, kplane and kube-proxy have the same names in the kernel. A node goes back from the common mode, and one from
/// another mode of kplane.
pub(crate) fn kube_proxy_in_mode_iptables_gets_all_nodes_back_from_either_mode_of_kplane()
-> Result<()> {
    let cluster = step("a cluster", || cluster(Proxy::KubeProxy(Mode::Iptables)))?;
    let load = traffic(&cluster)?;
    unharmed(&load).context("before kplane")?;
    let before = Traces::before(&cluster)?;
    step("installed", || installed(&cluster))?;
    unharmed(&load).context("kplane serves no node yet")?;
    step("all over", || {
        typed(&cluster, "kpctl migrate start --all")?;
        served(&cluster, &load, &NODES)
    })?;
    gone::seen(&cluster)?;
    needed(&cluster)?;
    step("one back", || {
        typed(&cluster, "kpctl migrate back --node node-2")?;
        served(&cluster, &load, &["node-1"])
    })?;
    step("the other one in mode nftables", || {
        typed(
            &cluster,
            "helm upgrade kplane deploy/chart --namespace kplane --reset-then-reuse-values \
             --set agent.backend=nftables",
        )?;
        rolled(&cluster)?;
        served(&cluster, &load, &["node-1"])
    })?;
    step("all back", || back(&cluster, &load))?;
    step("uninstalled", || gone::removed(&cluster, &before))?;
    let good = unharmed(&load).context("kplane has gone");
    good.map_err(|error| explained(&cluster, &error))?;
    // kube-proxy has what it needs for new Services.
    let api = cluster.api();
    api.apply(&real::pod("default", "late", "node-2"))?;
    api.apply(&real::service("default", "late"))?;
    reached(&cluster, "default/client", "late")?;
    ended(load)
}

/// Installs kplane, which serves no node yet.
fn installed(cluster: &RealCluster) -> Result<()> {
    typed(cluster, "kpctl check --pre")?;
    typed_on(cluster, "node-1", "kpctl check --pre --local")?;
    typed(
        cluster,
        "helm install kplane deploy/chart --namespace kplane --create-namespace \
         --set kubernetesServiceHost=192.0.2.1 --set migration.enabled=true \
         --set agent.kubeProxyConfig.copyFrom.name=kube-proxy",
    )?;
    rolled(cluster)?;
    // Nothing stands in the way.
    let plan = || typed(cluster, "kpctl migrate plan");
    eventually(DEADLINE, "a plan", plan).map(drop)
}

/// kplane gets one node after the other.
fn one_by_one(cluster: &RealCluster, load: &Load) -> Result<()> {
    typed(cluster, "kpctl migrate start --node node-1")?;
    served(cluster, load, &["node-1"])?;
    cluster.kubectl(&["label", "node", "node-2", "pool=canary"])?;
    typed(cluster, "kpctl migrate start --selector pool=canary")?;
    cluster.kubectl(&["label", "node", "node-2", "pool-"])?;
    served(cluster, load, &NODES)
}

/// kube-proxy's DaemonSet goes, and agents run on all nodes. The way back is open still.
fn finished(cluster: &RealCluster, load: &Load) -> Result<()> {
    typed_with(cluster, "kpctl migrate finish", &["--yes"])?;
    unharmed(load).context("finished")?;
    typed(
        cluster,
        "helm upgrade kplane deploy/chart --namespace kplane --reset-then-reuse-values \
         --set migration.enabled=false",
    )?;
    rolled(cluster)?;
    verified(cluster, &NODES)?;
    unharmed(load).context("agents run on all nodes")?;
    needed(cluster)?;
    let upgrade = "helm upgrade kplane deploy/chart --namespace kplane --reset-then-reuse-values";
    typed_with(cluster, upgrade, &["--set", "migration.enabled=true"])?;
    rolled(cluster)?;
    verified(cluster, &NODES)
}

/// kpctl does not remove the only proxy.
fn needed(cluster: &RealCluster) -> Result<()> {
    let (code, text) = tried(cluster, "kpctl uninstall", &["--yes"])?;
    let refused = code != Some(0) && text.contains("kpctl migrate back --all");
    ensure!(refused, "{code:?}: {text}");
    verified(cluster, &NODES)
}

/// kube-proxy gets all nodes that kplane still has, and serves them from its own rules.
fn back(cluster: &RealCluster, load: &Load) -> Result<()> {
    typed(cluster, "kpctl migrate back --all")?;
    served(cluster, load, &[])?;
    for node in cluster.nodes() {
        let tables = node.exec("nft", &["list", "tables"])?;
        ensure!(!tables.contains("kplane"), "{tables}");
    }
    Ok(())
}

/// kplane serves these nodes, kube-proxy the others, and no connection has failed.
fn served(cluster: &RealCluster, load: &Load, names: &[&str]) -> Result<()> {
    if !names.is_empty() {
        verified(cluster, names)?;
    }
    let others = cluster.nodes().len() - names.len();
    eventually(DEADLINE, "kube-proxy serves the other nodes", || {
        let mut pods = cluster.api().list("Pod", Some("kube-system"))?;
        pods.retain(|pod| pod["metadata"]["labels"]["k8s-app"] == "kube-proxy");
        ensure!(pods.len() == others, "{} run", pods.len());
        Ok(())
    })?;
    let good = unharmed(load).with_context(|| format!("kplane serves {names:?}"));
    good.map_err(|error| explained(cluster, &error))
}

/// Adds what explains connections that fail to an error: objects and logs of the cluster, and what the nodes' kernels
/// hold. What has explained most comes first, because only the beginning of an error is shown everywhere.
fn explained(cluster: &RealCluster, error: &Error) -> Error {
    let text = |shown: Result<String>| shown.unwrap_or_else(|error| format!("{error:#}"));
    let asked: [&[&str]; 5] = [
        &["get", "endpointslices", "-n", "default", "--no-headers"],
        &["get", "pods", "-A", "-o", "wide", "--no-headers"],
        &["get", "nodes", "-o", "wide", "--no-headers"],
        &[
            "logs",
            "-n",
            "kube-system",
            "-l",
            "k8s-app=kube-proxy",
            "--tail=-1",
            "--prefix",
        ],
        &[
            "logs",
            "-n",
            "kplane",
            "-l",
            "app.kubernetes.io/component=nodeagent",
            "--tail=-1",
            "--prefix",
        ],
    ];
    let objects = asked.iter().map(|words| text(cluster.kubectl(words)));
    let nodes = cluster.nodes();
    let of_node = |node: &Arc<real::Node>| {
        // No connection that was answered is of interest.
        let show = "grep -e UNREPLIED -e SYN_ /proc/net/nf_conntrack | tail -50; conntrack -S; nft list ruleset";
        format!("{}\n{}", node.name(), text(node.exec("sh", &["-c", show])))
    };
    let shown: Vec<String> = objects.chain(nodes.iter().map(of_node)).collect();
    anyhow!("{error:#}\n{}", shown.join("\n"))
}
