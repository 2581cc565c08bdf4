//! The fate of one Service under load: its pods are replaced, and an agent is killed and
//! started again.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use kplane_model::{Endpoint, Family, Protocol};
use kplane_proto::v1::{Fleet, NodeState, NodeStatus};
use kplane_rig::ask::Expect;
use kplane_rig::client::{self, Probe};
use kplane_rig::histogram::Histogram;
use kplane_rig::load::{Load, Pace};
use owo_colors::OwoColorize as _;
use serde_json::{Value, json};

use super::call::{Call, plan};
use super::calls::survey;
use super::interrupt;
use super::objects::{Objects, PodSpec, Port, Service, short};
use super::show::{Show, aside, fit, plural, say, span};
use super::stage::{Stage, last_sync};
use super::world::Role;

/// The rate of each caller: at most 1,000 connects a second, so that a small machine has time for
/// everything else.
const PACE: Pace = Pace {
    threads: 1,
    think: Duration::from_millis(1),
};
/// Number of callers.
const CALLERS: usize = 5;
/// The preStop pause of Kubernetes: connections to the old pod that kernels chose before they got
/// the change still arrive.
const PRE_STOP: Duration = Duration::from_millis(100);
/// Time that open connections have when a pod ends.
const GRACE: Duration = Duration::from_secs(1);
/// Time without an agent, and time under load after its return.
const PAUSE: Duration = Duration::from_millis(700);

/// Callers that call all the time. Dropping them stops the calls.
#[derive(Debug)]
struct Loads(Vec<(Call, Load)>);

/// Times from the file to the kernel, by node.
type Times = BTreeMap<String, Histogram>;

/// Returns the Service that is called all the time, by TCP, with an endpoint for every caller. It
/// prefers one whose pods can be replaced, then one with a NodePort, then the one with most pods.
pub(crate) fn star(stage: &Stage) -> Option<&Service> {
    stage
        .objects
        .services
        .iter()
        .filter(|service| {
            let any = |call: &Call| matches!(call.expect, Expect::Reach(_)) && !call.is_sticky();
            let calls = tcp_calls(stage, service);
            !calls.is_empty() && calls.iter().all(any)
        })
        .max_by_key(|service| {
            let pods: usize = service.ports.iter().map(|port| port.endpoints.len()).sum();
            let reach = service.kind != "ClusterIP";
            (is_movable(&stage.objects, service), reach, pods)
        })
}

/// Returns all calls of a Service by TCP, but those of its own pods.
pub(crate) fn tcp_calls(stage: &Stage, service: &Service) -> Vec<Call> {
    let mut calls = plan(stage, service);
    calls.retain(|call| call.port.port.key.protocol == Protocol::Tcp);
    calls.retain(|call| stage.objects.pod(call.source).is_none() || call.caller.role != Role::Pod);
    calls
}

/// Returns whether a Service's pods can be replaced: there are some, on nodes that have addresses
/// for more.
fn is_movable(objects: &Objects, service: &Service) -> bool {
    let movable = |port: &Port| {
        let has_room = |endpoint: &Endpoint| {
            let node = objects.node(endpoint.node.as_deref().unwrap_or_default());
            node.into_iter()
                .flat_map(|node| &node.pod_cidrs)
                .any(|cidr| cidr.family() == port.port.key.family)
        };
        port.endpoints.len() >= 2 && port.endpoints.iter().all(|e| e.ready && has_room(e))
    };
    service.ports.iter().all(|port| movable(port))
}

impl Loads {
    /// Starts callers of the Service, of all kinds and at all nodes or only at one.
    fn start(stage: &Stage, service: &Service, node: Option<&str>) -> Result<Self> {
        let mut calls = tcp_calls(stage, service);
        calls.retain(|call| node.is_none_or(|node| call.caller.node == node));
        let every = calls.len().div_ceil(CALLERS).max(1);
        let mut loads = Vec::new();
        for call in calls.into_iter().step_by(every) {
            let probe = Probe::new(client::Protocol::Tcp, call.to).source(call.source);
            let load = Load::start(&call.caller.ns, probe, PACE)?;
            loads.push((call, load));
        }
        Ok(Self(loads))
    }

    /// Ends the callers, prints a line for each, and records that no connect failed.
    fn stop(self, show: &mut Show, what: &str, mut wrong: Vec<String>, began: Instant) {
        let (mut connects, mut failed) = (0, 0);
        for (call, load) in self.0 {
            let report = load.stop();
            let (all, lost) = (report.ok() + report.lost(), report.lost());
            let (who, latency) = (fit(&call.to_string(), 52), times(&report.latency));
            say!("      {who} {all:>6} connects, {lost} failed  {latency}");
            for (how, times) in &report.failed {
                wrong.push(format!("{call}: {how}, {times} times"));
            }
            if all == 0 {
                wrong.push(format!("{call}: never came to call"));
            }
            (connects, failed) = (connects + all, failed + lost);
        }
        let seen = format!("{failed} of {connects}");
        show.check((what, "0 connects failed"), seen, wrong, began);
    }
}

fn times(histogram: &Histogram) -> String {
    let (p50, max) = (histogram.percentile(50.0), histogram.max());
    format!("p50 {}, max {}", span(p50), span(max))
}

/// Replaces all pods of the Service under load, one by one.
pub(crate) fn roll(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let star = star(stage);
    let name = star.map(|service| service.name.clone());
    let Some(service) = star.filter(|service| is_movable(&stage.objects, service)) else {
        aside!("no Service here has two pods for everybody, on nodes with room for more: left out");
        stage.star = name;
        return Ok(());
    };
    let began = Instant::now();
    let endpoints = service.ports.iter().flat_map(|port| &port.endpoints);
    let olds: BTreeMap<String, PodSpec> = endpoints
        .filter_map(|endpoint| stage.objects.pod(endpoint.addr.ip))
        .map(|pod| (pod.name.clone(), pod.clone()))
        .collect();
    let loads = Loads::start(stage, service, None)?;
    let name = service.name.clone();
    stage.star = Some(name.clone());
    let mut by_node = Times::new();
    let mut all = olds.values();
    let replaced = all.try_for_each(|old| replace(stage, old, &mut by_node));
    let pods = plural(olds.len(), "pod");
    let what = format!("{pods} of {} replaced under load", name.name);
    loads.stop(show, &what, Vec::new(), began);
    replaced?;
    stage.reread()?;

    aside!("from saving the YAML to the kernel's acknowledgement, to the next ms of the clock:");
    let mut all = Histogram::default();
    for (node, histogram) in &by_node {
        say!("      {node:<14} {}", times(histogram));
        all.merge(histogram);
    }
    let what = format!("{} of the YAML, to the kernels", plural(olds.len(), "edit"));
    let expected = format!("in all {}", by_node.len());
    show.check((&what, &expected), times(&all), Vec::new(), began);
    // The new pods, and no others, answer at all addresses.
    let service = stage.objects.service(&name)?;
    survey(show, stage, service, "every path again")
}

/// Replaces one pod by a new one on the same node, which takes its place in the EndpointSlices.
fn replace(stage: &mut Stage, old: &PodSpec, times: &mut Times) -> Result<()> {
    interrupt::check()?;
    let node = old.node.clone().context("a pod is on no node")?;
    let mut pairs = BTreeMap::new();
    for ip in &old.ips {
        let mut cidrs = stage.objects.node(&node)?.pod_cidrs.iter().copied();
        let cidr = cidrs
            .find(|cidr| cidr.family() == Family::of(*ip))
            .with_context(|| format!("{node} has no range of pods for {ip}"))?;
        pairs.insert(ip.to_string(), stage.world.take(cidr)?);
    }
    let new = PodSpec {
        name: format!("{}-new", old.name),
        ips: pairs.values().copied().collect(),
        ..old.clone()
    };
    stage.world.add_pod(&new)?;
    for (node, took) in stage.edit(|object| move_endpoints(object, &pairs, short(&new.name)))? {
        times.entry(node).or_default().record(took);
    }
    interrupt::sleep(PRE_STOP)?;
    let pod = stage.world.topology.pod_mut(&old.name)?;
    for (protocol, port) in &old.listens {
        if let Some(protocol) = client::Protocol::of(*protocol) {
            pod.stop(protocol, *port, GRACE)?;
        }
    }
    let (new, old) = (&new.name, &old.name);
    say!("      {node:<14} {new} took the place of {old}");
    stage.world.topology.remove_pod(old)
}

/// Gives endpoints their new addresses and their pod's new name; returns whether there were some.
fn move_endpoints(object: &mut Value, pairs: &BTreeMap<String, IpAddr>, name: &str) -> bool {
    let is_slice = object["kind"] == "EndpointSlice";
    let endpoints = if is_slice { object.get_mut("endpoints") } else { None };
    let endpoints = endpoints.and_then(Value::as_array_mut);
    let mut changed = false;
    for endpoint in endpoints.into_iter().flatten() {
        let old = endpoint["addresses"][0].as_str().unwrap_or_default();
        if let Some(ip) = pairs.get(old) {
            endpoint["addresses"] = json!([ip]);
            if !endpoint["targetRef"].is_null() {
                endpoint["targetRef"]["name"] = name.into();
            }
            changed = true;
        }
    }
    changed
}

/// Shows the fleet and one Service by `kpctl`.
pub(crate) fn ask_kpctl(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let began = Instant::now();
    // The cluster of a user may have conflicts of its own.
    let mut wrong = Vec::from_iter(kpctl(stage, &["status", "--check=nodes"])?);
    if let Some(star) = &stage.star {
        wrong.extend(kpctl(stage, &["describe", "service", &star.to_string()])?);
    }
    let seen = if wrong.is_empty() { "0" } else { "another" };
    show.check(
        ("kpctl: every node is in sync", "exit code 0"),
        seen,
        wrong,
        began,
    );
    Ok(())
}

/// Runs a command of `kpctl` below its own text; returns the error, if any.
fn kpctl(stage: &Stage, args: &[&str]) -> Result<Option<String>> {
    let shown = format!("kpctl {}", args.join(" "));
    say!("\n  {} {}", "$".dimmed(), shown.bold());
    let mut command = stage.kpctl(args);
    let run = || command.status().context("start kpctl");
    let status = stage.control()?.run(run)?;
    Ok((!status.success()).then(|| format!("{shown}: {status}")))
}

/// Kills the agent of the first node, and starts it again: the kernel keeps serving, and the new
/// agent takes over the rules it finds.
pub(crate) fn restart(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let Some(service) = stage.star()? else {
        aside!("without a Service to call there is nothing to see: left out");
        return Ok(());
    };
    let began = Instant::now();
    let node = stage.objects.nodes[0].name.to_string();
    let loads = Loads::start(stage, service, Some(&node))?;
    interrupt::sleep(PAUSE)?;

    stage.kill_agent(&node);
    stage.wait("the control plane notices", |fleet| {
        state(fleet, &node, NodeState::Disconnected).map(drop)
    })?;
    let wrong = kpctl(stage, &["get", "nodes"])?;
    say!("");
    interrupt::sleep(PAUSE)?;

    let (started, at) = (Instant::now(), SystemTime::now());
    stage.start_agent(&node)?;
    let sync = stage.wait("the agent is back", |fleet| {
        let sync = last_sync(state(fleet, &node, NodeState::InSync)?).ok_or("no report")?;
        // Until the new agent's first report the control plane has the old agent's.
        let finished = UNIX_EPOCH + Duration::from_millis(sync.finished_at_ms);
        let new = (finished >= at).then_some(*sync);
        new.ok_or_else(|| "the report of the old agent".to_owned())
    })?;
    let took = span(started.elapsed());
    interrupt::sleep(PAUSE)?;
    let what = format!("agent on {node} killed and restarted");
    loads.stop(show, &what, wrong.into_iter().collect(), began);

    let seen = format!("{} changes, in sync in {took}", sync.operations);
    aside!("the new agent: {seen}");
    let wrong = match sync.operations {
        0 => Vec::new(),
        _ => vec![format!("{seen}, although nothing has changed meanwhile")],
    };
    let what = ("it takes over what the kernel holds", "0 changes");
    show.check(what, seen, wrong, started);
    Ok(())
}

/// Returns the status of a node in this state.
fn state<'a>(fleet: &'a Fleet, node: &str, wanted: NodeState) -> Result<&'a NodeStatus, String> {
    let found = fleet.nodes.iter().find(|status| status.name == node);
    let state = found.map(NodeStatus::state);
    found
        .filter(|status| status.state() == wanted)
        .ok_or_else(|| format!("{state:?}"))
}
