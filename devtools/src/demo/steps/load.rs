//! Continuous load on one Service, from all kinds of callers, that counts failures.

use std::cmp::Reverse;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_model::{Endpoint, Protocol, ServiceName, TrafficPolicy};
use kplane_rig::client::Probe;
use kplane_rig::load::{Load, Pace, Report};

use super::super::call::Call;
use super::super::expect::{Expect, Target};
use super::super::objects::{Objects, Port};
use super::super::screen::{Screen, Tone, count, fit, span};
use super::super::stage::Stage;
use super::super::survey::Planner;
use super::super::world::{Role, speaks};

/// The rate of each caller: at most 1,000 connects a second, so that a small machine has time for
/// everything else.
const PACE: Pace = Pace {
    threads: 1,
    think: Duration::from_millis(1),
};

/// Callers that call all the time. Dropping them stops the calls.
#[derive(Debug)]
pub(super) struct Loads {
    loads: Vec<(Call, Load)>,
}

/// The results of the callers.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Number of connects.
    pub(super) connects: u64,
    /// Number of those that failed.
    pub(super) failed: u64,
    /// The failed calls, and their errors.
    pub(super) wrong: Vec<String>,
}

/// Returns the port that is called all the time: TCP, with an endpoint for every caller. It prefers
/// a port whose pods can be replaced, then one with a NodePort, then the one with most pods. `name`
/// limits it to one Service.
pub(super) fn star<'a>(objects: &'a Objects, name: Option<&ServiceName>) -> Option<&'a Port> {
    let services = objects.services.iter();
    let services = services.filter(|service| name.is_none_or(|name| service.name == *name));
    let ports = services.flat_map(|service| &service.ports);
    ports.filter(|port| is_plain(port)).max_by_key(|port| {
        let reach = port.port.node_port.is_some();
        let key = Reverse(port.port.key.clone());
        (is_movable(objects, port), reach, port.endpoints.len(), key)
    })
}

/// Returns whether every client may call the port and gets any endpoint.
fn is_plain(port: &Port) -> bool {
    let service = &port.port;
    let policies = [service.internal_policy, service.external_policy];
    let hints = |e: &Endpoint| e.zone_hints.len() + e.node_hints.len();
    service.key.protocol == Protocol::Tcp
        && service.affinity_timeout_s.is_none()
        && policies
            .iter()
            .all(|policy| *policy == TrafficPolicy::Cluster)
        && port.endpoints.iter().any(|endpoint| endpoint.ready)
        && port.endpoints.iter().all(|endpoint| hints(endpoint) == 0)
}

/// Returns whether the port's pods can be replaced: there are some, on nodes that have addresses
/// for more.
pub(super) fn is_movable(objects: &Objects, port: &Port) -> bool {
    let family = port.port.key.family;
    let has_room = |endpoint: &Endpoint| {
        let mut nodes = objects.nodes.iter();
        let node = nodes.find(|node| Some(&*node.name) == endpoint.node.as_deref());
        node.is_some_and(|node| node.pod_cidrs.iter().any(|cidr| cidr.family() == family))
    };
    port.endpoints.len() >= 2
        && port
            .endpoints
            .iter()
            .all(|endpoint| endpoint.ready && has_room(endpoint))
}

impl Loads {
    /// Starts callers at these nodes, in turn, and waits until each has had an answer.
    pub(super) fn start(stage: &Stage, port: &Port, nodes: &[&str]) -> Result<Self> {
        let node_port = port
            .port
            .node_port
            .map_or(Target::ClusterIp, Target::NodePort);
        let callers = [
            (Role::Client, node_port),
            (Role::Client, Target::ClusterIp),
            (Role::Pod, Target::ClusterIp),
            (Role::Node, Target::ClusterIp),
            (Role::Node, node_port),
        ];
        let planner = Planner::new(&stage.objects, &stage.world);
        let mut loads = Vec::new();
        for ((role, target), node) in callers.into_iter().zip(nodes.iter().cycle()) {
            // A node without pod ranges has no pod that calls.
            let Ok(caller) = stage.world.caller(role, node) else {
                continue;
            };
            let node = stage.node(node)?;
            let call = planner.call(port, target, caller, node);
            let call = call.context("no address of that family")?;
            ensure!(
                matches!(call.expect, Expect::Answer { .. }),
                "{call}: nobody would answer"
            );
            let protocol = speaks(call.protocol).context("no load for this protocol")?;
            let probe = Probe::new(protocol, call.to).source(call.source);
            let load = Load::start(&call.caller.ns, probe, PACE)?;
            loads.push((call, load));
        }
        Ok(Self { loads })
    }

    /// Returns the number of connects so far, and of those that failed.
    pub(super) fn so_far(&self) -> (u64, u64) {
        let reports = self.loads.iter().map(|(_, load)| load.report());
        reports.fold((0, 0), |(ok, lost), r| {
            (ok + r.ok() + r.lost(), lost + r.lost())
        })
    }

    /// Ends the callers, and prints a line for each.
    pub(super) fn stop(self, screen: &Screen) -> Seen {
        let mut seen = Seen::default();
        for (call, load) in self.loads {
            let report = load.stop();
            print(screen, &call, &report);
            seen.connects += report.ok() + report.lost();
            seen.failed += report.lost();
            for (how, times) in &report.failed {
                seen.wrong.push(format!("{call}: {how}, {times} times"));
            }
            if report.ok() + report.lost() == 0 {
                seen.wrong.push(format!("{call}: never came to call"));
            }
        }
        seen
    }
}

fn print(screen: &Screen, call: &Call, report: &Report) {
    let tone = if report.lost() == 0 {
        Tone::Good
    } else {
        Tone::Bad
    };
    let failed = screen.paint(tone, &format!("{} failed", report.lost()));
    let percentile = |percent| span(report.latency.percentile(percent));
    let latency = match report.ok() {
        0 => "never an answer".to_owned(),
        _ => format!("p50 {}, p99 {}", percentile(50.0), percentile(99.0)),
    };
    let latency = screen.paint(Tone::Faint, &latency);
    let who = fit(&call.to_string(), 52);
    let connects = count(report.ok() + report.lost());
    screen.line(format!(
        "      {who} {connects:>6} connects, {failed}  {latency}"
    ));
}
