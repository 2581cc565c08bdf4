//! The index: every object of the cluster, and which ServicePorts a change concerns.
//!
//! Synchronous, one owner, no I/O: batches of source events go in, publications come out. Work per
//! batch is proportional to the Services that it concerns, not to all of them (design invariant 8).

mod claims;
mod guard;
mod holding;
mod resync;
mod step;
mod triggers;
mod view;

#[cfg(test)]
mod tests;

pub use claims::CONFLICT_ADVICE;
pub use guard::{CliffGuard, Guarded};
pub use holding::Held;
pub use view::{PortView, ServiceDetail};

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::SystemTime;

use kplane_model::select::{local_by_node, merge, variants};
use kplane_model::{
    Cidr, Endpoint, Issue, NodeFacts, NodeName, ObjectRef, ServiceKey, ServiceName, ServicePort,
    Severity,
};

use crate::convert::{self, ExternalIps, SliceEndpoints};
use crate::k8s::{Kind, Object, ObjectId, Uid};
use crate::publish::{Publication, Published};
use crate::source::Located;
use crate::trust::Belief;

use claims::{Claim, Claims, address_claim, node_port_claim};
use guard::Recent;
use holding::{Holding, service_name};
use resync::Resync;
use triggers::Triggers;

/// Endpoints of one ServicePort that are served: what the largest class of the data path holds,
/// and above the 10,000 that kplane promises.
const MAX_ENDPOINTS: usize = 16_384;

/// All objects, indexed.
#[derive(Debug, Default)]
pub struct Index {
    external_ips: ExternalIps,
    services: HashMap<ServiceName, ServiceEntry>,
    slices: HashMap<ObjectId, SliceEntry>,
    /// Sorted: the order decides between slices that disagree.
    slices_of: HashMap<ServiceName, Vec<ObjectId>>,
    nodes: BTreeMap<NodeName, NodeFacts>,
    cidrs: BTreeMap<Arc<str>, Vec<Cidr>>,
    claims: Claims,
    resync: Resync,
    /// Problems that the source has, that objects have by themselves, and that Services have with
    /// each other.
    source_issues: Vec<Issue>,
    object_issues: BTreeMap<ObjectId, Vec<Issue>>,
    /// Of objects in `object_issues`.
    refused_uids: HashMap<ObjectId, Uid>,
    service_issues: BTreeMap<ServiceName, Vec<Issue>>,
    pending: Pending,
    triggers: Triggers,
    totals: Totals,
    /// Services with an endpoint.
    with_endpoints: usize,
    belief: Belief,
    guard: CliffGuard,
    holding: Option<Holding>,
    recent: Recent,
}

/// Sizes of what is published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Services with at least one served port.
    pub services: usize,
    /// Endpoints of all served ports, families counted apart.
    pub endpoints: usize,
}

impl Totals {
    /// A Service had these ports and has those now.
    fn change(&mut self, before: &PublishedPorts, after: &PublishedPorts) {
        let endpoints = |ports: &PublishedPorts| ports.iter().map(|(_, n)| n).sum::<usize>();
        self.services += usize::from(!after.is_empty());
        self.services -= usize::from(!before.is_empty());
        self.endpoints += endpoints(after);
        self.endpoints -= endpoints(before);
    }
}

/// ServicePorts that were handed out for publishing, each with the number of its endpoints; sorted.
type PublishedPorts = Box<[(ServiceKey, usize)]>;

#[derive(Debug, Default)]
struct ServiceEntry {
    created: Option<Arc<str>>,
    uid: Option<Uid>,
    location: Arc<str>,
    /// As written, before anybody else's claims are looked at.
    ports: Vec<ServicePort>,
    published: PublishedPorts,
    /// The source does not name it any more.
    held: bool,
}

impl ServiceEntry {
    fn has_endpoints(&self) -> bool {
        self.published.iter().any(|(_, endpoints)| *endpoints > 0)
    }
}

#[derive(Debug)]
struct SliceEntry {
    service: ServiceName,
    ports: Vec<SliceEndpoints>,
    /// When the change happened that led to it, milliseconds since 1970; 0 = not known.
    trigger_ms: u64,
}

impl SliceEntry {
    fn has_endpoints(&self) -> bool {
        self.ports.iter().any(|port| !port.endpoints.is_empty())
    }
}

/// What has to be published next.
#[derive(Debug, Default)]
struct Pending {
    services: BTreeSet<ServiceName>,
    nodes: BTreeSet<NodeName>,
    cidrs: bool,
    observed_at: Option<SystemTime>,
}

/// What a batch led to.
#[derive(Debug, Default)]
pub struct Outcome {
    /// To be published; `None` when there is nothing, or while the picture is not complete.
    pub publication: Option<Publication>,
    /// The list of issues changed.
    pub issues_changed: bool,
    /// What is held changed.
    pub held_changed: bool,
    /// Something is held now because the source no longer names it: a second look would help.
    pub held_more: bool,
}

impl Index {
    /// An empty index.
    #[must_use]
    pub fn new(external_ips: ExternalIps) -> Self {
        Self {
            external_ips,
            ..Self::default()
        }
    }

    /// For a process that started then: of changes before it nothing is measured.
    #[must_use]
    pub fn started_at(mut self, started_at: SystemTime) -> Self {
        self.triggers = Triggers::since(started_at);
        self
    }

    /// Holds deletions back that this guard does not let pass.
    #[must_use]
    pub fn guarded(mut self, guard: CliffGuard) -> Self {
        self.guard = guard;
        self
    }

    /// Every kind has been listed completely (Z3).
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.resync.is_complete()
    }

    /// Sizes of what is published.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// All problems with the input, sorted.
    #[must_use]
    pub fn issues(&self) -> Vec<Issue> {
        let objects = self.object_issues.values().flatten();
        let services = self.service_issues.values().flatten();
        let mut issues: Vec<Issue> = self
            .source_issues
            .iter()
            .chain(objects)
            .chain(services)
            .cloned()
            .chain(self.holding_issue())
            .collect();
        issues.sort();
        issues
    }

    /// An object is there; `changed_at`: it was observed to change, and not found in a list.
    fn apply_object(&mut self, located: Located, changed_at: Option<SystemTime>) -> bool {
        let id = located.object.id();
        let uid = located.object.metadata().uid;
        let location = located.location;
        let issues = match &located.object {
            Object::Service(service) => {
                let name = service_name(&id);
                let converted = convert::service(service, &location, &self.external_ips);
                let entry = self.services.entry(name.clone()).or_default();
                entry
                    .created
                    .clone_from(&service.metadata.creation_timestamp);
                entry.uid = uid;
                entry.location = location;
                entry.ports = converted.ports;
                entry.held = false;
                self.pending.services.insert(name);
                converted.issues
            }
            Object::EndpointSlice(slice) => {
                let converted = convert::slice(slice, &location);
                let trigger_ms = converted.trigger_ms;
                let before_ms = self.slices.get(&id).map_or(0, |slice| slice.trigger_ms);
                self.unlink_slice(&id);
                if let Some(service) = converted.service {
                    if let (Some(at), Some(family)) = (changed_at, converted.family)
                        && trigger_ms != before_ms
                    {
                        self.triggers.note(&service, family, trigger_ms, at);
                    }
                    self.link_slice(&id, &service);
                    self.pending.services.insert(service.clone());
                    self.slices.insert(
                        id.clone(),
                        SliceEntry {
                            service,
                            ports: converted.ports,
                            trigger_ms,
                        },
                    );
                }
                converted.issues
            }
            Object::Node(node) => {
                let (facts, issues) = convert::node(node, &location);
                self.pending.nodes.insert(facts.name.clone());
                self.nodes.insert(facts.name.clone(), facts);
                issues
            }
            Object::ServiceCidr(cidr) => {
                let (cidrs, issues) = convert::service_cidr(cidr, &location);
                self.cidrs.insert(id.name.clone(), cidrs);
                self.pending.cidrs = true;
                issues
            }
        };
        self.set_object_issues(id, issues, uid)
    }

    fn delete_object(&mut self, id: &ObjectId) -> bool {
        match id.kind {
            Kind::Service => {
                let name = service_name(id);
                if let Some(entry) = self.services.get_mut(&name) {
                    // The entry goes when its ports have been withdrawn.
                    entry.ports.clear();
                    self.pending.services.insert(name);
                }
            }
            Kind::EndpointSlice => self.unlink_slice(id),
            Kind::Node => {
                self.nodes.remove(&id.name);
                self.pending.nodes.insert(id.name.clone());
            }
            Kind::ServiceCidr => {
                self.cidrs.remove(&id.name);
                self.pending.cidrs = true;
            }
        }
        self.set_object_issues(id.clone(), Vec::new(), None)
    }

    fn link_slice(&mut self, id: &ObjectId, service: &ServiceName) {
        let one = || Vec::with_capacity(1);
        let slices = self.slices_of.entry(service.clone()).or_insert_with(one);
        if let Err(place) = slices.binary_search(id) {
            slices.insert(place, id.clone());
        }
    }

    fn unlink_slice(&mut self, id: &ObjectId) {
        let Some(entry) = self.slices.remove(id) else {
            return;
        };
        if let Some(slices) = self.slices_of.get_mut(&entry.service) {
            if let Ok(place) = slices.binary_search(id) {
                slices.remove(place);
            }
            if slices.is_empty() {
                self.slices_of.remove(&entry.service);
            }
        }
        self.pending.services.insert(entry.service);
    }

    fn set_object_issues(&mut self, id: ObjectId, issues: Vec<Issue>, uid: Option<Uid>) -> bool {
        match uid.filter(|_| !issues.is_empty()) {
            Some(uid) => drop(self.refused_uids.insert(id.clone(), uid)),
            None => drop(self.refused_uids.remove(&id)),
        }
        if issues.is_empty() {
            return self.object_issues.remove(&id).is_some();
        }
        let changed = self.object_issues.get(&id) != Some(&issues);
        self.object_issues.insert(id, issues);
        changed
    }

    fn take_publication(&mut self, issues_changed: &mut bool) -> Option<Publication> {
        let contested = self.contested();
        // Most Services have one port.
        let mut services = Vec::with_capacity(contested.len());
        for name in contested {
            *issues_changed |= self.recompute(&name, &mut services);
        }
        let nodes = std::mem::take(&mut self.pending.nodes);
        let nodes = nodes
            .iter()
            .map(|name| self.node_facts(name))
            .collect::<Vec<_>>();
        let service_cidrs = std::mem::take(&mut self.pending.cidrs)
            .then(|| self.cidrs.values().flatten().copied().collect());
        let triggers = self.triggers.take();
        let observed_at = self.pending.observed_at.take()?;
        if services.is_empty() && nodes.is_empty() && service_cidrs.is_none() {
            return None;
        }
        Some(Publication {
            services,
            nodes,
            service_cidrs,
            observed_at,
            triggers,
        })
    }

    /// The Services that changed, and those that won or lost a place through that.
    fn contested(&mut self) -> BTreeSet<ServiceName> {
        let mut names = std::mem::take(&mut self.pending.services);
        for name in names.clone() {
            if let Some(entry) = self.services.get(&name) {
                let created = entry.created.as_ref();
                names.extend(
                    self.claims
                        .replace(&name, created, entry.held, &entry.ports),
                );
            }
        }
        names
    }

    fn node_facts(&self, name: &NodeName) -> NodeFacts {
        // A node without a Node object is not being drained, as far as anybody can tell.
        let unknown = || NodeFacts {
            name: name.clone(),
            eligible: true,
            ..NodeFacts::default()
        };
        self.nodes.get(name).cloned().unwrap_or_else(unknown)
    }

    /// Works out all ports of a Service; true when its issues changed.
    fn recompute(
        &mut self,
        name: &ServiceName,
        out: &mut Vec<(ServiceKey, Option<Published>)>,
    ) -> bool {
        let mut issues = Vec::new();
        let ports = self.effective_ports(name, &mut issues);
        let mut keys = Vec::with_capacity(ports.len());
        for port in ports {
            let endpoints = self.endpoints(&port, &mut issues);
            keys.push((port.key.clone(), endpoints.len()));
            let published = Published {
                variants: variants(&port, &endpoints),
                local: local_by_node(&endpoints),
                port,
            };
            out.push((published.port.key.clone(), Some(published)));
        }
        if let Some(entry) = self.services.get_mut(name) {
            keys.sort_unstable();
            self.with_endpoints -= usize::from(entry.has_endpoints());
            let before = std::mem::replace(&mut entry.published, keys.into());
            self.with_endpoints += usize::from(entry.has_endpoints());
            let after = &entry.published;
            self.totals.change(&before, after);
            let is_there =
                |key: &ServiceKey| after.binary_search_by(|(other, _)| other.cmp(key)).is_ok();
            let gone = before.into_iter().filter(|(key, _)| !is_there(key));
            out.extend(gone.map(|(key, _)| (key, None)));
            if entry.ports.is_empty() {
                self.services.remove(name);
            }
        }
        let changed = self.service_issues.get(name).map_or(&[][..], Vec::as_slice) != issues;
        if issues.is_empty() {
            self.service_issues.remove(name);
        } else {
            self.service_issues.insert(name.clone(), issues);
        }
        changed
    }

    /// The ports of a Service without the places that belong to somebody else.
    fn effective_ports(&self, name: &ServiceName, issues: &mut Vec<Issue>) -> Vec<ServicePort> {
        let Some(entry) = self.services.get(name) else {
            return Vec::new();
        };
        let mut refuse = |claim: Claim, owner: &ServiceKey, consequence: &str| {
            let reason = format!("{claim} belongs to {owner}: {consequence}; {CONFLICT_ADVICE}");
            issues.push(service_issue(name, &entry.location, reason));
        };
        let mut effective = Vec::with_capacity(entry.ports.len());
        for port in &entry.ports {
            let mut owns = |claim: Claim, consequence: &str| match self.claims.owner(&claim) {
                Some(owner) if *owner != port.key => {
                    refuse(claim, owner, consequence);
                    false
                }
                _ => true,
            };
            let port_name = &port.key;
            if !owns(
                address_claim(port, port.cluster_ip),
                &format!("{port_name} is not served"),
            ) {
                continue;
            }
            let mut port = port.clone();
            let all = port.clone();
            let not_here = "this Service is not served there";
            port.external_ips
                .retain(|ip| owns(address_claim(&all, *ip), not_here));
            port.load_balancer_ips
                .retain(|ip| owns(address_claim(&all, *ip), not_here));
            port.node_port = port
                .node_port
                .filter(|n| owns(node_port_claim(&all, *n), not_here));
            effective.push(port);
        }
        effective
    }

    /// The endpoints of a port from all its slices (A27, A28).
    fn endpoints(&self, port: &ServicePort, issues: &mut Vec<Issue>) -> Vec<Endpoint> {
        let key = &port.key;
        let slices = self.slices_of.get(&key.service).into_iter().flatten();
        let ports = slices
            .filter_map(|id| self.slices.get(id))
            .flat_map(|slice| &slice.ports);
        let ours = ports.filter(|p| {
            p.family == key.family && p.protocol == key.protocol && p.port_name == key.port_name
        });
        let mut merged = merge(ours.flat_map(|p| p.endpoints.iter().cloned()));
        if merged.len() > MAX_ENDPOINTS {
            let reason = format!(
                "{key} has {} endpoints, of which the first {MAX_ENDPOINTS} are served; split the Service",
                merged.len()
            );
            issues.push(service_issue(&key.service, "", reason));
            merged.truncate(MAX_ENDPOINTS);
        }
        merged
    }
}

fn service_issue(name: &ServiceName, location: &str, reason: String) -> Issue {
    Issue {
        severity: Severity::Error,
        location: location.to_owned(),
        object: ObjectRef {
            kind: Kind::Service.to_string(),
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
        },
        reason,
    }
}
