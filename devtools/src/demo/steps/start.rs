//! Starts all processes, and shows them.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use kplane_rig::topology::Pod;

use super::super::screen::{Screen, clip, count, fit, plural, span};
use super::super::stage::{Show, Stage};
use super::super::status::last_sync;
use super::super::world::SHELL;

/// Most pods that are named; otherwise only their number is shown.
const NAMED: usize = 9;

/// Shows the nodes with their addresses and pods.
pub(crate) fn show_nodes(screen: &Screen, stage: &Stage) {
    let nodes = &stage.objects.nodes;
    let ips: Vec<String> = nodes.iter().map(|node| join(&node.addresses)).collect();
    let longest = |texts: &mut dyn Iterator<Item = &str>| texts.map(str::len).max().unwrap_or(0);
    let name_columns = longest(&mut nodes.iter().map(|node| &*node.name));
    let zone_columns = longest(&mut nodes.iter().filter_map(|node| node.zone.as_deref()));
    let ip_columns = longest(&mut ips.iter().map(String::as_str));
    for (node, ips) in nodes.iter().zip(&ips) {
        let pods = stage
            .world
            .topology
            .pods()
            .filter(|pod| pod.node() == &*node.name);
        let names: Vec<&str> = pods
            .map(Pod::name)
            .filter(|n| !n.starts_with(SHELL))
            .collect();
        let names = match names.len() {
            n if n > NAMED => plural(n, "pod"),
            _ => names.join(" "),
        };
        let line = format!(
            "{}  {}  {}  {names}",
            fit(&node.name, name_columns),
            fit(node.zone.as_deref().unwrap_or_default(), zone_columns),
            fit(ips, ip_columns),
        );
        screen.line(format!(
            "      {}",
            clip(line.trim_end(), screen.columns() - 6)
        ));
    }
    screen.aside(format!(
        "{}, {}, a client outside for each node, a control host: {} namespaces",
        plural(stage.objects.nodes.len(), "node"),
        plural(stage.objects.pods.len(), "pod"),
        stage.world.size,
    ));
}

fn join(ips: &[IpAddr]) -> String {
    let ips: Vec<String> = ips.iter().map(ToString::to_string).collect();
    ips.join(" ")
}

/// Starts the control plane and the agents, and waits until every kernel holds everything.
pub(super) fn run(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let began = Instant::now();
    let working = show.screen.working("waiting for the kernels of all nodes");
    stage.start()?;
    let fleet = stage.wait_in_sync()?;
    drop(working);
    let took = began.elapsed();
    let control = fleet
        .control_plane
        .context("a fleet without a control plane")?;
    show.screen.aside(format!(
        "kp-controlplane reads {} and serves {} Services with {} endpoints",
        stage.manifests().display(),
        count(control.services),
        count(control.endpoints),
    ));
    for node in &fleet.nodes {
        let sync = last_sync(node).copied().unwrap_or_default();
        show.screen.aside(format!(
            "kp-nodeagent on {} {:>6} operations into {} in {}",
            fit(&node.name, 12),
            count(sync.operations),
            node.backend,
            span(Duration::from_micros(sync.total_us)),
        ));
    }
    let errors: Vec<String> = control
        .issues
        .iter()
        .map(|issue| format!("{} {}: {}", issue.kind, issue.name, issue.reason))
        .collect();
    let nodes = plural(fleet.nodes.len(), "node");
    let seen = format!("{nodes} in {}", span(took));
    show.check(
        ("every kernel holds everything", &nodes),
        seen,
        Vec::new(),
        began,
    );
    for error in errors {
        show.screen.aside(error);
    }
    Ok(())
}
