//! Nodes that their neighbours do not reach. Endpoints there count as terminating ones: they get connections only
//! where no other endpoint is ready. Connections that exist go on, until the node counts as dead.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::net::IpAddr;
use std::time::SystemTime;

use kplane_model::{Endpoint, EndpointAddr, NodeName, Protocol, ServiceName, ServicePort};

use super::{Cause, Index, Outcome, Verb};
use crate::k8s::{Kind, ObjectId};

/// What is known of a suspected node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suspicion {
    /// Time of the verdict.
    pub since: SystemTime,
    /// Number of neighbours that do not reach the node.
    pub missed: usize,
    /// Number of neighbours that were asked.
    pub asked: usize,
}

impl fmt::Display for Suspicion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { missed, asked, .. } = self;
        write!(f, "{missed} of {asked} neighbours do not reach it")
    }
}

impl Suspicion {
    /// Returns the age, whole seconds.
    pub fn age_s(&self) -> u64 {
        self.since.elapsed().unwrap_or_default().as_secs()
    }
}

/// The suspected nodes, and whether that has an effect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Suspicions {
    /// The nodes.
    pub nodes: BTreeMap<NodeName, Suspicion>,
    /// Their endpoints count as terminating. If not, it is only said what would happen.
    pub act: bool,
    /// Dead nodes: connections to their endpoints end.
    pub dead: BTreeSet<NodeName>,
}

impl Suspicions {
    /// Returns whether the endpoints of a node count as terminating.
    fn holds_for(&self, node: &NodeName) -> bool {
        self.act && self.nodes.contains_key(node)
    }
}

/// What the index knows of suspected nodes.
#[derive(Debug, Default)]
pub(super) struct Suspected {
    pub(super) now: Suspicions,
    /// Addresses that only endpoints on dead nodes have.
    dead_addresses: HashSet<IpAddr>,
}

impl Index {
    /// Takes the suspected nodes from now on. The work is proportional to the number of EndpointSlices: nodes die
    /// seldom, and an index of endpoints by node would cost every change of a slice.
    pub fn suspect(&mut self, suspicions: Suspicions, at: SystemTime) -> Outcome {
        let before = std::mem::replace(&mut self.suspected.now, suspicions);
        let names = before.nodes.keys().chain(self.suspected.now.nodes.keys());
        let differ = |node: &&NodeName| {
            before.holds_for(node) != self.suspected.now.holds_for(node)
                || before.dead.contains(*node) != self.suspected.now.dead.contains(*node)
        };
        let changed: BTreeSet<NodeName> = names.filter(differ).cloned().collect();
        if changed.is_empty() {
            return Outcome::default();
        }
        if before.dead != self.suspected.now.dead {
            self.find_dead_addresses();
        }
        let services =
            self.services_on(&changed.union(&self.suspected.now.dead).cloned().collect());
        self.pending.services.extend(services);
        for node in changed {
            let is_suspected = self.suspected.now.holds_for(&node);
            let place = match self.suspected.now.dead.contains(&node) {
                true => "dead",
                false if is_suspected => "suspected",
                false => "reached again",
            };
            let id = ObjectId {
                kind: Kind::Node,
                namespace: "".into(),
                name: node,
            };
            let cause = Cause::new(id, 0, &place.into(), Verb::Changed);
            self.pending.note(None, self.is_synced().then_some(cause));
        }
        self.pending.observed_at.get_or_insert(at);
        self.publish_pending()
    }

    /// Returns the Services with endpoints on some nodes.
    fn services_on(&self, nodes: &BTreeSet<NodeName>) -> BTreeSet<ServiceName> {
        let is_there =
            |endpoint: &Endpoint| endpoint.node.as_ref().is_some_and(|node| nodes.contains(node));
        self.slices
            .values()
            .filter(|slice| slice.ports.iter().any(|port| port.endpoints.iter().any(is_there)))
            .map(|slice| slice.service.clone())
            .collect()
    }

    /// Marks the endpoints on suspected nodes.
    pub(super) fn mark_suspected(&self, endpoints: &mut [Endpoint]) {
        if !self.suspected.now.act || self.suspected.now.nodes.is_empty() {
            return;
        }
        let suspected = endpoints.iter_mut().filter(|endpoint| {
            let node = endpoint.node.as_ref();
            endpoint.ready && node.is_some_and(|node| self.suspected.now.holds_for(node))
        });
        for endpoint in suspected {
            (endpoint.ready, endpoint.serving, endpoint.terminating) = (false, true, true);
        }
    }

    fn is_dead(&self, endpoint: &Endpoint) -> bool {
        endpoint
            .node
            .as_ref()
            .is_some_and(|node| self.suspected.now.dead.contains(node))
    }

    /// Finds the addresses that only endpoints on dead nodes have. One that another endpoint has as well may be alive.
    fn find_dead_addresses(&mut self) {
        self.suspected.dead_addresses = HashSet::new();
        if self.suspected.now.dead.is_empty() {
            return;
        }
        let ports = || self.slices.values().flat_map(|slice| &slice.ports);
        let endpoints = || ports().flat_map(|port| &port.endpoints);
        let dead = endpoints().filter(|of| self.is_dead(of)).map(|of| of.addr.ip);
        let mut addresses: HashSet<IpAddr> = dead.collect();
        for endpoint in endpoints().filter(|of| !self.is_dead(of)) {
            addresses.remove(&endpoint.addr.ip);
        }
        self.suspected.dead_addresses = addresses;
    }

    /// Takes notice of a new slice: no address is dead that an endpoint elsewhere has.
    pub(super) fn note_living(&mut self, id: &ObjectId) {
        if self.suspected.dead_addresses.is_empty() {
            return;
        }
        let Some(slice) = self.slices.get(id) else {
            return;
        };
        let endpoints = slice.ports.iter().flat_map(|port| &port.endpoints);
        let may_live = |of: &&Endpoint| {
            !self.is_dead(of) && self.suspected.dead_addresses.contains(&of.addr.ip)
        };
        let living: HashSet<_> = endpoints.filter(may_live).map(|of| of.addr.ip).collect();
        if !living.is_empty() {
            self.suspected.dead_addresses.retain(|ip| !living.contains(ip));
            self.pending.services.extend(self.services_on(&self.suspected.now.dead));
        }
    }

    /// Returns the endpoints of a port to which connections end, sorted. Flows of UDP go on as ever.
    pub(super) fn dead_endpoints(&self, port: &ServicePort) -> Vec<EndpointAddr> {
        if self.suspected.dead_addresses.is_empty() || port.key.protocol == Protocol::Udp {
            return Vec::new();
        }
        let dead: BTreeSet<_> = self
            .listed(port)
            .flat_map(|listed| &listed.endpoints)
            .filter(|of| self.is_dead(of) && self.suspected.dead_addresses.contains(&of.addr.ip))
            .map(|of| of.addr)
            .collect();
        dead.into_iter().collect()
    }

    /// Returns the suspected nodes with endpoints of a Service, the number of these, and whether connections to them end.
    pub(super) fn suspected_of(
        &self,
        name: &ServiceName,
    ) -> Vec<(NodeName, Suspicion, usize, bool)> {
        if self.suspected.now.nodes.is_empty() {
            return Vec::new();
        }
        let mut by_node = BTreeMap::<&NodeName, BTreeSet<_>>::new();
        for endpoint in self.listed_of(name).flat_map(|listed| &listed.endpoints) {
            if let Some(node) = &endpoint.node
                && self.suspected.now.nodes.contains_key(node)
            {
                by_node.entry(node).or_default().insert(endpoint.addr);
            }
        }
        by_node
            .into_iter()
            .filter_map(|(node, endpoints)| {
                let suspicion = self.suspected.now.nodes.get(node)?.clone();
                let is_dead = self.suspected.now.dead.contains(node);
                Some((node.clone(), suspicion, endpoints.len(), is_dead))
            })
            .collect()
    }
}
