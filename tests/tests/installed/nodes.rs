//! Nodes that are drained, fail, come back, join and leave.

use anyhow::{Context as _, Result, ensure};
use kplane_tests::load::Load;
use kplane_tests::real::{self, RealCluster};
use kplane_tests::wait::eventually;

use crate::support::{DEADLINE, hardly_harmed, nodes, reached, rolled, verified};

/// Pods move away from a node that is drained, among them a control plane. The agent stays and goes on.
pub(crate) fn drained(cluster: &RealCluster, load: &Load) -> Result<()> {
    cluster.kubectl(&["drain", "node-2", "--ignore-daemonsets", "--timeout=2m"])?;
    cluster.wait_for_pods("default", "app=web", 2)?;
    verified(cluster, &["node-1", "node-2"])?;
    let pods = cluster.kubectl(&["get", "pods", "-A", "-o", "wide"])?;
    let there = pods.lines().filter(|line| line.contains("node-2"));
    let there: Vec<&str> = there.collect();
    ensure!(
        there.len() == 1 && there[0].contains("kplane-nodeagent"),
        "{pods}"
    );
    hardly_harmed(load)?;
    cluster.kubectl(&["uncordon", "node-2"])?;
    rolled(cluster)?;
    hardly_harmed(load).context("uncordoned")
}

/// A node that joins is served without anything to do. One that is deleted harms nobody, and is not verified any more: the
/// control plane forgets it after ten minutes.
pub(crate) fn come_and_gone(cluster: &RealCluster, load: &Load) -> Result<()> {
    cluster.add_node(3)?;
    cluster
        .api()
        .apply(&real::pod("default", "third", "node-3"))?;
    verified(cluster, &["node-1", "node-2", "node-3"])?;
    cluster.wait_for_pods("default", "app=third", 1)?;
    reached(cluster, "default/third", "web")?;
    hardly_harmed(load)?;
    cluster.remove_node("node-3")?;
    eventually(DEADLINE, "the node has no agent", || {
        let nodes = nodes(cluster)?;
        let good = nodes.iter().filter(|node| node["state"] == "InSync");
        let good: Vec<_> = good.filter_map(|node| node["name"].as_str()).collect();
        ensure!(good == ["node-1", "node-2"], "{nodes:?}");
        Ok(())
    })?;
    hardly_harmed(load).context("a node less")
}

/// A node fails with the replica on it. The other replica serves changes, and the node has all of them when it is back.
/// Expects that all endpoints of the load are on the other node.
pub(crate) fn lost_and_back(cluster: &RealCluster, load: &Load) -> Result<()> {
    let api = cluster.api();
    api.apply(&real::pod("default", "far", "node-2"))?;
    cluster.wait_for_pods("default", "app=far", 1)?;
    cluster.stop_node("node-2")?;
    hardly_harmed(load)?;
    api.apply(&real::pod("default", "late", "node-1"))?;
    cluster.wait_for_pods("default", "app=late", 1)?;
    api.apply(&real::service("default", "late"))?;
    reached(cluster, "default/client", "late").context("without a replica")?;
    // Unknown: whether the lost replica serves the node, no other one can tell.
    eventually(DEADLINE, "kpctl names the node", || {
        let nodes = nodes(cluster)?;
        let mut lost = nodes.iter().filter(|node| node["name"] == "node-2");
        let lost = lost.any(|node| node["state"] == "Disconnected" || node["state"] == "Unknown");
        ensure!(lost, "{nodes:?}");
        Ok(())
    })?;
    hardly_harmed(load).context("kpctl names the node")?;
    cluster.start_node("node-2")?;
    verified(cluster, &["node-1", "node-2"])?;
    cluster.wait_for_pods("default", "app=far", 1)?;
    reached(cluster, "default/far", "late").context("from the node that is back")?;
    rolled(cluster)?;
    hardly_harmed(load).context("the node is back")
}
