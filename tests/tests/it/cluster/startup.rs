//! The start-up taint: it goes when a node's data path answers, and comes back when it does not.

use anyhow::{Context as _, Result, ensure};
use kplane_model::Family;
use kplane_tests::cluster::objects;
use kplane_tests::support::nft::nft;
use kplane_tests::wait::eventually;
use serde_json::json;

use crate::cluster::support::kpctl::kpctl;
use crate::cluster::support::world::{DEADLINE, NODES};
use crate::cluster::support::{World, with_world};

/// The replica, and the port of its status API.
const REPLICA: (u16, u16) = (13, 7596);
const NODE: &str = "node-1";
const TAINT: &str = "kplane.io/not-ready";
/// A taint of somebody else.
const OTHER: &str = "example.com/reserved";

pub(crate) fn the_startup_taint_follows_the_data_path() -> Result<()> {
    with_world(|world| {
        canary(world)?;
        let plane = world.replica(REPLICA.0, &["--startup-taint".to_owned()])?;
        taint(world, &[OTHER, TAINT])?;
        // Without a canary nobody knows about the data path, and without the right nobody may write.
        world.restart_agent_with(NODE, REPLICA.0, &["--canary-service=default/canary"])?;
        eventually(DEADLINE, "the missing right is named", || {
            let log = world.logged(&format!("plane-{}", REPLICA.0))?;
            ensure!(
                log.contains("cannot write a start-up taint") && log.contains("nodes"),
                "{log}"
            );
            Ok::<_, anyhow::Error>(())
        })?;
        grant(world)?;
        tainted(world, &[OTHER])?;

        nft(world.ns(NODE)?, "add table ip broken")?;
        nft(
            world.ns(NODE)?,
            "add chain ip broken out { type filter hook output priority 0; }",
        )?;
        nft(
            world.ns(NODE)?,
            "add rule ip broken out tcp dport 10256 drop",
        )?;
        tainted(world, &[OTHER, TAINT])?;
        let (_, text, _) = kpctl(world, REPLICA.1, &["status"])?;
        ensure!(
            text.contains("data path does not work") && text.contains("default/canary"),
            "{text}"
        );
        nft(world.ns(NODE)?, "delete table ip broken")?;
        tainted(world, &[OTHER])?;

        drop(plane);
        taint(world, &[])?;
        world.restart_agent(NODE, 0)?;
        world.settle()
    })
}

/// Makes a Service that leads to the agent of the same node.
fn canary(world: &World) -> Result<()> {
    let ports = json!([{ "port": 80, "targetPort": 10256 }]);
    let spec = json!({ "internalTrafficPolicy": "Local", "ports": ports });
    world.api().create(&objects::service("default", "canary", spec))?;
    let endpoint = |(node, _)| {
        let ip = world.topology.node(node)?.ip(Family::V4)?;
        Ok(objects::endpoint(ip, node))
    };
    let endpoints = NODES.into_iter().map(endpoint).collect::<Result<Vec<_>>>()?;
    let mut slice = objects::slice("default", "canary-own", "canary", endpoints);
    slice["ports"] = json!([{ "name": "", "port": 10256, "protocol": "TCP" }]);
    world.api().create(&slice).map(drop)
}

/// Gives the control plane the right to change Nodes.
fn grant(world: &World) -> Result<()> {
    let name = "kplane-startup-taint";
    let group = "rbac.authorization.k8s.io";
    let rules = json!([{ "apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"] }]);
    let role = json!({
        "apiVersion": format!("{group}/v1"), "kind": "ClusterRole",
        "metadata": { "name": name }, "rules": rules,
    });
    let subject =
        json!({ "kind": "ServiceAccount", "namespace": "kplane", "name": "kplane-controlplane" });
    let binding = json!({
        "apiVersion": format!("{group}/v1"), "kind": "ClusterRoleBinding",
        "metadata": { "name": name }, "subjects": [subject],
        "roleRef": { "apiGroup": group, "kind": "ClusterRole", "name": name },
    });
    [role, binding]
        .iter()
        .try_for_each(|object| world.api().apply(object).map(drop))
}

/// Gives the node these taints and no others.
fn taint(world: &World, keys: &[&str]) -> Result<()> {
    let taints = keys.iter().map(|key| json!({ "key": key, "effect": "NoSchedule" }));
    let spec = json!({ "spec": { "taints": taints.collect::<Vec<_>>() } });
    world.api().patch("Node", NODE, &spec).map(drop)
}

/// Waits until the node has these taints and no others.
fn tainted(world: &World, keys: &[&str]) -> Result<()> {
    eventually(DEADLINE, &format!("taints {keys:?}"), || {
        let node = world.api().get("Node", NODE)?.context("no such Node")?;
        let taints = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
        let found: Vec<_> = taints.iter().filter_map(|taint| taint["key"].as_str()).collect();
        ensure!(found == keys, "{found:?}");
        Ok::<_, anyhow::Error>(())
    })
}
