//! The beginning and the end: all processes start; on request they run until the user has inspected
//! everything; and then nothing stays.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use kplane_tests::client::{Outcome, Probe};
use kplane_tests::process::Process;
use kplane_tests::userns::Entry;
use owo_colors::OwoColorize as _;

use super::super::call::{Call, plan};
use super::super::expect::Kind;
use super::super::interrupt::{self, Interrupted};
use super::super::objects::short;
use super::super::show::{Show, aside, fit, plural, say, span};
use super::super::stage::{Stage, last_sync, trouble};
use super::super::world::{Caller, Role};
use super::load::star;

/// Time in which a node has to answer.
const PATIENCE: Duration = Duration::from_millis(300);

/// Shows the nodes with their addresses and pods.
pub(crate) fn show_nodes(stage: &Stage) {
    for node in &stage.objects.nodes {
        let (name, zone) = (&*node.name, node.zone.as_deref().unwrap_or_default());
        let ips: Vec<String> = node.addresses.iter().map(ToString::to_string).collect();
        let pods = stage.world.topology.pods().filter(|pod| pod.node() == name);
        let pods: Vec<&str> = pods.map(|pod| short(pod.name())).collect();
        let line = format!(
            "{name:<14} {zone:<8} {:<24} {}",
            ips.join(" "),
            pods.join(" ")
        );
        say(format!("      {}", fit(&line, 94).trim_end()));
    }
    aside(format!(
        "{}, {}, a client outside for each node, a control host: {} namespaces",
        plural(stage.objects.nodes.len(), "node"),
        plural(stage.objects.pods.len(), "pod"),
        stage.world.size(),
    ));
}

/// Starts the control plane and the agents, and waits until every kernel holds everything.
pub(super) fn start(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let began = Instant::now();
    stage.start()?;
    let nodes = stage.objects.nodes.len();
    let fleet = stage.wait("every node is in sync", |fleet| {
        let late: Vec<String> = fleet.nodes.iter().filter_map(trouble).collect();
        let known = fleet.nodes.len();
        let all = late.is_empty() && known >= nodes;
        all.then(|| fleet.clone())
            .ok_or_else(|| format!("{known} nodes known; {}", late.join("; ")))
    })?;
    let took = began.elapsed();
    let control = fleet
        .control_plane
        .context("a fleet without a control plane")?;
    aside(format!(
        "kp-controlplane reads {} and serves {} Services with {} endpoints",
        stage.manifests.folder.display(),
        control.services,
        control.endpoints,
    ));
    for node in &fleet.nodes {
        let sync = last_sync(node).copied().unwrap_or_default();
        aside(format!(
            "kp-nodeagent on {:<14} {:>6} operations into {} in {}",
            node.name,
            sync.operations,
            node.backend,
            span(Duration::from_micros(sync.total_us)),
        ));
    }
    let nodes = plural(fleet.nodes.len(), "node");
    let seen = format!("{nodes} in {}", span(took));
    show.check(
        ("every kernel holds everything", &nodes),
        seen,
        Vec::new(),
        began,
    );
    for issue in control.issues {
        aside(format!("{} {}: {}", issue.kind, issue.name, issue.reason));
    }
    Ok(())
}

/// Prints how to enter the namespaces, and waits for Ctrl-C.
pub(crate) fn wait(stage: &Stage, entry: Entry) -> Result<()> {
    let inside = |pid: u32| match entry {
        Entry::Privileged => format!("nsenter -t {pid} -n"),
        Entry::UserNamespace => format!("nsenter -t {pid} -U -n --preserve-credentials"),
    };
    let line = |what: &str, command: String| say(format!("  {}\n    {command}", what.dimmed()));
    say(format!(
        "\n{}",
        "Everything is still running. Look inside:".bold()
    ));
    if let Some((_, control)) = stage.processes.first() {
        let kpctl = stage.kpctl(&[]);
        let command = format!("{} {}", inside(control.id()), kpctl.get_program().display());
        line(
            "the fleet, as it changes",
            format!("{command} status --watch"),
        );
        line("all Services", format!("{command} get services"));
    }
    if let Some((node, agent)) = stage.processes.get(1) {
        let rules = format!("{} nft list table ip kplane", inside(agent.id()));
        line(&format!("the rules of {node}"), rules);
    }
    let mut holders = Vec::new();
    for (role, who) in [
        (Role::Client, "a shell on a client outside, at"),
        (Role::Pod, "a shell in a pod on"),
    ] {
        let mut callers = stage.world.callers.iter();
        if let Some(caller) = callers.find(|caller| caller.role == role) {
            let holder = hold(caller)?;
            line(
                &format!("{who} {}", caller.node),
                format!("{} bash", inside(holder.id())),
            );
            holders.push(holder);
        }
    }
    if let Some(port) = star(stage).and_then(|service| service.ports.first()) {
        let (ip, port, service) = (port.port.cluster_ip, port.port.port, &port.port.key.service);
        let what = format!("in there: who answers for {service}?");
        line(&what, format!("head -1 < /dev/tcp/{ip}/{port}"));
    }
    let manifests = stage.manifests.folder.display();
    line(
        "manifests: edit them, and watch the fleet",
        manifests.to_string(),
    );
    line("logs", stage.log("*").display().to_string());
    let pid = |(name, process): &(String, Process)| format!("{name} {}", process.id());
    let pids: Vec<String> = stage.processes.iter().map(pid).collect();
    line("processes", pids.join(", "));
    say(format!("\n{}", "Ctrl-C ends it and cleans up.".bold()));
    if let Err(Interrupted) = interrupt::sleep(Duration::MAX) {
        interrupt::clear();
    }
    Ok(())
}

/// Starts a process whose only purpose is to be in the namespace of a caller, so that this has a
/// process id. It ends when its standard input does, at the latest with this process.
fn hold(caller: &Caller) -> Result<Process> {
    let mut command = Command::new("cat");
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    caller.ns.command(command)
}

/// Ends all processes, shows that the kernels keep serving, removes the rules, and shows that they
/// are gone.
pub(crate) fn clean_up(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let began = Instant::now();
    let probes = probes(stage)?;
    let processes = stage.stop()?;
    let mut wrong = Vec::new();
    for (caller, probe) in &probes {
        if !matches!(probe.once(&caller.ns)?, Outcome::Reply(_)) {
            wrong.push(format!(
                "{} does not serve any more without its agent",
                caller.node
            ));
        }
    }
    for node in stage.world.topology.nodes() {
        let cleaned = stage.clean_up(node.ns());
        cleaned.with_context(|| format!("kp-nodeagent --cleanup on {}", node.name()))?;
    }
    for (caller, probe) in &probes {
        if let Outcome::Reply(reply) = probe.once(&caller.ns)? {
            let node = &caller.node;
            wrong.push(format!("{node} still sends connections to {}", reply.name));
        }
    }
    let nodes = plural(stage.objects.nodes.len(), "node");
    aside(format!(
        "{processes} processes ended; {} of {nodes} were asked without them",
        probes.len()
    ));
    aside(format!(
        "kp-nodeagent --cleanup on {nodes}: the rules are gone"
    ));
    let seen = if wrong.is_empty() {
        "served on, then gone"
    } else {
        "not so"
    };
    let what = ("rules outlive agents, until --cleanup", "as designed");
    show.check(what, seen, wrong, began);
    Ok(())
}

/// Returns a call through each node.
fn probes(stage: &Stage) -> Result<Vec<(Caller, Probe)>> {
    let Some(service) = stage.star()? else {
        return Ok(Vec::new());
    };
    let mut calls = plan(&stage.objects, &stage.world, service);
    calls.retain(|call| call.caller.role == Role::Client && call.kind == Kind::ClusterIp);
    calls.dedup_by_key(|call| call.caller.node.clone());
    let probe = |call: Call| {
        let probe = Probe::tcp(call.to).source(call.source);
        (call.caller, probe.timeout(PATIENCE))
    };
    Ok(calls.into_iter().map(probe).collect())
}
