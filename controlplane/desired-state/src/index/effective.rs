//! The served part of a Service: its ports without the places that it does not get, and its endpoints.
//!
//! The operator's settings (`admission.rs`), reserved places (`address_claims.rs`), claims of other Services (`claims.rs`)
//! and the namespace's quota (`quota.rs`) decide what a Service does not get.

use std::collections::BTreeSet;
use std::net::IpAddr;

use kplane_model::select::merge;
use kplane_model::{
    Cidr, Endpoint, Holder, Issue, MAX_SERVICE_ELEMENTS, ObjectRef, Reason, ServiceName,
    ServicePort, ServiceSize, Severity,
};

use super::claims::{Claim, address_claim, node_port_claim};
use super::quota::Turn;
use super::{Index, ServiceEntry};
use crate::convert::{MAX_ISSUES_PER_OBJECT, SliceEndpoints};
use crate::k8s::Kind;

/// Maximum number of endpoints of one ServicePort that one node uses: the size of the data path's largest class, and
/// above the 10,000 that kplane promises.
const MAX_ENDPOINTS: usize = 16_384;

/// The API server's own Service in any cluster: namespace and name.
pub(super) const API_SERVICE: (&str, &str) = ("default", "kubernetes");

/// Issues of a Service with other Services; costs nothing while there are none.
pub(super) struct Issues<'a> {
    service: &'a ServiceName,
    location: &'a str,
    list: Vec<Issue>,
    omitted: usize,
}

impl<'a> Issues<'a> {
    fn new(service: &'a ServiceName, location: &'a str) -> Self {
        Self {
            service,
            location,
            list: Vec::new(),
            omitted: 0,
        }
    }

    fn add(&mut self, severity: Severity, code: Reason, reason: impl FnOnce() -> String) {
        if self.list.len() == MAX_ISSUES_PER_OBJECT {
            self.omitted += 1;
            return;
        }
        self.list.push(Issue {
            severity,
            code,
            location: self.location.to_owned(),
            object: ObjectRef::new(
                Kind::Service.as_str(),
                &self.service.namespace,
                &self.service.name,
            ),
            reason: reason(),
        });
    }

    fn finish(mut self) -> Vec<Issue> {
        if self.omitted > 0 {
            let omitted = std::mem::take(&mut self.omitted);
            self.list.pop();
            self.add(Severity::Error, Reason::MoreProblems, || {
                format!(
                    "has {} further problems that are not listed; fix the listed ones first",
                    omitted + 1
                )
            });
        }
        self.list
    }
}

/// A Service as it is served.
#[derive(Debug, Default)]
pub(super) struct Effective {
    /// Each port that is served, with all its endpoints, sorted.
    pub(super) ports: Vec<(ServicePort, Vec<Endpoint>)>,
    /// Most endpoints of a port that one node uses.
    pub(super) most: usize,
    /// Issues of the Service with other Services.
    pub(super) issues: Vec<Issue>,
}

impl Index {
    /// Computes the served part of a Service. The work is proportional to the Service's own ports, addresses and
    /// endpoints.
    pub(super) fn effective(&self, name: &ServiceName) -> Effective {
        let Some(entry) = self.services.get(name) else {
            return Effective::default();
        };
        let mut issues = Issues::new(name, &entry.location);
        if let Some(refusal) = self.quota.refusal(name) {
            issues.add(Severity::Error, Reason::QuotaExceeded, || refusal);
            return Effective {
                issues: issues.finish(),
                ..Effective::default()
            };
        }
        self.warn_of_external_ips(entry, &mut issues);
        let ports: Vec<_> = entry
            .ports
            .iter()
            .filter_map(|port| self.effective_port(port, &mut issues))
            .collect();
        let mut size = ServiceSize::default();
        ports.iter().for_each(|port| size.add(port, MAX_ENDPOINTS));
        let with_endpoints = |port| {
            let endpoints = self.endpoints(&port);
            (port, endpoints)
        };
        let mut ports: Vec<_> = ports.into_iter().map(with_endpoints).collect();
        warn_of_sample(&ports, &size, &mut issues);
        if let Some(refusal) = self.refuse_proxy(&mut ports) {
            issues.add(Severity::Warning, Reason::ProxyRefused, || refusal);
        }
        Effective {
            ports,
            most: size.allowance().endpoints,
            issues: issues.finish(),
        }
    }

    /// Returns the Services that changed, and those that want a place which has another owner through that.
    pub(super) fn contested(&mut self) -> BTreeSet<ServiceName> {
        let mut names = std::mem::take(&mut self.pending.services);
        let mut moved = BTreeSet::new();
        for name in &names {
            if let Some(entry) = self.services.get(name) {
                let seniority = entry.seniority();
                moved.extend(self.claims.replace(name, &seniority, &entry.ports));
                self.note_size(name);
            }
        }
        names.extend(moved.iter().flat_map(|claim| self.claims.wanting(claim)).cloned());
        names.extend(self.quota.settle());
        names
    }

    /// Records the size of a Service for its namespace's quota. The API server's own Service is exempt.
    pub(super) fn note_size(&mut self, name: &ServiceName) {
        if !self.quota.is_on() || (&*name.namespace, &*name.name) == API_SERVICE {
            return;
        }
        let entry = self.services.get(name);
        let asks = entry.filter(|entry| !entry.ports.is_empty()).map(|entry| {
            let mut size = ServiceSize::default();
            entry.ports.iter().for_each(|port| size.add(port, self.listed_endpoints(port)));
            (Turn::new(name, entry.seniority()), size)
        });
        self.quota.replace(name, asks);
    }

    /// Returns a port without the places that it does not get; `None` without its ClusterIP.
    fn effective_port(&self, port: &ServicePort, issues: &mut Issues<'_>) -> Option<ServicePort> {
        let mut gets = |claim: Claim, consequence: &dyn Fn() -> String| {
            if let Some(holder) = self.holder(&port.key.service, &claim) {
                issues.add(Severity::Error, Reason::AddressReserved, || {
                    format!(
                        "{claim} is where {holder}, and a Service there would take over its \
                         connections: {}; use another port or another address",
                        consequence()
                    )
                });
                return false;
            }
            match self.claims.owner(&claim) {
                Some(owner) if *owner != port.key => {
                    issues.add(Severity::Error, Reason::AddressConflict, || {
                        let consequence = consequence();
                        format!("{claim} belongs to {owner}: {consequence}; change one of the two Services")
                    });
                    false
                }
                _ => true,
            }
        };
        let not_served = || format!("{} is not served", port.key);
        if !gets(address_claim(port, port.cluster_ip), &not_served) {
            return None;
        }
        let not_here = || "this Service is not served there".to_owned();
        let mut fitting = |ips: &[IpAddr]| -> Vec<IpAddr> {
            ips.iter()
                .copied()
                .filter(|ip| gets(address_claim(port, *ip), &not_here))
                .collect()
        };
        let external_ips = fitting(&port.external_ips);
        let load_balancer_ips = fitting(&port.load_balancer_ips);
        let node_port =
            port.node_port.filter(|number| gets(node_port_claim(port, *number), &not_here));
        Some(ServicePort {
            external_ips,
            load_balancer_ips,
            node_port,
            ..port.clone()
        })
    }

    /// Returns the program that listens at a place and so keeps the Service from getting it.
    fn holder(&self, service: &ServiceName, claim: &Claim) -> Option<Holder> {
        let holder = match *claim {
            Claim::Address { ip, protocol, port } => self.address_claims.holder(ip, protocol, port),
            Claim::NodePort { protocol, port, .. } => {
                self.address_claims.node_port_holder(protocol, port)
            }
        };
        let api_service = (&*service.namespace, &*service.name) == API_SERVICE;
        holder.filter(|holder| !(api_service && *holder == Holder::ApiServer))
    }

    /// Warns of external addresses that nodes have, and of those within the cluster's own ranges. They are served, as in
    /// kube-proxy, but may take connections away from a node or a pod, or go to another Service.
    fn warn_of_external_ips(&self, entry: &ServiceEntry, issues: &mut Issues<'_>) {
        let Some(port) = entry.ports.first() else {
            return;
        };
        // All ports of a family have the same addresses, and the ports are grouped by family.
        let is_other = |other: &&ServicePort| other.key.family != port.key.family;
        let both = [Some(port), entry.ports.iter().find(is_other)];
        let external: Vec<IpAddr> = both
            .into_iter()
            .flatten()
            .flat_map(|port| port.external_ips.iter().chain(&port.load_balancer_ips))
            .copied()
            .collect();
        self.warn_of_nodes(&external, issues);
        self.warn_of_ranges(&external, issues);
    }

    fn warn_of_nodes(&self, external: &[IpAddr], issues: &mut Issues<'_>) {
        let mut of_nodes = external.iter().filter(|ip| self.address_claims.is_of_a_node(**ip));
        if let Some(ip) = of_nodes.next() {
            let more = match of_nodes.count() {
                0 => String::new(),
                more => format!(", and {more} more are those of nodes"),
            };
            issues.add(Severity::Warning, Reason::NodeAddress, || {
                format!(
                    "external address {ip} is that of a node{more}: connections to programs of the node on the \
                     Service's ports reach the Service instead; use an address that no machine has"
                )
            });
        }
    }

    fn warn_of_ranges(&self, external: &[IpAddr], issues: &mut Issues<'_>) {
        for ip in external {
            if let Some(range) = self.address_claims.pod_range(*ip) {
                issues.add(Severity::Warning, Reason::InsideClusterRange, || {
                    format!(
                        "external address {ip} is in the pod range {range} of a node: connections to a pod with this \
                         address would reach this Service instead; use an address outside of the cluster's own ranges"
                    )
                });
            }
            if let Some(range) = self.service_range(*ip) {
                issues.add(Severity::Warning, Reason::InsideClusterRange, || {
                    format!(
                        "external address {ip} is in the range {range} of ClusterIPs: a Service that gets it as its \
                         ClusterIP takes it over; use an address outside of the cluster's own ranges"
                    )
                });
            }
        }
    }

    /// Returns the range of ClusterIPs that contains an address.
    pub(super) fn service_range(&self, ip: IpAddr) -> Option<Cidr> {
        self.cidrs.values().flatten().copied().find(|range| range.contains(ip))
    }

    /// Returns the endpoints of a port from all its slices (A27, A28).
    fn endpoints(&self, port: &ServicePort) -> Vec<Endpoint> {
        let listed = self.listed(port);
        let mut merged = merge(listed.flat_map(|listed| listed.endpoints.iter().cloned()));
        self.mark_suspected(&mut merged);
        self.mark_terminating(&port.key.service, &mut merged);
        merged
    }

    /// Returns how many endpoints the slices list for a port, duplicates included.
    fn listed_endpoints(&self, port: &ServicePort) -> usize {
        self.listed(port).map(|listed| listed.endpoints.len()).sum()
    }

    /// Returns the entries of all slices for a port.
    pub(super) fn listed(&self, port: &ServicePort) -> impl Iterator<Item = &SliceEndpoints> {
        let key = &port.key;
        self.listed_of(&key.service).filter(move |p| {
            p.family == key.family && p.protocol == key.protocol && p.port_name == key.port_name
        })
    }

    /// Returns the entries of all slices of a Service.
    pub(super) fn listed_of(&self, service: &ServiceName) -> impl Iterator<Item = &SliceEndpoints> {
        self.slices_of
            .get(service)
            .into_iter()
            .flatten()
            .filter_map(|id| self.slices.get(id))
            .flat_map(|slice| &slice.ports)
    }
}

/// Warns if nodes use a sample of the endpoints: every address is served, and no endpoint is more likely to be left out
/// than another.
fn warn_of_sample(
    ports: &[(ServicePort, Vec<Endpoint>)],
    size: &ServiceSize,
    issues: &mut Issues<'_>,
) {
    let count = |(_, endpoints): &(_, Vec<Endpoint>)| {
        let ready = endpoints.iter().filter(|endpoint| endpoint.ready).count();
        let draining = || endpoints.iter().filter(|endpoint| endpoint.is_draining()).count();
        if ready > 0 { ready } else { draining() }
    };
    let all = ports.iter().map(count).max().unwrap_or_default();
    let most = size.allowance().endpoints;
    if all > most {
        issues.add(Severity::Warning, Reason::TooLarge, || {
            format!(
                "{all} endpoints on {} ports with {} addresses each exceed the limits of one Service \
                 ({MAX_ENDPOINTS} endpoints, {MAX_SERVICE_ELEMENTS} elements): nodes that may choose among all \
                 endpoints of a port use the same sample of {most} from all nodes and zones. Endpoints on the node \
                 itself, or hinted for it, have lists of their own. Split the Service to use all",
                size.ports,
                1 + size.load_balancer_ips + size.external_ips,
            )
        });
    }
}
