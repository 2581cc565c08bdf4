//! Nodes that are drained, fail, come back, join and leave.

use anyhow::{Context as _, Result, ensure};
use kplane_tests::load::Load;
use kplane_tests::real::{self, RealCluster};
use kplane_tests::wait::eventually;

use crate::installed::support::{DEADLINE, nodes, reached, rolled, unharmed, verified};
use crate::installed::typed::typed;

const BOTH: [&str; 2] = ["node-1", "node-2"];

/// Pods move away from a node that is drained, among them a control plane. The agent stays and goes on. A reboot takes
/// the kernel's rules along, and the agent writes them anew.
pub(crate) fn drained(cluster: &RealCluster, load: &Load) -> Result<()> {
    typed(cluster, "kubectl drain node-2 --ignore-daemonsets")?;
    cluster.wait_for_pods("default", "app=web", 2)?;
    verified(cluster, &BOTH)?;
    let pods = cluster.kubectl(&["get", "pods", "-A", "-o", "wide"])?;
    let there: Vec<&str> = pods.lines().filter(|line| line.contains("node-2")).collect();
    ensure!(
        there.len() == 1 && there[0].contains("kplane-nodeagent"),
        "{pods}"
    );
    unharmed(load)?;
    rebooted(cluster).context("the reboot")?;
    unharmed(load).context("rebooted")?;
    typed(cluster, "kubectl uncordon node-2")?;
    rolled(cluster)?;
    unharmed(load).context("uncordoned")
}

/// Reboots node-2. Its kernel has nothing of before, and all of kplane's rules.
fn rebooted(cluster: &RealCluster) -> Result<()> {
    let node = cluster.node("node-2")?;
    node.exec("nft", &["add", "table", "inet", "before-the-reboot"])?;
    cluster.reboot("node-2")?;
    eventually(DEADLINE, "the agent has written its rules", || {
        let tables = node.exec("nft", &["list", "tables"])?;
        ensure!(!tables.contains("before-the-reboot"), "{tables}");
        ensure!(tables.contains("kplane"), "{tables}");
        Ok(())
    })?;
    verified(cluster, &BOTH)
}

/// A node that joins is served without anything to do. One that is deleted harms nobody, and is not verified any more: the
/// control plane forgets it after ten minutes.
pub(crate) fn come_and_gone(cluster: &RealCluster, load: &Load) -> Result<()> {
    cluster.add_node(3)?;
    cluster.api().apply(&real::pod("default", "third", "node-3"))?;
    verified(cluster, &["node-1", "node-2", "node-3"])?;
    cluster.wait_for_pods("default", "app=third", 1)?;
    reached(cluster, "default/third", "web")?;
    unharmed(load)?;
    cluster.remove_node("node-3")?;
    eventually(DEADLINE, "the node has no agent", || {
        let nodes = nodes(cluster)?;
        let good: Vec<_> = nodes
            .iter()
            .filter(|node| node["state"] == "InSync")
            .filter_map(|node| node["name"].as_str())
            .collect();
        ensure!(good == BOTH, "{nodes:?}");
        Ok(())
    })?;
    unharmed(load).context("a node less")
}

/// A node fails with the replica on it. The other replica serves changes, and the node has all of them when it is back.
/// Expects that all endpoints of the load are on the other node.
pub(crate) fn lost_and_back(cluster: &RealCluster, load: &Load) -> Result<()> {
    let api = cluster.api();
    api.apply(&real::pod("default", "far", "node-2"))?;
    cluster.wait_for_pods("default", "app=far", 1)?;
    cluster.stop_node("node-2")?;
    unharmed(load)?;
    api.apply(&real::pod("default", "late", "node-1"))?;
    cluster.wait_for_pods("default", "app=late", 1)?;
    api.apply(&real::service("default", "late"))?;
    reached(cluster, "default/client", "late").context("without a replica")?;
    // The other replica cannot know whether the agent has ended, or only the replica to which it was connected.
    eventually(DEADLINE, "kpctl names the node", || {
        let nodes = nodes(cluster)?;
        let lost = nodes.iter().find(|node| node["name"] == "node-2");
        let state = &lost.context("kpctl does not show the node")?["state"];
        ensure!(*state == "Unknown" || *state == "Disconnected", "{state}");
        Ok(())
    })?;
    unharmed(load).context("kpctl names the node")?;
    cluster.start_node("node-2")?;
    verified(cluster, &BOTH)?;
    cluster.wait_for_pods("default", "app=far", 1)?;
    reached(cluster, "default/far", "late").context("from the node that is back")?;
    rolled(cluster)?;
    unharmed(load).context("the node is back")
}
