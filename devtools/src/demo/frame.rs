//! The beginning and the end: all processes start; on request they run until the user has inspected
//! everything; and then nothing stays.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use kplane_proto::v1::NodeState;
use kplane_rig::client::{Outcome, Probe};
use kplane_rig::netns::NetNs;
use kplane_rig::process::Process;
use kplane_rig::userns::Entry;
use owo_colors::OwoColorize as _;

use super::call::Call;
use super::expect::Kind;
use super::interrupt::{self, Interrupted};
use super::load::{star, tcp_calls};
use super::objects::short;
use super::show::{Show, aside, fit, plural, say, span};
use super::stage::{Stage, last_sync};
use super::world::{Caller, Role};

/// Time in which a node has to answer.
const PATIENCE: Duration = Duration::from_millis(300);

/// Shows the nodes with their addresses and pods.
pub(crate) fn show_nodes(stage: &Stage) {
    for node in &stage.objects.nodes {
        let (name, zone) = (&*node.name, node.zone.as_deref().unwrap_or_default());
        let ips: Vec<String> = node.addresses.iter().map(ToString::to_string).collect();
        let pods: Vec<&str> = stage
            .world
            .topology
            .pods()
            .filter(|pod| pod.node() == name)
            .map(|pod| short(pod.name()))
            .collect();
        let (ips, pods) = (ips.join(" "), pods.join(" "));
        let line = format!("{name:<14} {zone:<8} {ips:<24} {pods}");
        say!("      {}", fit(&line, 94).trim_end());
    }
    aside!(
        "{}, {}, a client outside for each node, a control host: {} namespaces",
        plural(stage.objects.nodes.len(), "node"),
        plural(stage.objects.pods.len(), "pod"),
        stage.world.size(),
    );
}

/// Starts the control plane and the agents, and waits until every kernel holds everything.
pub(crate) fn start(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let began = Instant::now();
    stage.start()?;
    let nodes = stage.objects.nodes.len();
    let fleet = stage.wait("every node is in sync", |fleet| {
        let late = fleet
            .nodes
            .iter()
            .find(|node| node.state() != NodeState::InSync)
            .map(|node| format!("{} is {:?} {}", node.name, node.state(), node.last_error));
        let missing = fleet.nodes.len() < nodes;
        let late = late.or_else(|| missing.then(|| "nodes are missing".to_owned()));
        late.map_or_else(|| Ok(fleet.clone()), Err)
    })?;
    let took = began.elapsed();
    let control = fleet.control_plane.context("a fleet without a control plane")?;
    let (services, endpoints) = (control.services, control.endpoints);
    let folder = stage.manifests.folder.display();
    aside!("kp-controlplane reads {folder}: {services} Services with {endpoints} endpoints");
    for node in &fleet.nodes {
        let sync = last_sync(node).copied().unwrap_or_default();
        let (name, operations, backend) = (&node.name, sync.operations, &node.backend);
        let took = span(Duration::from_micros(sync.total_us));
        aside!("kp-nodeagent on {name:<14} {operations:>6} operations into {backend} in {took}");
    }
    let nodes = plural(fleet.nodes.len(), "node");
    let seen = format!("{nodes} in {}", span(took));
    let what = ("every kernel holds everything", &*nodes);
    show.check(what, seen, Vec::new(), began);
    for issue in control.issues {
        aside!("{} {}: {}", issue.kind, issue.name, issue.reason);
    }
    steal(show, stage)
}

/// Lets a thief, who has the certificate of one node, speak for another.
fn steal(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let [victim, owner, ..] = &stage.objects.nodes[..] else {
        return Ok(());
    };
    let began = Instant::now();
    let (victim, owner) = (victim.name.to_string(), owner.name.to_string());
    let answer = stage.impersonate(&victim, &owner)?;
    aside!("a thief with the certificate of {owner} says that it is {victim}:");
    let refusal = answer.find("the credential is of node");
    let refused = refusal.is_some();
    aside!(
        "{}",
        fit(
            answer.get(refusal.unwrap_or_default()..).unwrap_or_default(),
            94
        )
    );
    let wrong = if refused {
        Vec::new()
    } else {
        vec![format!("the control plane answers: {answer}")]
    };
    let seen = if refused { "refused" } else { "not refused" };
    let what = ("a stolen certificate opens no other node", "refused");
    show.check(what, seen, wrong, began);
    Ok(())
}

/// Prints how to enter the namespaces, and waits for Ctrl-C.
pub(crate) fn wait(stage: &Stage, entry: Entry) -> Result<()> {
    let own = std::process::id();
    let user = match entry {
        Entry::Privileged => String::new(),
        Entry::UserNamespace => format!("-t {own} -U --preserve-credentials "),
    };
    let inside = |ns: &NetNs, command: &str| {
        let file = ns.as_fd().as_raw_fd();
        format!("nsenter {user}--net=/proc/{own}/fd/{file} {command}")
    };
    let line = |what: &str, command: String| say!("  {}\n    {command}", what.dimmed());
    say!("\n{}", "Everything is still running. Look inside:".bold());
    let (kpctl, control) = (stage.kpctl(&[]), stage.control()?);
    let kpctl = [kpctl.get_program()].into_iter().chain(kpctl.get_args());
    let kpctl = Vec::from_iter(kpctl.map(|word| word.to_string_lossy())).join(" ");
    let watch = inside(control, &format!("{kpctl} status --watch"));
    line("the fleet, as it changes", watch);
    let services = inside(control, &format!("{kpctl} get services"));
    line("all Services", services);
    if let Some(node) = stage.world.topology.nodes().next() {
        let rules = inside(node.ns(), "nft list table ip kplane");
        line(&format!("the rules of {}", node.name()), rules);
    }
    for role in [Role::Client, Role::Pod] {
        let mut callers = stage.world.callers.iter();
        if let Some(caller) = callers.find(|caller| caller.role == role) {
            let what = format!("a shell in the {role:?} at {}", caller.node);
            line(&what, inside(&caller.ns, "bash"));
        }
    }
    if let Some(port) = star(stage).and_then(|service| service.ports.first()) {
        let (ip, port, service) = (port.port.cluster_ip, port.port.port, &port.port.key.service);
        let what = format!("in there: who answers for {service}?");
        line(&what, format!("head -1 < /dev/tcp/{ip}/{port}"));
    }
    let manifests = stage.manifests.folder.display().to_string();
    line("manifests: edit them, and watch the fleet", manifests);
    line("logs", stage.log("*").display().to_string());
    let pid = |(name, process): &(String, Process)| format!("{name} {}", process.id());
    let pids: Vec<String> = stage.processes.iter().map(pid).collect();
    line("processes", pids.join(", "));
    say!("\n{}", "Ctrl-C ends it and cleans up.".bold());
    if let Err(Interrupted) = interrupt::sleep(Duration::MAX) {
        interrupt::clear();
    }
    Ok(())
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
            let node = &caller.node;
            wrong.push(format!("{node} does not serve any more without its agent"));
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
    let served = probes.len();
    aside!("{processes} processes ended; {served} of {nodes} asked without them");
    aside!("kp-nodeagent --cleanup on {nodes}: the rules are gone");
    let good = wrong.is_empty();
    let seen = if good { "served on, then gone" } else { "not so" };
    let what = ("rules outlive agents, until --cleanup", "as designed");
    show.check(what, seen, wrong, began);
    Ok(())
}

/// Returns a call through each node.
fn probes(stage: &Stage) -> Result<Vec<(Caller, Probe)>> {
    let Some(service) = stage.star()? else {
        return Ok(Vec::new());
    };
    let mut calls = tcp_calls(stage, service);
    calls.retain(|call| call.caller.role == Role::Client && call.kind == Kind::ClusterIP);
    calls.dedup_by_key(|call| call.caller.node.clone());
    let probe = |call: Call| {
        let probe = Probe::tcp(call.to).source(call.source);
        (call.caller, probe.timeout(PATIENCE))
    };
    Ok(calls.into_iter().map(probe).collect())
}
