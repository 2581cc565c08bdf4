//! Continuous load on one Service, from everywhere, that counts what fails.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_model::Protocol;
use kplane_tests::client::Probe;
use kplane_tests::load::{Load, Pace, Report};

use super::super::call::Call;
use super::super::expect::{Expect, Target};
use super::super::objects::{Objects, Port};
use super::super::screen::{Screen, Tone, count, fit, span};
use super::super::stage::Stage;
use super::super::survey::Planner;
use super::super::world::{Role, speaks};

/// How hard each caller asks: at most 1,000 connects a second, so that a small machine has time for
/// everything else.
const PACE: Pace = Pace {
    threads: 1,
    think: Duration::from_millis(1),
};

/// Callers that call all the time; dropped = stopped.
#[derive(Debug)]
pub(super) struct Loads {
    loads: Vec<(Call, Load)>,
}

/// What they have seen.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Number of connects.
    pub(super) connects: u64,
    /// Number of those that failed.
    pub(super) failed: u64,
    /// Which failed, and how.
    pub(super) wrong: Vec<String>,
}

/// The Service whose pods are replaced: TCP, without affinity or hints, with as many pods as
/// possible, best with a NodePort.
pub(crate) fn star(objects: &Objects) -> Option<&Port> {
    let ports = objects.services.iter().flat_map(|service| &service.ports);
    ports
        .filter(|port| is_fit(objects, port))
        .max_by_key(|port| {
            let reach = port.port.node_port.is_some();
            (
                reach,
                port.endpoints.len(),
                std::cmp::Reverse(port.port.key.clone()),
            )
        })
}

fn is_fit(objects: &Objects, port: &Port) -> bool {
    let service = &port.port;
    let policies = [service.internal_policy, service.external_policy];
    let plain = service.key.protocol == Protocol::Tcp
        && service.affinity_timeout_s.is_none()
        && policies
            .iter()
            .all(|policy| *policy == kplane_model::TrafficPolicy::Cluster);
    let movable = port.endpoints.iter().all(|endpoint| {
        let mut nodes = objects.nodes.iter();
        let node = nodes.find(|node| Some(&*node.name) == endpoint.node.as_deref());
        let inside = node.is_some_and(|node| {
            node.pod_cidrs
                .iter()
                .any(|cidr| cidr.contains(endpoint.addr.ip))
        });
        inside && endpoint.ready && endpoint.zone_hints.is_empty() && endpoint.node_hints.is_empty()
    });
    plain && movable && port.endpoints.len() >= 2
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

    /// Number of connects so far, and of those that failed.
    pub(super) fn so_far(&self) -> (u64, u64) {
        let reports = self.loads.iter().map(|(_, load)| load.report());
        reports.fold((0, 0), |(ok, lost), r| {
            (ok + r.ok() + r.lost(), lost + r.lost())
        })
    }

    /// Ends them, and prints a line for each.
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
