//! The index: every object of the cluster, and the ServicePorts that a change concerns.
//!
//! It is synchronous, has one owner and does no I/O: batches of source events go in, publications
//! come out. Work per batch is proportional to the Services that it concerns, not to all of them
//! (invariant: constant-work).

mod address_claims;
mod causes;
mod claims;
mod effective;
mod guard;
mod held_state;
mod holding;
mod policies;
mod prestop;
mod proxying;
mod put;
mod quota;
mod resync;
mod selection;
mod step;
mod suspects;
mod terminating;
mod totals;
mod triggers;
mod view;

#[cfg(test)]
pub(crate) mod tests;

pub use causes::{Cause, Causes, Details, EndpointChange, EndpointState, FieldChange, Verb};
pub use guard::{CliffGuard, Guarded};
pub use held_state::HeldState;
pub use holding::Held;
pub use prestop::PodEndpoints;
pub use selection::{Page, Selection};
pub use suspects::{Suspicion, Suspicions};
pub use totals::{Taken, Totals};
pub use view::{Facts, PortView, ServiceDetail, SliceFacts};

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::SystemTime;

use kplane_model::{
    Cidr, Family, Issue, NodeFacts, NodeName, PodName, PolicyName, ServiceKey, ServiceName,
    ServicePort, service_addresses,
};

use self::totals::ByFamily;
use crate::admission::{Admission, Enforce, Proxying};
use crate::convert::{self, EndpointOrigin, ExternalIps, SkipReason, SliceEndpoints};
use crate::k8s::{Kind, Object, ObjectId, Uid};
use crate::publish::{Publication, Published};
use crate::source::Located;
use crate::trust::{self, Completeness};
use kplane_policy::{Excess, Policies};

use address_claims::AddressClaims;
use claims::{Claims, Seniority};
use effective::{API_SERVICE, Effective};
use guard::Recent;
use holding::{Holding, service_name};
use quota::Quota;
use resync::Resync;
use triggers::Triggers;

/// All objects, indexed.
#[derive(Debug, Default)]
pub struct Index {
    external_ips: ExternalIps,
    services: HashMap<ServiceName, ServiceEntry>,
    /// Services that exist and are not served.
    skipped: HashMap<ServiceName, SkipReason>,
    slices: HashMap<ObjectId, SliceEntry>,
    /// Slices by Service, sorted: the order decides between slices that disagree.
    slices_of: HashMap<ServiceName, Vec<ObjectId>>,
    nodes: BTreeMap<NodeName, NodeFacts>,
    /// UIDs of the nodes, to which tokens of agents are bound.
    node_uids: HashMap<NodeName, Uid>,
    cidrs: BTreeMap<Arc<str>, Vec<Cidr>>,
    claims: Claims,
    address_claims: AddressClaims,
    quota: Quota,
    proxying: Proxying,
    resync: Resync,
    /// Problems of the source (here), of single objects, and of Services with each other (below).
    source_issues: Vec<Issue>,
    object_issues: BTreeMap<ObjectId, Vec<Issue>>,
    /// UIDs of objects in `object_issues`.
    refused_uids: HashMap<ObjectId, Uid>,
    service_issues: BTreeMap<ServiceName, Vec<Issue>>,
    pending: Pending,
    triggers: Triggers,
    totals: Totals,
    /// Number of Services with an endpoint.
    with_endpoints: usize,
    completeness: Completeness,
    guard: CliffGuard,
    holding: Option<Holding>,
    suspected: suspects::Suspected,
    terminating: terminating::Terminating,
    recent: Recent,
    /// The NetworkPolicies; `None` if nodes do not enforce any.
    policies: Option<Policies>,
    enforce: Option<Enforce>,
    /// Pods with more policies than fit into a message, and how many select each.
    crowded: Vec<(PodName, usize)>,
    /// NetworkPolicies beyond the share of their namespace.
    beyond: Vec<(PolicyName, Excess)>,
    /// Pods that have the address of a Pod of another node, the address, and that Pod.
    address_conflicts: Vec<(PodName, IpAddr, PodName)>,
    /// Number of decisions of ClusterNetworkPolicies that are too large.
    overlarge: usize,
}

/// ServicePorts that were handed out for publishing, each with the number of its endpoints; sorted.
type PublishedPorts = Box<[(ServiceKey, usize)]>;

#[derive(Debug, Default)]
struct ServiceEntry {
    created: Option<Arc<str>>,
    uid: Option<Uid>,
    location: Arc<str>,
    /// Ports as written, before the claims of other Services are applied.
    ports: Vec<ServicePort>,
    published: PublishedPorts,
    /// What `published` has taken of ranges.
    taken: Taken,
    origin: EndpointOrigin,
    /// The source no longer names the Service.
    held: bool,
}

impl ServiceEntry {
    fn seniority(&self) -> Seniority {
        Seniority::new(self.created.as_ref(), self.held)
    }

    fn has_endpoints(&self) -> bool {
        self.published.iter().any(|(_, endpoints)| *endpoints > 0)
    }
}

#[derive(Debug)]
struct SliceEntry {
    service: ServiceName,
    /// The family of its addresses, if it has one that is served.
    family: Option<Family>,
    ports: Vec<SliceEndpoints>,
    /// Number of addresses that can be used, with or without ports.
    addresses: usize,
    /// The endpoints' conditions follow from the state of Pods.
    follows_pods: bool,
    /// Time of the change that led to the slice, milliseconds since 1970; 0 = unknown.
    trigger_ms: u64,
}

impl SliceEntry {
    fn has_endpoints(&self) -> bool {
        self.ports.iter().any(|port| !port.endpoints.is_empty())
    }
}

/// Changes that have to be published next.
#[derive(Debug, Default)]
struct Pending {
    services: BTreeSet<ServiceName>,
    nodes: BTreeSet<NodeName>,
    cidrs: bool,
    causes: Causes,
    observed_at: Option<SystemTime>,
}

/// The result of a batch.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Changes to publish; `None` when there are none, or while the picture is not complete.
    pub publication: Option<Publication>,
    /// The causes of these changes.
    pub causes: Causes,
    /// The list of issues changed.
    pub issues_changed: bool,
    /// The set of held objects changed.
    pub held_changed: bool,
    /// More objects are held because the source no longer names them; another list could confirm
    /// that.
    pub held_more: bool,
}

impl Index {
    /// Creates an empty index.
    pub fn new(admission: Admission) -> Self {
        let enforces = admission.enforces();
        Self {
            external_ips: admission.external_ips,
            address_claims: AddressClaims::new(admission.reserved),
            quota: Quota::new(admission.namespace_elements),
            proxying: admission.proxying,
            completeness: if enforces {
                Completeness::confirmed_by(&trust::WITH_POLICIES)
            } else {
                Completeness::default()
            },
            policies: enforces.then(Policies::default),
            enforce: admission.network_policies,
            terminating: terminating::Terminating::new(enforces || admission.watch_pods),
            ..Self::default()
        }
    }

    /// Sets the start time. Earlier changes are left out of latency measurements.
    #[must_use]
    pub fn started_at(mut self, started_at: SystemTime) -> Self {
        self.triggers = Triggers::since(started_at);
        self
    }

    /// Sets the guard that holds back deletions.
    #[must_use]
    pub fn guarded(mut self, guard: CliffGuard) -> Self {
        self.guard = guard;
        self
    }

    /// Returns whether every kind that Services need has been listed completely (Z3). Services do not wait for
    /// NetworkPolicies.
    pub fn is_synced(&self) -> bool {
        self.resync.has(&Kind::ALL)
    }

    /// Returns the totals of what is published.
    pub fn totals(&self) -> Totals {
        let counts = self.policies.as_ref().map(Policies::counts).unwrap_or_default();
        Totals {
            policies: counts.policies + counts.cluster_policies,
            policy_pods: counts.pods,
            ..self.totals
        }
    }

    /// Returns all problems with the input, sorted.
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
            .chain(self.crowded_issues())
            .chain(self.beyond_issues())
            .chain(self.conflict_issues())
            .chain(self.overlarge_issue())
            .collect();
        issues.sort();
        issues
    }

    /// Adds or replaces an object. `changed_at` is the time at which its change was observed;
    /// `None` for an object from a list.
    fn apply_object(&mut self, located: Located, changed_at: Option<SystemTime>) -> bool {
        let cause = self.cause(&located);
        let id = located.object.id();
        let uid = located.object.metadata().uid;
        let location = located.location;
        let issues = match &located.object {
            Object::Service(service) => self.put_service(&id, service, location, cause),
            Object::EndpointSlice(slice) => {
                self.put_slice(&id, slice, &location, changed_at, cause)
            }
            Object::Node(node) => {
                let (facts, issues) = convert::node(node, &location);
                self.put_policy_object(&located.object, &location);
                self.replace_node(&facts.name.clone(), Some((facts, uid)));
                self.pending.note(None, cause);
                issues
            }
            Object::ServiceCidr(cidr) => {
                let (cidrs, issues) = convert::service_cidr(cidr, &location);
                self.replace_cidrs(&id.name, Some(cidrs));
                self.pending.note(None, cause);
                issues
            }
            Object::Pod(pod) => {
                self.note_pod(&id, pod, changed_at);
                self.put_policy_object(&located.object, &location)
            }
            Object::NetworkPolicy(_) | Object::Namespace(_) | Object::ClusterNetworkPolicy(_) => {
                self.put_policy_object(&located.object, &location)
            }
        };
        self.set_object_issues(id, issues, uid)
    }

    fn delete_object(&mut self, id: &ObjectId) -> bool {
        self.note_removal(id);
        match id.kind {
            Kind::Service => {
                let name = service_name(id);
                self.skipped.remove(&name);
                if let Some(entry) = self.services.get_mut(&name) {
                    // The entry is removed when its ports have been withdrawn.
                    self.address_claims.replace_user(&name, &entry.ports, &[]);
                    entry.ports.clear();
                    self.pending.services.insert(name);
                }
            }
            Kind::EndpointSlice => self.delete_slice(id),
            Kind::Node => {
                self.delete_policy_object(id);
                self.replace_node(&id.name, None);
            }
            Kind::ServiceCidr => self.replace_cidrs(&id.name, None),
            Kind::Pod => {
                self.note_pod_gone(id);
                self.delete_policy_object(id);
            }
            Kind::NetworkPolicy | Kind::Namespace | Kind::ClusterNetworkPolicy => {
                self.delete_policy_object(id);
            }
        }
        self.set_object_issues(id.clone(), Vec::new(), None)
    }

    fn replace_node(&mut self, name: &NodeName, node: Option<(NodeFacts, Option<Uid>)>) {
        let (node, uid) = node.unzip();
        match uid.flatten() {
            Some(uid) => drop(self.node_uids.insert(name.clone(), uid)),
            None => drop(self.node_uids.remove(name)),
        }
        let before = self.nodes.get(name);
        let users = self.address_claims.replace_node(before, node.as_ref());
        self.pending.services.extend(users);
        if self.is_synced() && before != node.as_ref() {
            let asking = self.asking_for_proxy();
            self.pending.services.extend(asking);
        }
        self.pending.nodes.insert(name.clone());
        match node {
            Some(node) => drop(self.nodes.insert(name.clone(), node)),
            None => drop(self.nodes.remove(name)),
        }
    }

    fn replace_cidrs(&mut self, name: &Arc<str>, cidrs: Option<Vec<Cidr>>) {
        let after = cidrs.clone().unwrap_or_default();
        let before = match cidrs {
            Some(cidrs) => self.cidrs.insert(name.clone(), cidrs),
            None => self.cidrs.remove(name),
        };
        for range in before.unwrap_or_default().into_iter().chain(after) {
            let users = self.address_claims.users_in(range).cloned();
            self.pending.services.extend(users);
        }
        self.pending.cidrs = true;
        let ranges = self.cidrs.values().flatten().copied().collect();
        self.totals.service_addresses =
            ByFamily::count(|family| service_addresses(&ranges, family));
    }

    /// Records the addresses of API servers, if the slices belong to their Service.
    fn note_api_servers(&mut self, service: &ServiceName) {
        if (&*service.namespace, &*service.name) != API_SERVICE {
            return;
        }
        let endpoints = self.listed_of(service).flat_map(|listed| &listed.endpoints);
        let address_claims = endpoints.map(|e| SocketAddr::new(e.addr.ip, e.addr.port)).collect();
        let users = self.address_claims.replace_api_endpoints(address_claims);
        self.pending.services.extend(users);
    }

    fn link_slice(&mut self, id: &ObjectId, service: &ServiceName) {
        let one = || Vec::with_capacity(1);
        let slices = self.slices_of.entry(service.clone()).or_insert_with(one);
        if let Err(place) = slices.binary_search(id) {
            slices.insert(place, id.clone());
        }
    }

    fn unlink_slice(&mut self, id: &ObjectId) -> Option<SliceEntry> {
        let entry = self.slices.remove(id)?;
        if let Some(slices) = self.slices_of.get_mut(&entry.service) {
            if let Ok(place) = slices.binary_search(id) {
                slices.remove(place);
            }
            if slices.is_empty() {
                self.slices_of.remove(&entry.service);
            }
        }
        self.note_api_servers(&entry.service);
        self.pending.services.insert(entry.service.clone());
        Some(entry)
    }

    fn set_object_issues(&mut self, id: ObjectId, issues: Vec<Issue>, uid: Option<Uid>) -> bool {
        if let Some(uid) = uid
            && !issues.is_empty()
        {
            self.refused_uids.insert(id.clone(), uid);
        } else {
            self.refused_uids.remove(&id);
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
        let nodes = nodes.iter().map(|name| self.node_facts(name)).collect::<Vec<_>>();
        let service_cidrs = std::mem::take(&mut self.pending.cidrs)
            .then(|| self.cidrs.values().flatten().copied().collect());
        let triggers = self.triggers.take();
        let policies = self.take_policies(issues_changed);
        let observed_at = self.pending.observed_at.take()?;
        let unchanged = services.is_empty() && nodes.is_empty() && service_cidrs.is_none();
        if unchanged && policies.is_empty() {
            return None;
        }
        Some(Publication {
            services,
            nodes,
            policies,
            service_cidrs,
            observed_at,
            triggers,
        })
    }

    fn node_facts(&self, name: &NodeName) -> NodeFacts {
        // A node without a Node object does not count as being drained.
        let unknown = || NodeFacts {
            name: name.clone(),
            eligible: true,
            ..NodeFacts::default()
        };
        self.nodes.get(name).cloned().unwrap_or_else(unknown)
    }

    /// Computes all ports of a Service; returns true when its issues changed.
    fn recompute(
        &mut self,
        name: &ServiceName,
        out: &mut Vec<(ServiceKey, Option<Published>)>,
    ) -> bool {
        let Effective {
            ports,
            most,
            issues,
        } = self.effective(name);
        let mut keys = Vec::with_capacity(ports.len());
        let taken = Taken::by(ports.iter().map(|(port, _)| port));
        for (port, endpoints) in ports {
            keys.push((port.key.clone(), endpoints.len()));
            let mut published = Published::new(port, &endpoints);
            published.complete(self.dead_endpoints(&published.port), most);
            out.push((published.port.key.clone(), Some(published)));
        }
        if let Some(entry) = self.services.get_mut(name) {
            keys.sort_unstable();
            self.with_endpoints -= usize::from(entry.has_endpoints());
            let before = std::mem::replace(&mut entry.published, keys.into());
            self.with_endpoints += usize::from(entry.has_endpoints());
            let after = &entry.published;
            self.totals.change(&before, after);
            self.totals.take(std::mem::replace(&mut entry.taken, taken), taken);
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
}
