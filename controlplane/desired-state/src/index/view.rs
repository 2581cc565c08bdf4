//! Human-readable views of the index.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use kplane_model::select::{Categorized, categorize};
use kplane_model::{
    Cidr, Endpoint, EndpointAddr, Family, Issue, NodeFacts, NodeName, Protocol, Reason,
    ServiceName, ServicePort,
};

use super::Index;
use super::claims::Claim;
use super::effective::Effective;
use super::holding::service_name;
use super::selection::{Page, Selection};
use super::suspects::Suspicion;
use crate::convert::{EndpointOrigin, SkipReason};
use crate::k8s::{Kind, ObjectId, Uid};

/// One ServicePort with all its endpoints, usable or not.
#[derive(Clone, Debug, PartialEq)]
pub struct PortView {
    /// Addresses and policies, without the places that the Service does not get.
    pub port: ServicePort,
    /// Endpoints, sorted.
    pub endpoints: Vec<Endpoint>,
    /// Most endpoints that one node uses.
    pub most: usize,
}

impl PortView {
    /// Returns the endpoints that a node uses, and why.
    pub fn on_node(&self, node: &NodeFacts) -> Categorized {
        let zone = node.zone.as_deref();
        let mut categorized = categorize(&self.port, &self.endpoints, &node.name, zone);
        categorized.limit(self.most);
        categorized
    }
}

/// Everything about one Service.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceDetail {
    /// All ports and families.
    pub ports: Vec<PortView>,
    /// Problems of the Service and of its slices.
    pub issues: Vec<Issue>,
    /// Facts behind the ports, from which `findings` explains them.
    pub facts: Facts,
}

/// Facts about one Service that are not published.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// The reason why the Service is not served.
    pub skipped: Option<SkipReason>,
    /// The source no longer names the Service.
    pub held: bool,
    /// The origin of its endpoints.
    pub origin: EndpointOrigin,
    /// Its EndpointSlices, sorted by name.
    pub slices: Vec<SliceFacts>,
    /// EndpointSlices of the namespace that belong to no Service, a few of them; those whose names begin as the
    /// Service's come first.
    pub strays: Vec<Arc<str>>,
    /// Places that the Service has and others want, with the first of these.
    pub contested: Vec<(String, ServiceName)>,
    /// The cluster's ranges for Services; empty if they are not known.
    pub service_ranges: Vec<Cidr>,
    /// Endpoints that are cluster addresses of Services, a few of them.
    pub chained: Vec<IpAddr>,
    /// Suspected nodes with endpoints of the Service, the number of these, whether connections to them end, and whether all
    /// count as terminating.
    pub suspected: (Vec<(NodeName, Suspicion, usize, bool)>, bool),
    /// Pods that are being deleted and that slices still call ready, each with the first time at which that is known.
    pub terminating: Vec<(Arc<str>, SystemTime)>,
}

/// One EndpointSlice of a Service.
#[derive(Clone, Debug, PartialEq)]
pub struct SliceFacts {
    /// The slice's name.
    pub name: Arc<str>,
    /// The family of its addresses; `None` if it has none that are served.
    pub family: Option<Family>,
    /// Number of usable addresses.
    pub addresses: usize,
    /// Names and protocols of its ports.
    pub ports: Vec<(Arc<str>, Protocol)>,
}

/// Part of the text of an issue about a file whose objects are kept.
const LAST_GOOD_STATE: &str = "last good state";
/// Maximum number of other objects that the facts name.
const NAMED: usize = 5;
/// Number of Services, and of their endpoints, after which a slice of many details ends. A slice takes some milliseconds, in which
/// nothing is published.
pub(super) const SLICE: (usize, usize) = (256, 4_096);

/// The EndpointSlices of one namespace that belong to no Service, sorted by name.
#[derive(Debug, Default)]
struct Strays {
    namespace: Arc<str>,
    names: Vec<Arc<str>>,
}

impl Index {
    /// Returns a page of the ServicePorts that a selection wants, sorted by key.
    pub fn ports(&self, selection: &Selection) -> Page {
        let services: BTreeSet<&ServiceName> = match &selection.among {
            Some(among) => among.iter().filter(|of| selection.wants(of)).collect(),
            None => self.services.keys().filter(|name| selection.wants(name)).collect(),
        };
        let ports = services.into_iter().flat_map(|name| {
            let mut ports = self.ports_of(name);
            ports.sort_unstable_by(|a, b| a.port.key.cmp(&b.port.key));
            ports
        });
        selection.page(ports)
    }

    /// Returns one Service, if it is known. `upstream`: further issues, some of which may be about
    /// the Service.
    pub fn detail(&self, name: &ServiceName, upstream: &[Issue]) -> Option<ServiceDetail> {
        let slices = self.slices_of.get(name);
        let is_its = |issue: &&Issue| {
            let object = &issue.object;
            let in_namespace = *object.namespace == *name.namespace;
            let is_of_object = in_namespace
                && match object.kind.as_str() {
                    "Service" => *object.name == *name.name,
                    "EndpointSlice" => slices
                        .is_some_and(|slices| slices.iter().any(|id| *id.name == *object.name)),
                    _ => false,
                };
            is_of_object || self.is_of_file(issue, name)
        };
        let mut detail = self.own_detail(name, &mut Strays::default());
        let of_others = self.source_issues.iter().chain(upstream).filter(is_its);
        detail.issues.extend(of_others.cloned());
        detail.issues.sort();
        let is_known = self.services.contains_key(name) || detail.facts.skipped.is_some();
        (is_known || !detail.issues.is_empty()).then_some(detail)
    }

    /// Returns the names of the Services that a selection wants and nodes serve, or should, sorted.
    pub fn names(&self, selection: &Selection) -> Vec<ServiceName> {
        let wanted = self.services.keys().filter(|name| selection.wants(name));
        let mut names: Vec<_> = wanted.cloned().collect();
        names.sort_unstable();
        names
    }

    /// Returns the details of the first of some Services, at least of one: of as many as fit into one answer of the index's task.
    /// Issues are those of the Services and their slices, and not those of whole files. `names` are sorted.
    pub fn details(&self, names: &[ServiceName]) -> Vec<ServiceDetail> {
        let (services, endpoints) = SLICE;
        let (mut strays, mut room) = (Strays::default(), Some(endpoints));
        let mut details = Vec::new();
        for name in names.iter().take(services) {
            let Some(left) = room else { break };
            let detail = self.own_detail(name, &mut strays);
            let took: usize = detail.ports.iter().map(|view| view.endpoints.len()).sum();
            room = left.checked_sub(took);
            details.push(detail);
        }
        details
    }

    /// Returns what the index knows of one Service. The work does not grow with the number of other Services, or their issues.
    fn own_detail(&self, name: &ServiceName, strays: &mut Strays) -> ServiceDetail {
        let service = ObjectId {
            kind: Kind::Service,
            namespace: name.namespace.clone(),
            name: name.name.clone(),
        };
        let slices = self.slices_of.get(name).into_iter().flatten();
        let objects = [&service].into_iter().chain(slices);
        let of_objects = objects.filter_map(|id| self.object_issues.get(id)).flatten();
        let of_service = self.service_issues.get(name).into_iter().flatten();
        let issues = of_objects.chain(of_service).cloned().collect();
        let ports = self.ports_of(name);
        let mut facts = self.facts(name);
        facts.chained = self.chained(&ports);
        if facts.slices.is_empty() {
            facts.strays = self.strays(name, strays);
        }
        ServiceDetail {
            ports,
            issues,
            facts,
        }
    }

    /// Returns whether objects of a Service's file keep their last good state, because the file cannot be read.
    fn is_of_file(&self, issue: &Issue, name: &ServiceName) -> bool {
        let file = |location: &str| Some(location.split(", ").next()?.to_owned());
        let entry = self.services.get(name);
        issue.code == Reason::Unreadable
            && issue.object.name.is_empty()
            && issue.reason.contains(LAST_GOOD_STATE)
            && entry.is_some_and(|entry| file(&entry.location) == file(&issue.location))
    }

    fn facts(&self, name: &ServiceName) -> Facts {
        let entry = self.services.get(name);
        let slices = self.slices_of.get(name).into_iter().flatten().filter_map(|id| {
            let slice = self.slices.get(id)?;
            Some(SliceFacts {
                name: id.name.clone(),
                family: slice.family,
                addresses: slice.addresses,
                ports: slice
                    .ports
                    .iter()
                    .map(|port| (port.port_name.clone(), port.protocol))
                    .collect(),
            })
        });
        Facts {
            skipped: self.skipped.get(name).cloned(),
            held: entry.is_some_and(|entry| entry.held),
            origin: entry.map(|entry| entry.origin.clone()).unwrap_or_default(),
            slices: slices.collect(),
            strays: Vec::new(),
            service_ranges: self.cidrs.values().flatten().copied().collect(),
            chained: Vec::new(),
            suspected: (self.suspected_of(name), self.suspected.now.act),
            terminating: self.terminating_of(name),
            contested: self
                .claims
                .contested(name)
                .take(NAMED)
                .map(|(claim, other)| (claim.to_string(), other.clone()))
                .collect(),
        }
    }

    /// Returns endpoints that are cluster addresses: they lie in a ServiceCIDR, or a Service has them with their port.
    fn chained(&self, ports: &[PortView]) -> Vec<IpAddr> {
        let is_owned = |port: &ServicePort, at: EndpointAddr| {
            let claim = Claim::Address {
                ip: at.ip,
                protocol: port.key.protocol,
                port: at.port,
            };
            self.claims.cluster_ip_of(&claim).is_some()
        };
        let mut chained = BTreeSet::new();
        for view in ports {
            let at = view.endpoints.iter().map(|endpoint| endpoint.addr);
            let at =
                at.filter(|at| self.service_range(at.ip).is_some() || is_owned(&view.port, *at));
            chained.extend(at.map(|at| at.ip));
        }
        chained.into_iter().take(NAMED).collect()
    }

    /// Returns EndpointSlices of the Service's namespace that belong to no Service. `known` are those of the Service before,
    /// which often has the same namespace.
    fn strays(&self, of: &ServiceName, known: &mut Strays) -> Vec<Arc<str>> {
        if known.namespace != of.namespace {
            *known = self.strays_in(&of.namespace);
        }
        let names = &known.names;
        let is_akin = |stray: &Arc<str>| stray.starts_with(&*of.name);
        let begin = names.partition_point(|stray| **stray < *of.name);
        let akin = names[begin..].partition_point(is_akin);
        let (before, from) = names.split_at(begin);
        let (akin, behind) = from.split_at(akin);
        akin.iter().chain(before).chain(behind).take(NAMED).cloned().collect()
    }

    fn strays_in(&self, namespace: &Arc<str>) -> Strays {
        let first = ObjectId {
            kind: Kind::EndpointSlice,
            namespace: namespace.clone(),
            name: "".into(),
        };
        let in_namespace =
            |id: &ObjectId| id.kind == Kind::EndpointSlice && id.namespace == *namespace;
        let names = self
            .object_issues
            .range(first..)
            .take_while(|(id, _)| in_namespace(id))
            .filter(|(_, issues)| {
                issues.iter().any(|issue| issue.code == Reason::SliceWithoutService)
            })
            .map(|(id, _)| id.name.clone());
        Strays {
            namespace: namespace.clone(),
            names: names.collect(),
        }
    }

    /// Returns the UID of a Service, or of an object that has issues of its own.
    pub fn uid(&self, id: &ObjectId) -> Option<Uid> {
        let service = || self.services.get(&service_name(id)).and_then(|entry| entry.uid);
        let refused = self.refused_uids.get(id).copied();
        match id.kind {
            Kind::Service => service().or(refused),
            _ => refused,
        }
    }

    /// Returns the UID of a Node.
    pub fn node_uid(&self, name: &NodeName) -> Option<Uid> {
        self.node_uids.get(name).copied()
    }

    fn ports_of(&self, name: &ServiceName) -> Vec<PortView> {
        let Effective { ports, most, .. } = self.effective(name);
        let view = |(port, endpoints)| PortView {
            port,
            endpoints,
            most,
        };
        ports.into_iter().map(view).collect()
    }
}
