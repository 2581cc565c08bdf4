//! Replaces pods, one by one, under load: a new one appears in the EndpointSlices, then the old one
//! goes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use kplane_model::{Family, ServiceName};
use kplane_rig::client::Protocol;
use serde_json::Value;

use super::super::interrupt;
use super::super::objects::{PodSpec, Port};
use super::super::screen::{Tone, count, fit, plural, span};
use super::super::stage::{Show, Stage};
use super::super::status::Landing;
use super::super::survey::Planner;
use super::super::world::speaks;
use super::load::{Loads, is_movable, star};
use super::survey::survey;

/// The preStop pause of Kubernetes: connections to the old pod that kernels chose before they got
/// the change still arrive.
const PRE_STOP: Duration = Duration::from_millis(100);
/// Time that open connections have when a pod ends.
const GRACE: Duration = Duration::from_secs(1);
/// Cells of a bar.
const BAR: usize = 30;

/// Times from the file to the kernel, by node.
type Times = BTreeMap<String, Vec<Duration>>;

/// Replaces all pods of the Service under load.
pub(super) fn run(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let Some(port) = star(&stage.objects, None) else {
        show.screen
            .aside("no Service here has TCP endpoints for everybody: left out");
        return Ok(());
    };
    let name = port.port.key.service.clone();
    stage.star = Some(name.clone());
    if !is_movable(&stage.objects, port) {
        show.screen
            .aside("no Service here has two pods that could get new addresses: left out");
        return Ok(());
    }
    let began = Instant::now();
    let nodes: Vec<String> = stage
        .objects
        .nodes
        .iter()
        .map(|n| n.name.to_string())
        .collect();
    let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let olds = pods_of(stage, port);
    let loads = Loads::start(stage, port, &nodes)?;

    let mut times = Times::new();
    let working = show.screen.working(format!("replacing the pods of {name}"));
    let mut landed = Ok(());
    for (index, old) in olds.iter().enumerate() {
        let (connects, failed) = loads.so_far();
        working.say(format!(
            "replacing pod {} of {} of {name}; {} connects, {failed} failed",
            index + 1,
            olds.len(),
            count(connects)
        ));
        landed = replace(stage, old, &mut times);
        if landed.is_err() {
            break;
        }
    }
    drop(working);
    let seen = loads.stop(&show.screen);
    landed?;
    stage.reread()?;

    let pods = plural(olds.len(), "pod");
    let what = format!("{pods} of {} replaced under load", name.name);
    let failed = format!("{} of {}", seen.failed, count(seen.connects));
    show.check((&what, "0 connects failed"), failed, seen.wrong, began);
    print_times(show, &times, began);
    afterwards(show, stage, &name)
}

/// Returns the pods behind a port.
fn pods_of(stage: &Stage, port: &Port) -> Vec<PodSpec> {
    let ips: BTreeSet<IpAddr> = port
        .endpoints
        .iter()
        .map(|endpoint| endpoint.addr.ip)
        .collect();
    let pods = stage.objects.pods.iter();
    pods.filter(|pod| !pod.ips.is_disjoint(&ips))
        .cloned()
        .collect()
}

/// Replaces one pod by a new one on the same node.
fn replace(stage: &mut Stage, old: &PodSpec, times: &mut Times) -> Result<()> {
    interrupt::check()?;
    let node = old
        .node
        .clone()
        .with_context(|| format!("{} is on no node", old.name))?;
    let mut pairs = BTreeMap::new();
    for ip in &old.ips {
        pairs.insert(
            ip.to_string(),
            stage.world.new_address(&node, Family::of(*ip))?,
        );
    }
    let new = PodSpec {
        name: format!("{}-new", old.name),
        ips: pairs.values().copied().collect(),
        ..old.clone()
    };
    stage.world.add_pod(&new)?;
    let landed = stage.edit(|object| add(object, &pairs, &new.name))?;
    note(times, landed);
    let landed = stage.edit(|object| remove(object, &pairs))?;
    note(times, landed);
    interrupt::sleep(PRE_STOP)?;
    let pod = stage.world.topology.pod_mut(&old.name)?;
    for (protocol, port) in &old.listens {
        let protocol: Option<Protocol> = speaks(*protocol);
        protocol.map_or(Ok(()), |protocol| pod.stop(protocol, *port, GRACE))?;
    }
    stage.world.remove_pod(&old.name)
}

fn note(times: &mut Times, landed: Vec<Landing>) {
    for landing in landed {
        times.entry(landing.node).or_default().push(landing.took);
    }
}

/// Adds an endpoint with a new address next to each endpoint that has an old one.
fn add(object: &mut Value, pairs: &BTreeMap<String, IpAddr>, name: &str) -> bool {
    let Some(endpoints) = endpoints(object) else {
        return false;
    };
    let mut more = Vec::new();
    for endpoint in endpoints.iter() {
        let old = endpoint["addresses"][0].as_str().unwrap_or_default();
        if let Some(ip) = pairs.get(old) {
            let mut endpoint = endpoint.clone();
            endpoint["addresses"] = Value::from(vec![ip.to_string()]);
            if !endpoint["targetRef"].is_null() {
                endpoint["targetRef"]["name"] = name.into();
            }
            more.push(endpoint);
        }
    }
    let changed = !more.is_empty();
    endpoints.extend(more);
    changed
}

/// Removes endpoints with an old address.
fn remove(object: &mut Value, pairs: &BTreeMap<String, IpAddr>) -> bool {
    let Some(endpoints) = endpoints(object) else {
        return false;
    };
    let before = endpoints.len();
    endpoints.retain(|endpoint| {
        let address = endpoint["addresses"][0].as_str().unwrap_or_default();
        !pairs.contains_key(address)
    });
    endpoints.len() < before
}

fn endpoints(object: &mut Value) -> Option<&mut Vec<Value>> {
    let is_slice = object["kind"] == "EndpointSlice";
    object
        .get_mut("endpoints")
        .filter(|_| is_slice)?
        .as_array_mut()
}

/// Prints how long changes took from the file to the kernel of each node.
fn print_times(show: &mut Show, times: &Times, began: Instant) {
    let screen = show.screen;
    let most = times.values().flatten().copied().max().unwrap_or_default();
    screen.aside("from saving the YAML to the kernel's acknowledgement, to the next ms of the agents' clock:");
    let mut all = Vec::new();
    for (node, took) in times {
        let mut took = took.clone();
        took.sort();
        let (p50, max) = (took[took.len() / 2], took[took.len() - 1]);
        let bar = screen.bar(p50.as_secs_f64() / most.as_secs_f64().max(1e-9), BAR);
        let node = fit(node, 12);
        let numbers = format!("p50 {:>6}  max {:>6}", span(p50), span(max));
        let changes = screen.paint(Tone::Faint, &plural(took.len(), "change"));
        screen.line(format!("      {node} {bar} {numbers}  {changes}"));
        all.extend(took);
    }
    all.sort();
    let p50 = all.get(all.len() / 2).copied().unwrap_or_default();
    let seen = format!("p50 {}, max {}", span(p50), span(most));
    let nodes = times.len();
    let what = format!(
        "{} of the YAML, to the kernels",
        plural(all.len() / nodes.max(1), "edit")
    );
    show.check((&what, &format!("in all {nodes}")), seen, Vec::new(), began);
}

/// Checks that the new pods, and no others, answer at all addresses.
fn afterwards(show: &mut Show, stage: &Stage, name: &ServiceName) -> Result<()> {
    let planner = Planner::new(&stage.objects, &stage.world);
    survey(
        show,
        &planner,
        stage.objects.service(name)?,
        "every path again",
    )?;
    Ok(())
}

/// Returns the current port of the Service under load.
pub(super) fn port_of<'a>(stage: &'a Stage, name: &ServiceName) -> Result<&'a Port> {
    let port = star(&stage.objects, Some(name));
    port.with_context(|| format!("{name} cannot be called any more"))
}
