//! Calls of a Service: planned for every caller and address, repeated until every endpoint has
//! answered, and judged.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use kplane_model::{NodeFacts, Protocol, TrafficPolicy};
use kplane_tests::ask::{Question, Seen};
use kplane_tests::client::TIMEOUT;
use kplane_tests::sctp::Watch;

use super::expect::{Expect, Kind, expect, targets};
use super::interrupt;
use super::objects::{Objects, Port, Service};
use super::world::{Caller, Role, World};

/// Time without any answer that counts as silence: a thousand times what an answer takes.
const SILENCE: Duration = Duration::from_millis(250);
/// Least calls per endpoint, so that a wrong endpoint beside the right ones is found.
const ROUNDS: usize = 2;
/// Most calls per endpoint: the chance to miss one of 100 endpoints is below 1 in 10^6.
const MOST_ROUNDS: usize = 20;
/// Calls to a Service with session affinity.
const STICKY_CALLS: usize = 4;
/// Calls after a failure, to find out whether all fail.
const AFTERMATH: usize = 3;
/// Calls in progress at a time: most of the time is spent in the kernel, or waiting for silence.
const WORKERS: usize = 8;

/// A caller and the address that it calls.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) caller: Caller,
    /// The caller's address.
    pub(crate) source: IpAddr,
    /// The kind of the called address.
    pub(crate) kind: Kind,
    pub(crate) to: SocketAddr,
    pub(crate) port: Arc<Port>,
    /// The address of the node whose kernel handles it.
    pub(crate) node_ip: IpAddr,
    /// Whether that is another node than the caller's.
    pub(crate) abroad: bool,
    pub(crate) expect: Expect,
}

/// The results of a call.
#[derive(Clone, Debug, Default)]
pub(crate) struct Finding {
    /// Number of times the call was made.
    pub(crate) calls: usize,
    /// Number of answers by endpoint.
    pub(crate) answers: BTreeMap<SocketAddr, usize>,
    /// Number of other outcomes, and of wrong answers.
    wrong: BTreeMap<String, usize>,
}

/// Returns every way to call a Service.
pub(crate) fn plan(objects: &Objects, world: &World, service: &Service) -> Vec<Call> {
    let mut calls = Vec::new();
    for port in &service.ports {
        let nodes = objects.nodes.iter();
        for (node, next) in nodes.clone().zip(nodes.cycle().skip(1)) {
            for caller in world.callers.iter().filter(|c| c.node == *node.name) {
                let mut own = all_targets(world, port, caller, node);
                own.retain(|call| caller.role != Role::Guest || call.kind == Kind::LoadBalancer);
                calls.extend(own);
                // NodePorts of another node, from inside. With policy Local the answers would come
                // back another way, as they do with kube-proxy.
                let inside = matches!(caller.role, Role::Pod | Role::Node);
                if inside && port.port.external_policy == TrafficPolicy::Cluster {
                    let mut others = all_targets(world, port, caller, next);
                    others.retain(|call| call.abroad && call.kind == Kind::NodePort);
                    calls.extend(others);
                }
            }
        }
        calls.extend(to_itself(objects, world, port));
    }
    calls
}

/// Returns a caller's calls to all addresses of a port at a node, if both have one of its family.
fn all_targets(world: &World, port: &Arc<Port>, caller: &Caller, node: &NodeFacts) -> Vec<Call> {
    let family = port.port.key.family;
    let (Some(source), Some(node_ip)) = (caller.ip(family), node.primary_address(family)) else {
        return Vec::new();
    };
    let abroad = caller.node != *node.name;
    // For another node, a node is a client like any other.
    let role = match caller.role {
        Role::Node if abroad => Role::Client,
        role => role,
    };
    let call = |(kind, to)| Call {
        caller: caller.clone(),
        source,
        kind,
        to,
        port: port.clone(),
        node_ip,
        abroad,
        expect: expect(port, kind, (role, source), node, &world.cluster_cidrs),
    };
    targets(&port.port, node_ip).into_iter().map(call).collect()
}

/// Returns the call of an endpoint to its own Service.
fn to_itself(objects: &Objects, world: &World, port: &Arc<Port>) -> Option<Call> {
    let mut ready = port.endpoints.iter().filter(|endpoint| endpoint.ready);
    let (pod, node) = ready.find_map(|endpoint| {
        let pod = objects.pod(endpoint.addr.ip)?;
        let node = objects.node(pod.node.as_deref()?).ok()?;
        // A pod in its node's namespace counts as the node.
        (!node.addresses.contains(&endpoint.addr.ip)).then_some((pod, node))
    })?;
    let caller = Caller {
        role: Role::Pod,
        node: node.name.to_string(),
        ns: world.topology.pod(&pod.name).ok()?.ns().clone(),
        ips: pod.ips.iter().copied().collect(),
    };
    let mut calls = all_targets(world, port, &caller, node).into_iter();
    calls.find(|call| call.kind == Kind::ClusterIp)
}

/// Returns a watch on the endpoints of a Service, if it has a port of SCTP.
fn watch(objects: &Objects, world: &World, service: &Service) -> Result<Option<Watch>> {
    let sctp = |port: &&Arc<Port>| port.port.key.protocol == Protocol::Sctp;
    let ports = service.ports.iter().filter(sctp);
    let pods = ports.flat_map(|port| &port.endpoints);
    let pods = pods.filter_map(|endpoint| objects.pod(endpoint.addr.ip));
    let names: BTreeSet<&String> = pods.map(|pod| &pod.name).collect();
    let pods = names.iter().map(|name| Ok(world.topology.pod(name)?.ns()));
    let pods = pods.collect::<Result<Vec<_>>>()?;
    service
        .ports
        .iter()
        .any(|port| sctp(&port))
        .then(|| Watch::open(pods))
        .transpose()
}

/// Calls a Service in every way, several at a time.
pub(crate) fn call_all(
    objects: &Objects,
    world: &World,
    service: &Service,
) -> Result<Vec<(Call, Finding)>> {
    let watch = watch(objects, world, service)?;
    let mut calls = plan(objects, world, service);
    // Calls that wait for silence take longest, so they come first.
    calls.sort_by_key(|call| call.expect != Expect::Silence);
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || -> Result<()> {
        while let Some(call) = calls.get(next.fetch_add(1, Ordering::Relaxed)) {
            interrupt::check()?;
            let finding = call.make(watch.as_ref())?;
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            found.push((call.clone(), finding));
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS).map(|_| scope.spawn(work)).collect();
        let mut results = workers.into_iter().map(thread::ScopedJoinHandle::join);
        results.try_for_each(|result| result.ok().context("a worker panicked")?)
    })?;
    Ok(found.into_inner().unwrap_or_else(PoisonError::into_inner))
}

impl Call {
    /// Calls until every expected endpoint has answered, or it is clear that one will not.
    fn make(&self, watch: Option<&Watch>) -> Result<Finding> {
        let (least, most) = match &self.expect {
            Expect::Answer { sticky: true, .. } => (STICKY_CALLS, STICKY_CALLS),
            Expect::Answer { from, .. } => (from.len() * ROUNDS, (from.len() + 1) * MOST_ROUNDS),
            Expect::Refused => (ROUNDS, ROUNDS),
            Expect::Silence => (1, 1),
        };
        self.make_times((least, most), watch)
    }

    /// Calls a number of times: at least so often, and at most so often.
    pub(crate) fn make_times(
        &self,
        (least, most): (usize, usize),
        watch: Option<&Watch>,
    ) -> Result<Finding> {
        let sticky = matches!(self.expect, Expect::Answer { sticky: true, .. });
        let mut missing = self.expect.endpoints();
        missing.retain(|_| !sticky);
        let (mut finding, mut left) = (Finding::default(), most);
        let silent = self.expect == Expect::Silence;
        let question = Question {
            ns: &self.caller.ns,
            protocol: self.port.port.key.protocol,
            source: self.source,
            to: self.to,
            timeout: if silent { SILENCE } else { TIMEOUT },
            watch,
        };
        question.repeat(|seen| {
            finding.calls += 1;
            left -= 1;
            if let Seen::Hit { endpoint, .. } = seen {
                *finding.answers.entry(endpoint).or_default() += 1;
                missing.remove(&endpoint);
            }
            if let Some(wrong) = self.misfit(&seen) {
                *finding.wrong.entry(wrong).or_default() += 1;
            }
            if !finding.wrong.is_empty() {
                left = left.min((least + AFTERMATH).saturating_sub(finding.calls));
            }
            left > 0 && (finding.calls < least || !missing.is_empty())
        })?;
        if finding.wrong.is_empty() {
            let never = |by| (format!("{by} never answered"), 1);
            finding.wrong = missing.into_iter().map(never).collect();
        }
        Ok(finding)
    }

    /// Returns the error in an outcome, if any.
    fn misfit(&self, seen: &Seen) -> Option<String> {
        let by_node = self.caller.role == Role::Node;
        let (by, source) = match (seen, &self.expect) {
            (Seen::Hit { endpoint, source }, _) => (endpoint, source),
            (Seen::Refused, Expect::Refused) | (Seen::Silent, Expect::Silence) => return None,
            // A node that drops or rejects its own packets reports that to their sender.
            (Seen::Denied, Expect::Refused | Expect::Silence) if by_node => return None,
            (other, _) => return Some(other.to_string()),
        };
        let Expect::Answer {
            from, masqueraded, ..
        } = &self.expect
        else {
            return Some(format!("{by} answered"));
        };
        if !from.contains(by) {
            return Some(format!("{by} answered, which it must not"));
        }
        let as_node = *masqueraded || by.ip() == self.source;
        let expected = if as_node { self.node_ip } else { self.source };
        // Packets that are delivered on the node itself pass no postrouting.
        let good = *source == expected || by.ip() == self.node_ip;
        (!good).then(|| format!("{by} sees {source}, not {expected}"))
    }

    /// Returns the errors in the results on one line; `None` if there are none.
    pub(crate) fn complaint(&self, finding: &Finding) -> Option<String> {
        let times = |(what, times): (&String, &usize)| format!("{what} ({times} times)");
        let wrong: Vec<String> = finding.wrong.iter().map(times).collect();
        let (made, expect, wrong) = (finding.calls, &self.expect, wrong.join(", "));
        let text = format!("{self}: {wrong}; of {made} connections, each should get {expect}");
        (!wrong.is_empty()).then_some(text)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (node, protocol) = (&self.caller.node, self.port.port.key.protocol);
        match self.caller.role {
            Role::Client => write!(f, "client via {node}")?,
            Role::Guest => write!(f, "client {} via {node}", self.source)?,
            Role::Pod => write!(f, "pod {}", self.caller.ns.name())?,
            Role::Node => write!(f, "{node} itself")?,
        }
        write!(f, " to {} {}/{protocol}", self.kind, self.to)
    }
}
