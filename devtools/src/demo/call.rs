//! Calls of a Service: planned for every caller and address, repeated until every endpoint has
//! answered, and judged.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use kplane_model::{NodeFacts, Protocol, TrafficPolicy};
use kplane_rig::ask::{Expect, Found, Question};
use kplane_rig::client::TIMEOUT;
use kplane_rig::sctp::Watch;

use super::expect::{Kind, expect, targets};
use super::interrupt;
use super::objects::{Port, Service};
use super::stage::Stage;
use super::world::{Caller, Role};

/// Time without any answer that counts as silence: a thousand times what an answer takes.
const SILENCE: Duration = Duration::from_millis(250);
/// Least calls per endpoint, so that a wrong endpoint beside the right ones is found.
const ROUNDS: usize = 2;
/// Most calls per endpoint: the chance to miss one of 100 endpoints is below 1 in 10^6.
const MOST_ROUNDS: usize = 20;
/// Calls to a Service with session affinity.
const STICKY_CALLS: usize = 4;
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
    /// Whether another node than the caller's handles it.
    pub(crate) abroad: bool,
    pub(crate) expect: Expect,
}

/// Returns every way to call a Service.
pub(crate) fn plan(stage: &Stage, service: &Service) -> Vec<Call> {
    let mut calls = Vec::new();
    for port in &service.ports {
        let nodes = stage.objects.nodes.iter();
        for (node, next) in nodes.clone().zip(nodes.cycle().skip(1)) {
            for caller in stage.world.callers.iter().filter(|c| c.node == *node.name) {
                let mut own = all_targets(stage, port, caller, node);
                own.retain(|call| caller.role != Role::Guest || call.kind == Kind::LoadBalancer);
                calls.extend(own);
                // NodePorts of another node, from inside. With policy Local the answers would come
                // back another way, as they do with kube-proxy.
                let inside = matches!(caller.role, Role::Pod | Role::Node);
                if inside && port.port.external_policy == TrafficPolicy::Cluster {
                    let mut others = all_targets(stage, port, caller, next);
                    others.retain(|call| call.abroad && call.kind == Kind::NodePort);
                    calls.extend(others);
                }
            }
        }
        calls.extend(to_itself(stage, port));
    }
    calls
}

/// Returns a caller's calls to all addresses of a port at a node, if both have one of its family.
fn all_targets(stage: &Stage, port: &Arc<Port>, caller: &Caller, node: &NodeFacts) -> Vec<Call> {
    let family = port.port.key.family;
    let (Some(source), Some(node_ip)) = (caller.ip(family), node.primary_address(family)) else {
        return Vec::new();
    };
    let abroad = caller.node != *node.name;
    // For another node, a node is a client like any other.
    let as_client = abroad && caller.role == Role::Node;
    let role = if as_client { Role::Client } else { caller.role };
    let pods = &stage.world.cluster_cidrs;
    let call = |(kind, to)| Call {
        caller: caller.clone(),
        source,
        kind,
        to,
        port: port.clone(),
        abroad,
        expect: expect(port, kind, (role, source), (node, node_ip), pods),
    };
    targets(&port.port, node_ip).into_iter().map(call).collect()
}

/// Returns the call of an endpoint to its own Service.
fn to_itself(stage: &Stage, port: &Arc<Port>) -> Option<Call> {
    let mut ready = port.endpoints.iter().filter(|endpoint| endpoint.ready);
    let (pod, node) = ready.find_map(|endpoint| {
        let pod = stage.objects.pod(endpoint.addr.ip)?;
        let node = stage.objects.node(pod.node.as_deref()?).ok()?;
        // A pod in its node's namespace counts as the node.
        (!node.addresses.contains(&endpoint.addr.ip)).then_some((pod, node))
    })?;
    let caller = Caller {
        role: Role::Pod,
        node: node.name.to_string(),
        ns: stage.world.topology.pod(&pod.name).ok()?.ns().clone(),
        ips: pod.ips.iter().copied().collect(),
    };
    all_targets(stage, port, &caller, node)
        .into_iter()
        .find(|call| call.kind == Kind::ClusterIP)
}

/// Returns a watch on the endpoints of a Service, if it has a port of SCTP.
fn watch(stage: &Stage, service: &Service) -> Result<Option<Watch>> {
    let mut ports = service.ports.iter();
    if !ports.any(|port| port.port.key.protocol == Protocol::Sctp) {
        return Ok(None);
    }
    let endpoints = service.ports.iter().flat_map(|port| &port.endpoints);
    let pods = endpoints.filter_map(|endpoint| stage.objects.pod(endpoint.addr.ip));
    let names: BTreeSet<&String> = pods.map(|pod| &pod.name).collect();
    let pods = names.iter().map(|name| Ok(stage.world.topology.pod(name)?.ns()));
    Watch::open(pods.collect::<Result<Vec<_>>>()?).map(Some)
}

/// Calls a Service in every way, several at a time.
pub(crate) fn call_all(stage: &Stage, service: &Service) -> Result<Vec<(Call, Found)>> {
    let watch = watch(stage, service)?;
    let mut calls = plan(stage, service);
    // Calls that wait for silence take longest, so they come first.
    calls.sort_by_key(|call| call.expect != Expect::Dropped);
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
        workers
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .try_for_each(|result| result.ok().context("a worker panicked")?)
    })?;
    Ok(found.into_inner().unwrap_or_else(PoisonError::into_inner))
}

impl Call {
    /// Calls until every expected endpoint has answered, or it is clear that one will not.
    fn make(&self, watch: Option<&Watch>) -> Result<Found> {
        let (least, most) = match &self.expect {
            Expect::Reach(_) if self.is_sticky() => (STICKY_CALLS, STICKY_CALLS),
            Expect::Reach(from) => (from.len() * ROUNDS, (from.len() + 1) * MOST_ROUNDS),
            Expect::Refused => (ROUNDS, ROUNDS),
            Expect::Dropped => (1, 1),
        };
        self.question(watch).explore(&self.expect, least, most)
    }

    /// Calls a number of times.
    pub(crate) fn make_times(&self, calls: usize) -> Result<Found> {
        self.question(None).explore(&self.expect, calls, calls)
    }

    fn question<'a>(&'a self, watch: Option<&'a Watch>) -> Question<'a> {
        let dropped = self.expect == Expect::Dropped;
        Question {
            ns: &self.caller.ns,
            protocol: self.port.port.key.protocol,
            source: self.source,
            to: self.to,
            timeout: if dropped { SILENCE } else { TIMEOUT },
            watch,
        }
    }

    /// Returns whether all calls of one caller go to the same endpoint (A11).
    pub(crate) fn is_sticky(&self) -> bool {
        self.port.port.affinity_timeout_s.is_some()
    }

    /// Returns the errors in the results on one line; `None` if there are none.
    pub(crate) fn complaint(&self, found: &Found) -> Option<String> {
        let wrong = found.complaint(&self.expect)?;
        Some(format!("{self}: {wrong}"))
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (role, node, kind) = (self.caller.role, &self.caller.node, self.kind);
        let protocol = self.port.port.key.protocol;
        write!(f, "{role:?} at {node} to {kind:?} {}/{protocol}", self.to)
    }
}
