//! Endpoint selection: decides which endpoints a packet may reach (behaviours B1-B10, A27).
//!
//! [`variants`] computes the shared part once for the whole cluster. [`local_by_node`] computes the
//! overlays of all nodes at once. Both are O(endpoints), whatever the number of nodes.
//! [`categorize`] states the same rules from one node's point of view, as kube-proxy does; `kpctl
//! explain` and the property tests compare against it.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hasher as _;
use std::net::IpAddr;

use siphasher::sip::SipHasher13;

use crate::net::{EndpointAddr, Protocol};
use crate::node::{NodeName, ZoneName};
use crate::program::LocalEndpoint;
use crate::service::{Endpoint, ServicePort};

#[cfg(test)]
mod tests;

/// Joins the endpoints of several slices of one ServicePort: sorted by address, unique.
///
/// When slices disagree about an address, the later one counts. The earlier one counts if only the
/// later one is terminating: a pod's address may be reused while the old pod's slice still names it
/// (A27).
pub fn merge(endpoints: impl IntoIterator<Item = Endpoint>) -> Vec<Endpoint> {
    let mut merged = BTreeMap::<EndpointAddr, Endpoint>::new();
    for endpoint in endpoints {
        match merged.entry(endpoint.addr) {
            Entry::Vacant(slot) => {
                slot.insert(endpoint);
            }
            Entry::Occupied(mut slot) => {
                if !endpoint.terminating || slot.get().terminating {
                    slot.insert(endpoint);
                }
            }
        }
    }
    merged.into_values().collect()
}

/// The endpoints that policy Cluster allows, for every kind of node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variants {
    /// Endpoints for nodes without an entry below.
    pub default: Vec<EndpointAddr>,
    /// Endpoints for nodes of these zones, when zone hints apply and make a difference.
    pub by_zone: BTreeMap<ZoneName, Vec<EndpointAddr>>,
    /// Endpoints for these nodes, when same-node hints apply.
    pub by_node: BTreeMap<NodeName, Vec<EndpointAddr>>,
    /// Some endpoint is usable somewhere (B6).
    pub has_any: bool,
    /// All endpoints that serve or may be selected: UDP flows to them continue (F2). Empty unless
    /// the protocol is UDP.
    pub serving: Vec<EndpointAddr>,
}

/// Maximum number of endpoints in the lists that [`others`] returns, summed over all
/// variants of one kind of one ServicePort: 250 nodes with one endpoint each, or 400 kB of packed
/// IPv4 addresses. Above it, a change of one endpoint would cost more than the protected flows are
/// worth.
const MAX_OTHERS: usize = 1 << 16;

impl Variants {
    /// Cuts each list to a [sample](sample_local) of `most` endpoints.
    pub fn limit(&mut self, most: usize) {
        for list in [&mut self.default, &mut self.serving]
            .into_iter()
            .chain(self.by_zone.values_mut())
            .chain(self.by_node.values_mut())
        {
            sample(list, most, |addr| (false, *addr));
        }
    }

    /// Returns the endpoints of a node: its own variant, else its zone's, else the default.
    pub fn resolve(&self, node: &str, zone: Option<&str>) -> &[EndpointAddr] {
        self.by_node
            .get(node)
            .or_else(|| self.by_zone.get(zone?))
            .unwrap_or(&self.default)
    }

    /// Returns the endpoints that serve but are not in `variant` (F2); see [`others`].
    pub fn serving_others(&self, variant: &[EndpointAddr], siblings: usize) -> Vec<EndpointAddr> {
        others(&self.serving, variant, siblings)
    }
}

/// Returns the endpoints of a list that are not in `variant`; `siblings` is the number of variants of the same kind. Empty
/// when the lists of all siblings would have more than 65,536 entries together, as with same-node hints and endpoints on
/// hundreds of nodes.
pub fn others(
    list: &[EndpointAddr],
    variant: &[EndpointAddr],
    siblings: usize,
) -> Vec<EndpointAddr> {
    if list.len().saturating_mul(siblings) > MAX_OTHERS {
        return Vec::new();
    }
    let is_other = |addr: &EndpointAddr| variant.binary_search(addr).is_err();
    list.iter().copied().filter(is_other).collect()
}

/// Selects cluster endpoints for all nodes at once (B2, B3, B4). `endpoints` come from [`merge`].
pub fn variants(port: &ServicePort, endpoints: &[Endpoint]) -> Variants {
    let has_any = endpoints.iter().any(Endpoint::is_usable);
    let serving = serving(port, endpoints);
    if !port.uses_cluster_endpoints() {
        return Variants {
            has_any,
            serving,
            ..Variants::default()
        };
    }
    let ready: Vec<&Endpoint> = endpoints.iter().filter(|e| e.ready).collect();
    if ready.is_empty() {
        let draining = endpoints.iter().filter(|e| e.is_draining());
        return Variants {
            default: addrs(draining),
            has_any,
            serving,
            ..Variants::default()
        };
    }
    let default = addrs(ready.iter().copied());
    let mut by_zone = hinted(&ready, |e| &e.zone_hints);
    by_zone.retain(|_, addrs| *addrs != default);
    let by_node = hinted(&ready, |e| &e.node_hints);
    Variants {
        default,
        by_zone,
        by_node,
        has_any,
        serving,
    }
}

/// Returns the endpoints to which UDP flows may continue (F2). An endpoint that is ready but not
/// marked as serving is selected, so its flows continue too.
fn serving(port: &ServicePort, endpoints: &[Endpoint]) -> Vec<EndpointAddr> {
    match port.key.protocol {
        Protocol::Udp => addrs(endpoints.iter().filter(|e| e.serving || e.is_usable())),
        Protocol::Tcp | Protocol::Sctp => Vec::new(),
    }
}

/// Returns the ready endpoints by hint. Empty when one of them has no hint: that disables the mode
/// for all nodes (B2).
fn hinted<'a>(
    ready: &[&'a Endpoint],
    hints: impl Fn(&'a Endpoint) -> &'a Vec<NodeName>,
) -> BTreeMap<NodeName, Vec<EndpointAddr>> {
    let mut by_hint = BTreeMap::<NodeName, Vec<EndpointAddr>>::new();
    for endpoint in ready {
        let names: BTreeSet<&NodeName> = hints(endpoint).iter().collect();
        if names.is_empty() {
            return BTreeMap::new();
        }
        for name in names {
            by_hint.entry(name.clone()).or_default().push(endpoint.addr);
        }
    }
    by_hint
}

fn addrs<'a>(endpoints: impl Iterator<Item = &'a Endpoint>) -> Vec<EndpointAddr> {
    endpoints.map(|e| e.addr).collect()
}

/// Returns the usable endpoints of every node that has some (B5; see [`crate::LocalEndpoints`]).
pub fn local_by_node(endpoints: &[Endpoint]) -> BTreeMap<NodeName, Vec<LocalEndpoint>> {
    let mut by_node = BTreeMap::<NodeName, Vec<LocalEndpoint>>::new();
    for endpoint in endpoints.iter().filter(|e| e.is_usable()) {
        if let Some(node) = &endpoint.node {
            by_node.entry(node.clone()).or_default().push(LocalEndpoint {
                addr: endpoint.addr,
                ready: endpoint.ready,
            });
        }
    }
    by_node
}

/// Cuts the endpoints of a node to `most`, ready ones first.
///
/// The hash of an endpoint's address decides which ones stay. So nodes and zones have their share of a long list, all
/// replicas choose the same, and a change of one endpoint changes one place of the sample.
pub fn sample_local(endpoints: &mut Vec<LocalEndpoint>, most: usize) {
    sample(endpoints, most, |endpoint| (!endpoint.ready, endpoint.addr));
}

/// Cuts a list to `most` places. `rank`: what goes first, and the address.
fn sample<T>(list: &mut Vec<T>, most: usize, rank: impl Fn(&T) -> (bool, EndpointAddr)) {
    if list.len() <= most {
        return;
    }
    list.sort_by_cached_key(|place| {
        let (goes, addr) = rank(place);
        let mut hasher = SipHasher13::new();
        match addr.ip {
            IpAddr::V4(ip) => hasher.write(&ip.octets()),
            IpAddr::V6(ip) => hasher.write(&ip.octets()),
        }
        (goes, hasher.finish(), addr)
    });
    list.truncate(most);
    list.shrink_to_fit();
    list.sort_unstable_by_key(|place| rank(place).1);
}

/// The reason why new connections are led to an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lead {
    /// It shuts down, and some nodes have no other endpoint to choose (B3, B5).
    Last,
    /// It is ready.
    Ready,
}

/// Returns why the rules of some node lead new connections to one of these endpoints; `None` if no node's do. The answer
/// is exact for the endpoints that policy Cluster allows, except that it counts the nodes of all zones, also of zones
/// without nodes. For policy Local it is exact. `endpoints` come from [`merge`].
pub fn lead(
    port: &ServicePort,
    endpoints: &[Endpoint],
    is_one: impl Fn(EndpointAddr) -> bool,
) -> Option<Lead> {
    let Variants {
        default,
        by_zone,
        by_node,
        ..
    } = variants(port, endpoints);
    let mut lists = [&default].into_iter().chain(by_zone.values()).chain(by_node.values());
    let in_cluster = lists.any(|list| list.iter().any(|addr| is_one(*addr)));
    let leads_locally = |here: &Vec<LocalEndpoint>| {
        let any_ready = here.iter().any(|e| e.ready);
        here.iter().any(|e| e.ready == any_ready && is_one(e.addr))
    };
    let is_led = in_cluster
        || port.uses_local_endpoints() && local_by_node(endpoints).values().any(leads_locally);
    let is_ready = || endpoints.iter().any(|e| e.ready && is_one(e.addr));
    is_led.then(|| if is_ready() { Lead::Ready } else { Lead::Last })
}

/// The hints that narrow the cluster endpoints on one node (B2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopologyMode {
    /// Hints are not used.
    None,
    /// Endpoints hinted for the node's zone.
    SameZone,
    /// Endpoints hinted for the node.
    SameNode,
}

/// The selection of one node, in kube-proxy's own terms (B1-B6).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Categorized {
    /// Endpoints for policy Cluster; `None` when no traffic uses them.
    pub cluster: Option<Vec<EndpointAddr>>,
    /// Endpoints for policy Local; `None` when no traffic uses them.
    pub local: Option<Vec<EndpointAddr>>,
    /// Every endpoint that some packet on this node may reach.
    pub all: Vec<EndpointAddr>,
    /// Some endpoint is usable somewhere.
    pub has_any: bool,
    /// The topology mode in force.
    pub mode: TopologyMode,
}

impl Categorized {
    /// Cuts each list to `most` endpoints, as [`Variants::limit`] and [`sample_local`] do for all nodes.
    pub fn limit(&mut self, most: usize) {
        let lists = self.cluster.iter_mut().chain(&mut self.local);
        lists.for_each(|list| sample(list, most, |addr| (false, *addr)));
        let all: BTreeSet<_> = self.cluster.iter().chain(&self.local).flatten().copied().collect();
        self.all = all.into_iter().collect();
    }
}

/// Selects endpoints for one node. `endpoints` come from [`merge`].
pub fn categorize(
    port: &ServicePort,
    endpoints: &[Endpoint],
    node: &str,
    zone: Option<&str>,
) -> Categorized {
    let has_any = endpoints.iter().any(Endpoint::is_usable);
    let mode = if port.uses_cluster_endpoints() {
        topology_mode(endpoints, node, zone)
    } else {
        TopologyMode::None
    };
    let cluster = port
        .uses_cluster_endpoints()
        .then(|| cluster_endpoints(endpoints, mode, node, zone));
    let local = port.uses_local_endpoints().then(|| local_endpoints(endpoints, node));
    let all: BTreeSet<EndpointAddr> = cluster.iter().chain(&local).flatten().copied().collect();
    Categorized {
        all: all.into_iter().collect(),
        cluster,
        local,
        has_any,
        mode,
    }
}

/// Returns the mode that all ready endpoints agree on (B2).
fn topology_mode(endpoints: &[Endpoint], node: &str, zone: Option<&str>) -> TopologyMode {
    let names = |hints: &[NodeName], name: &str| hints.iter().any(|h| **h == *name);
    let ready = || endpoints.iter().filter(|e| e.ready);
    if ready().all(|e| !e.node_hints.is_empty()) && ready().any(|e| names(&e.node_hints, node)) {
        return TopologyMode::SameNode;
    }
    match zone {
        Some(zone)
            if ready().all(|e| !e.zone_hints.is_empty())
                && ready().any(|e| names(&e.zone_hints, zone)) =>
        {
            TopologyMode::SameZone
        }
        _ => TopologyMode::None,
    }
}

/// Returns the ready endpoints with the hint, or every draining one when nothing is ready (B3).
fn cluster_endpoints(
    endpoints: &[Endpoint],
    mode: TopologyMode,
    node: &str,
    zone: Option<&str>,
) -> Vec<EndpointAddr> {
    let hinted = |e: &Endpoint| match mode {
        TopologyMode::None => true,
        TopologyMode::SameNode => e.node_hints.iter().any(|h| **h == *node),
        TopologyMode::SameZone => e.zone_hints.iter().any(|h| Some(&**h) == zone),
    };
    let selected = addrs(endpoints.iter().filter(|e| e.ready && hinted(e)));
    if selected.is_empty() {
        return addrs(endpoints.iter().filter(|e| e.is_draining()));
    }
    selected
}

/// Returns the ready endpoints of the node, or its draining ones when none is ready there (B5).
fn local_endpoints(endpoints: &[Endpoint], node: &str) -> Vec<EndpointAddr> {
    let here = || endpoints.iter().filter(|e| e.node.as_deref() == Some(node));
    let ready = addrs(here().filter(|e| e.ready));
    if ready.is_empty() {
        return addrs(here().filter(|e| e.is_draining()));
    }
    ready
}
