//! Calls of Services: a few in detail, and all.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Instant;

use anyhow::Result;
use kplane_model::Family::{self, V4, V6};
use kplane_model::Protocol::{self, Tcp, Udp};
use kplane_model::ServiceName;
use kplane_rig::ask::{Expect, Found};
use owo_colors::OwoColorize as _;

use super::call::{Call, call_all, plan};
use super::expect::Kind::{self, ClusterIP, ExternalIP, LoadBalancer, NodePort};
use super::interrupt;
use super::objects::{Objects, Service};
use super::show::{Show, aside, bar, fit, mark, plural, say, span};
use super::stage::Stage;
use super::world::Role::{self, Client, Guest, Node, Pod};

/// Calls in a scenario: a pod's share of a sixth is 16.7 % +- 1.5 % (1 sigma) then.
const CALLS: usize = 600;
/// Calls that must get no answer, each of which takes a while to confirm.
const SILENT_CALLS: usize = 4;
/// Standard deviations by which a pod's share may be off: less than one run in 10,000 fails because
/// of it.
const SIGMAS: f64 = 5.0;
/// Connections of a caller to each kind of address of a Service with affinity. If they were spread
/// over three pods, they would all reach one pod only once in 20,000 times.
const STICKY_CALLS: usize = 10;
/// Most failed calls that are shown for each Service.
const MOST_WRONG: usize = 8;

/// A call that shows something of interest: the point of it, the Service, its family and protocol,
/// the kind of the called address, the caller and its node.
type Scenario = (
    &'static str,
    &'static str,
    Family,
    Protocol,
    Kind,
    Role,
    &'static str,
);

#[rustfmt::skip]
const SCENARIOS: [Scenario; 11] = [
    ("ClusterIP: pods call pods, and keep their address",
     "web", V4, Tcp, ClusterIP, Pod, "node-1"),
    ("The same Service over IPv6",
     "web", V6, Tcp, ClusterIP, Pod, "node-2"),
    ("UDP, from a node itself; the pod that is not ready gets nothing",
     "dns", V4, Udp, ClusterIP, Node, "node-3"),
    ("NodePort: a client outside calls any node and reaches pods on all",
     "api", V4, Tcp, NodePort, Client, "node-2"),
    ("External IP with policy Local: the node's own pods see the client's address",
     "gateway", V4, Tcp, ExternalIP, Client, "node-1"),
    ("The same Service at its load balancer's address, through another node",
     "gateway", V4, Tcp, LoadBalancer, Client, "node-3"),
    ("The same address through a node without such a pod: dropped, not sent elsewhere",
     "gateway", V4, Tcp, LoadBalancer, Client, "node-2"),
    ("Source ranges: a caller from the office's network is let in",
     "office", V4, Tcp, LoadBalancer, Guest, "node-1"),
    ("Source ranges: what comes from elsewhere is dropped",
     "office", V4, Tcp, LoadBalancer, Client, "node-1"),
    ("Zone hints: a pod in zone-b stays in zone-b",
     "cache", V4, Tcp, ClusterIP, Pod, "node-3"),
    ("No endpoints: refused at once instead of left waiting",
     "returns", V4, Tcp, ClusterIP, Client, "node-1"),
];

/// Makes the call of each scenario many times.
pub(crate) fn connect(show: &mut Show, stage: &mut Stage) -> Result<()> {
    for (title, service, family, protocol, kind, role, node) in SCENARIOS {
        interrupt::check()?;
        let service = stage.objects.service(&ServiceName::new("shop", service))?;
        let key = |call: &Call| (call.port.port.key.family, call.port.port.key.protocol);
        let mut calls = plan(stage, service);
        calls.retain(|call| key(call) == (family, protocol) && call.kind == kind && !call.abroad);
        calls.retain(|call| call.caller.role == role && call.caller.node == node);
        match calls.first() {
            Some(call) => play(show, &stage.objects, title, call)?,
            None if family == V6 => aside!("left out: this machine has no IPv6"),
            None => anyhow::bail!("no such call: {title}"),
        }
    }
    Ok(())
}

fn play(show: &mut Show, objects: &Objects, title: &str, call: &Call) -> Result<()> {
    let began = Instant::now();
    let silent = call.expect == Expect::Dropped;
    let calls = if silent { SILENT_CALLS } else { CALLS };
    let found = call.make_times(calls)?;
    let each = span(began.elapsed().div_f64(calls as f64));
    say!("\n  {title}");
    aside!("{call}: {} connections", found.made);
    let mut wrong: Vec<String> = call.complaint(&found).into_iter().collect();
    let (fair, shares) = shares(objects, call, &found, &mut wrong);
    let mut sources = call.expect.endpoints().into_values().flatten();
    let (expected, seen, note) = match sources.next() {
        Some(ip) if ip == call.source => (fair, shares, format!("the pods see the caller, {ip}")),
        Some(ip) => (
            fair,
            shares,
            format!("the pods see the node's address, {ip}"),
        ),
        None => (
            call.expect.to_string(),
            format!("{calls} times"),
            call.expect.to_string(),
        ),
    };
    let good = wrong.is_empty();
    let note = if good { &*note } else { "not as it should be" };
    let note = format!("{note}; {each} each");
    say!("  {}{}", mark(good), note.dimmed());
    let key = &call.port.port.key;
    let family = if key.family == V6 { " IPv6" } else { "" };
    let what = format!("{} {:?} {}{family}", key.service, call.kind, key.protocol);
    show.check((&what, &expected), seen, wrong, began);
    Ok(())
}

/// Prints a line for each endpoint of the port, and returns the fair share and the range of those
/// seen. A share far from the fair one is wrong (B10: uniform random).
fn shares(
    objects: &Objects,
    call: &Call,
    found: &Found,
    wrong: &mut Vec<String>,
) -> (String, String) {
    let counts = || found.answers.values().copied();
    let (total, most) = (counts().sum::<usize>().max(1) as f64, counts().max());
    let may = call.expect.endpoints();
    let fair = total / may.len() as f64;
    let sigma = (fair * (1.0 - fair / total)).sqrt();
    for endpoint in &call.port.endpoints {
        let address = SocketAddr::new(endpoint.addr.ip, endpoint.addr.port);
        let n = found.answers.get(&address).copied().unwrap_or(0);
        let (count, name) = (n as f64, objects.pod_name(address.ip()));
        if may.contains_key(&address) && (count - fair).abs() > SIGMAS * sigma {
            wrong.push(format!("{name} answered {n} times, its share is {fair:.0}"));
        }
        let why_not = if may.contains_key(&address) {
            ""
        } else if endpoint.ready {
            "  not for this caller"
        } else {
            "  not ready"
        };
        let fitted = fit(endpoint.node.as_deref().unwrap_or("?"), 8);
        let node = fitted.dimmed();
        let (bar, percent) = (bar(n, most.unwrap_or(0), 36), count * 100.0 / total);
        say!("      {name:<10} {node} {bar} {percent:5.1} % {n:>5}{why_not}");
    }
    let percent = |count: Option<usize>| count.unwrap_or(0) as f64 * 100.0 / total;
    let (least, most) = (percent(counts().min()), percent(most));
    let (fair, all) = (fair * 100.0 / total, plural(may.len(), "pod"));
    let seen = plural(found.answers.len(), "pod");
    (
        format!("{all}, {fair:.0} % each"),
        format!("{seen}, {least:.0}-{most:.0} %"),
    )
}

/// Shows, for a pod and a client on every node, which pod gets their connections: at all addresses
/// of the Service the same (A11).
pub(crate) fn affinity(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let began = Instant::now();
    let service = stage.objects.service(&ServiceName::new("shop", "cart"))?;
    let mut calls = plan(stage, service);
    calls.retain(|call| matches!(call.caller.role, Client | Pod) && !call.abroad);
    let (mut wrong, mut all, mut callers) = (Vec::new(), BTreeSet::new(), 0);
    for calls in calls.chunk_by(|a, b| a.source == b.source) {
        interrupt::check()?;
        let mut met = BTreeSet::new();
        for call in calls {
            let found = call.make_times(STICKY_CALLS)?;
            wrong.extend(call.complaint(&found));
            let name = |pod: &SocketAddr| stage.objects.pod_name(pod.ip());
            let pods: Vec<String> = found
                .answers
                .iter()
                .map(|(pod, n)| format!("{} {n} times", name(pod)))
                .collect();
            say!("      {} {}", fit(&call.to_string(), 52), pods.join(", "));
            met.extend(found.answers.into_keys());
        }
        if met.len() != 1 {
            wrong.push(format!("one caller met {} pods", met.len()));
        }
        callers += 1;
        all.extend(met);
    }
    let seen = format!("{callers} callers met {}", plural(all.len(), "pod"));
    let what = "shop/cart: callers stay with their pod";
    show.check((what, "1 pod a caller"), seen, wrong, began);
    Ok(())
}

/// Calls all Services.
pub(crate) fn survey_all(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let (callers, nodes) = (stage.world.callers.len(), stage.objects.nodes.len());
    aside!("from {callers} callers: a client, a pod and the node itself, at each of {nodes} nodes");
    for service in &stage.objects.services {
        match &service.skipped {
            Some(reason) => aside!("    {} {reason:?}: nothing to proxy", service.name),
            None => survey(show, stage, service, "every path")?,
        }
    }
    Ok(())
}

/// Calls one Service in every way, prints a line, and records a check.
pub(crate) fn survey(show: &mut Show, stage: &Stage, service: &Service, label: &str) -> Result<()> {
    let began = Instant::now();
    let found = call_all(stage, service)?;
    let mut wrong: Vec<String> =
        found.iter().filter_map(|(call, found)| call.complaint(found)).collect();
    let right = found.len() - wrong.len();
    if wrong.len() > MOST_WRONG {
        let more = wrong.split_off(MOST_WRONG).len();
        wrong.push(format!("and {more} more paths went wrong"));
    }
    let pods: BTreeSet<&SocketAddr> =
        found.iter().flat_map(|(_, found)| found.answers.keys()).collect();
    let kinds: BTreeSet<Kind> = found.iter().map(|(call, _)| call.kind).collect();
    let kinds: Vec<String> = kinds.iter().map(|kind| format!("{kind:?}")).collect();
    let made: usize = found.iter().map(|(_, found)| found.made).sum();
    let (pods, paths) = (plural(pods.len(), "endpoint"), plural(found.len(), "path"));
    let (mark, name) = (mark(wrong.is_empty()), fit(&service.name.to_string(), 26));
    let kinds = kinds.join(", ");
    say!(
        "  {mark}{name} {pods:>12} {paths:>10} {made:>6} connections  {}",
        kinds.dimmed()
    );
    let what = format!("{} {}: {label}", service.name, service.kind);
    let seen = format!("{right} right, {made} conns");
    show.check((&what, &format!("{paths} right")), seen, wrong, began);
    Ok(())
}
