//! A few calls in detail: which pods answer, how often, and which caller address they see.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Context as _, Result};
use kplane_model::{Family, Protocol, ServiceName};

use super::super::call::{Call, Finding};
use super::super::expect::{Expect, SeenAs, Target};
use super::super::interrupt;
use super::super::objects::Port;
use super::super::screen::{Screen, Tone, count, fit, plural, span};
use super::super::stage::{Show, Stage};
use super::super::survey::Planner;
use super::super::world::Role;

/// Calls in a scenario: a pod's share of a sixth is 16.7 % +- 1.5 % (1 sigma) then.
const CALLS: u32 = 600;
/// Calls that must get no answer, each of which takes a while to confirm.
const SILENT_CALLS: u32 = 4;
/// Standard deviations by which a pod's share may be off: less than one run in 10,000 fails because
/// of it.
const SIGMAS: f64 = 5.0;
/// Cells of a bar.
const BAR: usize = 36;

/// A call that shows something of interest.
struct Scenario {
    /// The point of the scenario.
    title: &'static str,
    service: &'static str,
    family: Family,
    protocol: Protocol,
    target: Kind,
    role: Role,
    node: &'static str,
}

/// The address of a Service that is called.
#[derive(Clone, Copy)]
enum Kind {
    ClusterIp,
    ExternalIp,
    LoadBalancer,
    NodePort,
}

const SCENARIOS: &[Scenario] = &[
    Scenario {
        title: "ClusterIP: pods call pods, and keep their address",
        service: "web",
        family: Family::V4,
        protocol: Protocol::Tcp,
        target: Kind::ClusterIp,
        role: Role::Pod,
        node: "node-1",
    },
    Scenario {
        title: "The same Service over IPv6",
        service: "web",
        family: Family::V6,
        protocol: Protocol::Tcp,
        target: Kind::ClusterIp,
        role: Role::Pod,
        node: "node-2",
    },
    Scenario {
        title: "UDP, from a node itself; the pod that is not ready gets nothing",
        service: "dns",
        family: Family::V4,
        protocol: Protocol::Udp,
        target: Kind::ClusterIp,
        role: Role::Node,
        node: "node-3",
    },
    Scenario {
        title: "NodePort: a client outside calls any node and reaches pods on all",
        service: "api",
        family: Family::V4,
        protocol: Protocol::Tcp,
        target: Kind::NodePort,
        role: Role::Client,
        node: "node-2",
    },
    Scenario {
        title: "External IP with policy Local: the node's own pods see the client's address",
        service: "gateway",
        family: Family::V4,
        protocol: Protocol::Tcp,
        target: Kind::ExternalIp,
        role: Role::Client,
        node: "node-1",
    },
    Scenario {
        title: "The same Service at its load balancer's address, through another node",
        service: "gateway",
        family: Family::V4,
        protocol: Protocol::Tcp,
        target: Kind::LoadBalancer,
        role: Role::Client,
        node: "node-3",
    },
    Scenario {
        title: "The same address through a node without such a pod: dropped, not sent elsewhere",
        service: "gateway",
        family: Family::V4,
        protocol: Protocol::Tcp,
        target: Kind::LoadBalancer,
        role: Role::Client,
        node: "node-2",
    },
    Scenario {
        title: "Source ranges: a caller from the office's network is let in",
        service: "office",
        family: Family::V4,
        protocol: Protocol::Tcp,
        target: Kind::LoadBalancer,
        role: Role::Guest,
        node: "node-1",
    },
    Scenario {
        title: "Source ranges: what comes from elsewhere is dropped",
        service: "office",
        family: Family::V4,
        protocol: Protocol::Tcp,
        target: Kind::LoadBalancer,
        role: Role::Client,
        node: "node-1",
    },
    Scenario {
        title: "Zone hints: a pod in zone-b stays in zone-b",
        service: "cache",
        family: Family::V4,
        protocol: Protocol::Tcp,
        target: Kind::ClusterIp,
        role: Role::Pod,
        node: "node-3",
    },
    Scenario {
        title: "No endpoints: refused at once instead of left waiting",
        service: "returns",
        family: Family::V4,
        protocol: Protocol::Tcp,
        target: Kind::ClusterIp,
        role: Role::Client,
        node: "node-1",
    },
];

/// Runs all scenarios.
pub(super) fn run(show: &mut Show, stage: &mut Stage) -> Result<()> {
    for scenario in SCENARIOS {
        interrupt::check()?;
        // Without IPv6 there is no such port.
        if let Some(port) = scenario.port(stage)? {
            let began = Instant::now();
            scenario.play(show, stage, port, began)?;
        }
    }
    Ok(())
}

impl Scenario {
    fn port<'a>(&self, stage: &'a Stage) -> Result<Option<&'a Port>> {
        let service = stage
            .objects
            .service(&ServiceName::new("shop", self.service))?;
        let key = |port: &&Port| (port.port.key.family, port.port.key.protocol);
        Ok(service
            .ports
            .iter()
            .find(|port| key(port) == (self.family, self.protocol)))
    }

    fn target(&self, port: &Port) -> Option<Target> {
        let port = &port.port;
        match self.target {
            Kind::ClusterIp => Some(Target::ClusterIp),
            Kind::ExternalIp => port.external_ips.first().copied().map(Target::ExternalIp),
            Kind::LoadBalancer => port
                .load_balancer_ips
                .first()
                .copied()
                .map(Target::LoadBalancer),
            Kind::NodePort => port.node_port.map(Target::NodePort),
        }
    }

    fn play(&self, show: &mut Show, stage: &Stage, port: &Port, began: Instant) -> Result<()> {
        let caller = stage.world.caller(self.role, self.node)?;
        let target = self
            .target(port)
            .context("the Service has no such address")?;
        let node = stage.node(self.node)?;
        let planner = Planner::new(&stage.objects, &stage.world);
        let call = planner.call(port, target, caller, node);
        let call = call.context("no address of that family")?;
        let calls = match call.expect {
            Expect::Silence => SILENT_CALLS,
            Expect::Answer { .. } | Expect::Refused => CALLS,
        };
        let finding = call.make_times(calls as usize, calls as usize)?;
        let took = began.elapsed();

        let screen = show.screen;
        screen.gap();
        screen.line(format!("  {}", self.title));
        screen.aside(format!("{call}: {} connections", count(finding.calls)));
        print_bars(&screen, &planner, port, &call, &finding);
        let mut wrong: Vec<String> = call.complaint(&finding).into_iter().collect();
        wrong.extend(unfair(&planner, &call, &finding));
        let verdict = match wrong.is_empty() {
            true => format!("{}; {} each", seen_as(&call), span(took / calls)),
            false => "not as it should be:".to_owned(),
        };
        let verdict = screen.paint(Tone::Faint, &verdict);
        screen.line(format!("  {}{verdict}", screen.mark(wrong.is_empty())));
        let (shown, expected, seen) = summary(&call, &finding);
        let family = if self.family == Family::V6 {
            " IPv6"
        } else {
            ""
        };
        let service = &port.port.key.service;
        let what = format!("{service} {} {}{family}: {shown}", call.kind, self.protocol);
        show.check((&what, &expected), seen, wrong, began);
        Ok(())
    }
}

/// Prints a line for each endpoint of the port, with the reason if it must get nothing.
fn print_bars(screen: &Screen, planner: &Planner<'_>, port: &Port, call: &Call, found: &Finding) {
    let total: u64 = found.answers.values().sum();
    let most = found.answers.values().copied().max().unwrap_or(0).max(1);
    let may = allowed(call);
    for endpoint in &port.endpoints {
        let address = SocketAddr::new(endpoint.addr.ip, endpoint.addr.port);
        let answers = found.answers.get(&address).copied().unwrap_or(0);
        let share = answers as f64 * 100.0 / total.max(1) as f64;
        let name = fit(&planner.pod_name(endpoint.addr.ip), 10);
        let node = screen.paint(
            Tone::Faint,
            &fit(endpoint.node.as_deref().unwrap_or("?"), 8),
        );
        let bar = screen.bar(answers as f64 / most as f64, BAR);
        let why_not = match () {
            () if may.contains_key(&address) => "",
            () if !endpoint.ready => "not ready",
            () if is_shut_out(port, call) => "not for this caller",
            () if call.kind == "ClusterIP" => "another zone",
            () => "another node",
        };
        let why_not = screen.paint(Tone::Faint, why_not);
        let line = format!("      {name} {node} {bar} {share:5.1} % {answers:>5}  {why_not}");
        screen.line(line.trim_end());
    }
}

/// Returns whether the Service's source ranges exclude the caller (A8).
fn is_shut_out(port: &Port, call: &Call) -> bool {
    call.expect == Expect::Silence && !port.port.source_ranges.is_empty()
}

/// Returns the endpoints that may answer, and their number of expected answers per call.
fn allowed(call: &Call) -> BTreeMap<SocketAddr, f64> {
    match &call.expect {
        Expect::Answer { from, .. } => from
            .iter()
            .map(|endpoint| (*endpoint, 1.0 / from.len() as f64))
            .collect(),
        Expect::Refused | Expect::Silence => BTreeMap::new(),
    }
}

/// Returns endpoints that got far more or less than their share (B10: uniform random).
fn unfair(planner: &Planner<'_>, call: &Call, found: &Finding) -> Vec<String> {
    let total = found.answers.values().sum::<u64>() as f64;
    let mut unfair = Vec::new();
    for (endpoint, share) in allowed(call) {
        let got = found.answers.get(&endpoint).copied().unwrap_or(0);
        let expected = total * share;
        let sigma = (total * share * (1.0 - share)).sqrt();
        if (got as f64 - expected).abs() > SIGMAS * sigma {
            let name = planner.pod_name(endpoint.ip());
            unfair.push(format!(
                "{name} answered {got} times, its share is {expected:.0}"
            ));
        }
    }
    unfair
}

fn seen_as(call: &Call) -> String {
    match &call.expect {
        Expect::Answer {
            seen_as: SeenAs::Caller,
            ..
        } => {
            format!("the pods see the caller's own address, {}", call.source)
        }
        Expect::Answer {
            seen_as: SeenAs::Node,
            ..
        } => {
            format!("the pods see the node's address, {}", call.node_ip)
        }
        Expect::Refused => "refused, every time".to_owned(),
        Expect::Silence => "no answer, every time".to_owned(),
    }
}

/// Returns subject, expected and seen, for the summary.
fn summary(call: &Call, found: &Finding) -> (&'static str, String, String) {
    match &call.expect {
        Expect::Answer { from, .. } => {
            let total = found.answers.values().sum::<u64>().max(1);
            let percent = |count: Option<&u64>| {
                let percent = count.copied().unwrap_or(0) as f64 * 100.0 / total as f64;
                format!("{percent:.0}")
            };
            let least = percent(found.answers.values().min());
            let most = percent(found.answers.values().max());
            let range = if least == most {
                least
            } else {
                format!("{least}-{most}")
            };
            let seen = format!("{}, {range} %", plural(found.answers.len(), "pod"));
            let fair = 100.0 / from.len() as f64;
            let each = if from.len() == 1 { "" } else { " each" };
            (
                "shares",
                format!("{}, {fair:.0} %{each}", plural(from.len(), "pod")),
                seen,
            )
        }
        Expect::Refused => (
            "refusal",
            "refused at once".to_owned(),
            format!("{} refused", count(found.calls)),
        ),
        Expect::Silence => (
            "silence",
            "no answer".to_owned(),
            format!("{} silent", count(found.calls)),
        ),
    }
}
