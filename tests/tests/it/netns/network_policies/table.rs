//! The truth table.

use anyhow::{Result, ensure};

use super::play;

pub(crate) fn np1_np2_np3_np4_isolation_is_per_direction_and_policies_add_up() -> Result<()> {
    play("isolation")
}

pub(crate) fn np5_np6_selectors() -> Result<()> {
    play("selectors")
}

pub(crate) fn np7_blocks() -> Result<()> {
    play("blocks")
}

pub(crate) fn np8_np9_np10_ports() -> Result<()> {
    play("ports")
}

pub(crate) fn np11_np12_nodes() -> Result<()> {
    play("nodes")
}

pub(crate) fn np14_np15_services() -> Result<()> {
    play("services")
}

/// All policies that allow everything: nothing of Services may be different.
pub(crate) fn np14_services_are_as_before_where_everything_is_allowed() -> Result<()> {
    let all = "podSelector: {}, policyTypes: [Ingress, Egress], ingress: [{}], egress: [{}]";
    let mut stage = super::Stage::open()?;
    let policies = ["x", "y", "z"].map(|ns| super::policy("all", &format!("in {ns}: {all}")));
    stage.apply(&policies.concat())?;
    stage.check(
        "everything is allowed",
        "here>svc1; here>svc2; there>svc1; there>svc2; a>svc1; a>svc2; c>svc2; b>svc1
         node1>svc1; node1>svc2; node2>svc1; outside>port1; outside>port2; here>port1; here>port2; there>port1",
    )
}

/// The userspace proxy connects to endpoints as the node, whose connections policies always allow: a node with isolated Pods
/// is degraded as long as a proxy relays to them.
pub(crate) fn relayed_connections_are_a_failure_of_the_node() -> Result<()> {
    let mut stage = super::Stage::open()?;
    let degraded = |stage: &super::Stage| {
        stage
            .cluster
            .failures()
            .into_iter()
            .filter(|failure| failure.degraded && failure.reason.contains("userspace proxy relays"))
            .count()
    };
    ensure!(degraded(&stage) == 0, "nobody is isolated");
    let deny = super::policy("deny", "in x: podSelector: {}, policyTypes: [Ingress]");
    stage.apply(&deny)?;
    ensure!(
        degraded(&stage) == 1,
        "one node has Pods of the namespace x"
    );
    stage.check(
        "by addresses of Pods, and by Services",
        "here>a no; there>a no; here>svc1",
    )?;
    stage.delete(&deny)?;
    ensure!(degraded(&stage) == 0, "nobody is isolated any more");
    Ok(())
}
