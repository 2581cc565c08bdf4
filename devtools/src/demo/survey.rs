//! Calls of every Service port, from all callers, at every address.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context as _, Result};
use kplane_model::{NodeFacts, Protocol, TrafficPolicy};
use kplane_rig::netns::NetNs;

use super::call::{Call, Finding, Names};
use super::expect::{Expect, Target, expect};
use super::interrupt;
use super::objects::{Objects, PodSpec, Port, Service};
use super::world::{Caller, Role, World};

/// Calls in progress at a time: most of the time is spent in the kernel, or waiting for silence.
const WORKERS: usize = 8;

/// Plans the calls of a Service.
#[derive(Debug)]
pub(crate) struct Planner<'a> {
    objects: &'a Objects,
    world: &'a World,
    pods: BTreeMap<IpAddr, &'a PodSpec>,
    names: Arc<Names>,
    namespaces: BTreeMap<String, NetNs>,
}

impl<'a> Planner<'a> {
    /// Creates a planner for these objects.
    pub(crate) fn new(objects: &'a Objects, world: &'a World) -> Self {
        let pods = objects
            .pods
            .iter()
            .flat_map(|pod| pod.ips.iter().map(move |ip| (*ip, pod)));
        let pods: BTreeMap<IpAddr, &PodSpec> = pods.collect();
        let names = pods
            .iter()
            .map(|(ip, pod)| (*ip, pod.name.clone()))
            .collect();
        let namespaces = world.pod_namespaces();
        Self {
            objects,
            world,
            pods,
            names: Arc::new(names),
            namespaces,
        }
    }

    /// Returns a call, if the caller and the node have addresses of the port's family.
    pub(crate) fn call(
        &self,
        port: &Port,
        target: Target,
        caller: &Caller,
        node: &NodeFacts,
    ) -> Option<Call> {
        let family = port.port.key.family;
        let source = caller.ip(family)?;
        let node_ip = node.primary_address(family)?;
        // For another node, a node is a client like any other.
        let abroad = caller.role == Role::Node && caller.node != *node.name;
        let role = if abroad { Role::Client } else { caller.role };
        Some(Call {
            caller: caller.clone(),
            source,
            kind: target.kind(),
            to: target.address(port, node_ip),
            protocol: port.port.key.protocol,
            node_ip,
            expect: expect(
                port,
                target,
                (role, source),
                node,
                &self.world.cluster_cidrs,
            ),
            names: self.names.clone(),
            watched: self.watched(port),
        })
    }

    /// Returns every way to call a Service.
    pub(crate) fn calls(&self, service: &Service) -> Vec<Call> {
        service
            .ports
            .iter()
            .flat_map(|port| self.calls_of(port))
            .collect()
    }

    /// Returns the name of the pod with an address.
    pub(crate) fn pod_name(&self, ip: IpAddr) -> String {
        self.pods
            .get(&ip)
            .map_or_else(|| ip.to_string(), |pod| pod.name.clone())
    }

    fn calls_of(&self, port: &Port) -> Vec<Call> {
        let mut calls = Vec::new();
        for node in &self.objects.nodes {
            for caller in self.world.callers.iter().filter(|c| c.node == *node.name) {
                for target in Target::all(port) {
                    let is_lb = matches!(target, Target::LoadBalancer(_));
                    if caller.role != Role::Guest || is_lb {
                        calls.extend(self.call(port, target, caller, node));
                    }
                }
            }
        }
        calls.extend(self.to_other_nodes(port));
        calls.extend(self.to_itself(port));
        calls
    }

    /// Returns the calls to NodePorts of other nodes from inside. With policy Local the answers
    /// would come back another way, as they do with kube-proxy.
    fn to_other_nodes(&self, port: &Port) -> Vec<Call> {
        let Some(number) = port.port.node_port else {
            return Vec::new();
        };
        if port.port.external_policy == TrafficPolicy::Local {
            return Vec::new();
        }
        let nodes = &self.objects.nodes;
        let pairs = nodes.iter().zip(nodes.iter().cycle().skip(1));
        let pairs = pairs.filter(|(here, there)| here.name != there.name);
        let mut calls = Vec::new();
        for (here, there) in pairs {
            let inside = |c: &&Caller| matches!(c.role, Role::Pod | Role::Node);
            let callers = self.world.callers.iter().filter(inside);
            for caller in callers.filter(|caller| caller.node == *here.name) {
                let target = Target::NodePort(number);
                calls.extend(self.call(port, target, caller, there));
            }
        }
        calls
    }

    /// Returns the call of an endpoint to its own Service.
    fn to_itself(&self, port: &Port) -> Option<Call> {
        let mut ready = port.endpoints.iter().filter(|endpoint| endpoint.ready);
        let (pod, node) = ready.find_map(|endpoint| {
            let pod = self.pods.get(&endpoint.addr.ip)?;
            let mut nodes = self.objects.nodes.iter();
            let node = nodes.find(|node| Some(&*node.name) == pod.node.as_deref())?;
            // A pod in its node's namespace counts as the node.
            (!node.addresses.contains(&endpoint.addr.ip)).then_some((pod, node))
        })?;
        let caller = Caller {
            role: Role::Pod,
            node: node.name.to_string(),
            ns: self.namespaces.get(&pod.name)?.clone(),
            ips: pod.ips.iter().copied().collect(),
        };
        self.call(port, Target::ClusterIp, &caller, node)
    }

    /// Returns the namespaces of a port's endpoints, usable or not.
    fn watched(&self, port: &Port) -> Vec<NetNs> {
        if port.port.key.protocol != Protocol::Sctp {
            return Vec::new();
        }
        let pods = port
            .endpoints
            .iter()
            .filter_map(|e| self.pods.get(&e.addr.ip));
        let names: BTreeSet<&String> = pods.map(|pod| &pod.name).collect();
        names
            .into_iter()
            .filter_map(|name| self.namespaces.get(name))
            .cloned()
            .collect()
    }
}

/// Makes calls, several at a time, and returns the findings. `progress` gets the number of finished
/// calls.
pub(crate) fn make_all(calls: &[Call], progress: &(impl Fn(usize) + Sync)) -> Result<Vec<Finding>> {
    // Calls that wait for silence take longest, so they come first.
    let mut order: Vec<usize> = (0..calls.len()).collect();
    order.sort_by_key(|index| calls[*index].expect != Expect::Silence);
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || -> Result<Vec<(usize, Finding)>> {
        let mut findings = Vec::new();
        while let Some(index) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
            interrupt::check()?;
            findings.push((*index, calls[*index].make()?));
            progress(done.fetch_add(1, Ordering::Relaxed) + 1);
        }
        Ok(findings)
    };
    let mut findings = vec![Finding::default(); calls.len()];
    thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            let found = worker.join().ok().context("a worker panicked")??;
            for (index, finding) in found {
                findings[index] = finding;
            }
        }
        Ok(findings)
    })
}

/// Returns the number of answers by pod, in the pods' order.
pub(crate) fn by_pod(
    planner: &Planner<'_>,
    answers: &BTreeMap<SocketAddr, u64>,
) -> BTreeMap<String, u64> {
    let mut by_pod = BTreeMap::new();
    for (endpoint, count) in answers {
        *by_pod.entry(planner.pod_name(endpoint.ip())).or_default() += count;
    }
    by_pod
}
