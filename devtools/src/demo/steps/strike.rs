//! Ends everything, and checks that nothing stays.

use std::time::Instant;

use anyhow::{Context as _, Result};
use kplane_model::Family;
use kplane_rig::client::{Outcome, Probe};

use super::super::screen::plural;
use super::super::stage::{Show, Stage};
use super::super::world::Role;
use super::roll::port_of;

/// Ends all processes, shows that the kernels keep serving, removes the rules, and shows that they
/// are gone.
pub(crate) fn strike(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let began = Instant::now();
    let probes = probes(stage)?;
    let processes = stage.cast.stop()?;
    let mut wrong = Vec::new();
    for (node, ns, probe) in &probes {
        if !matches!(probe.once(ns)?, Outcome::Reply(_)) {
            wrong.push(format!("{node} does not serve any more without its agent"));
        }
    }
    let served = probes.len();
    for node in stage.world.topology.nodes() {
        let cleaned = stage.cast.clean_up(node.ns());
        cleaned.with_context(|| format!("kp-nodeagent --cleanup on {}", node.name()))?;
    }
    for (node, ns, probe) in &probes {
        if let Outcome::Reply(reply) = probe.once(ns)? {
            wrong.push(format!("{node} still sends connections to {}", reply.name));
        }
    }
    let nodes = plural(stage.objects.nodes.len(), "node");
    show.screen.aside(format!(
        "{} ended; {served} of {nodes} served on without them",
        plural(processes, "process").replace("processs", "processes"),
    ));
    show.screen.aside(format!(
        "kp-nodeagent --cleanup on {nodes}: the rules are gone"
    ));
    let seen = if wrong.is_empty() {
        "served on, then gone"
    } else {
        "not so"
    };
    show.check(
        ("rules outlive agents, until --cleanup", "as designed"),
        seen,
        wrong,
        began,
    );
    Ok(())
}

/// Returns a call through each node, with a short timeout.
fn probes(stage: &Stage) -> Result<Vec<(String, kplane_rig::netns::NetNs, Probe)>> {
    let Some(star) = &stage.star else {
        return Ok(Vec::new());
    };
    let port = &port_of(stage, star)?.port;
    let family: Family = port.key.family;
    let mut probes = Vec::new();
    for node in &stage.objects.nodes {
        let caller = stage.world.caller(Role::Client, &node.name)?;
        if let (Some(source), false) = (caller.ip(family), node.addresses.is_empty()) {
            let to = std::net::SocketAddr::new(port.cluster_ip, port.port);
            let patience = std::time::Duration::from_millis(300);
            let probe = Probe::tcp(to).source(source).timeout(patience);
            probes.push((node.name.to_string(), caller.ns.clone(), probe));
        }
    }
    Ok(probes)
}
