//! The endpoints of a Pod that is about to end, and whether new connections are led to them.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::select::{Lead, lead};
use kplane_model::{Endpoint, EndpointAddr, ServiceName};

use super::{Index, SliceEntry};

/// The endpoints of one Pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodEndpoints {
    /// Namespace and name of the Pod, if a slice names it.
    pub pod: Option<(Arc<str>, Arc<str>)>,
    /// Its addresses.
    pub addresses: BTreeSet<IpAddr>,
    /// Its Services.
    pub services: BTreeSet<ServiceName>,
    /// The only port that counts; 0 = all.
    pub port: u16,
}

impl PodEndpoints {
    /// Returns whether an endpoint is the Pod's.
    fn has(&self, at: EndpointAddr) -> bool {
        self.addresses.contains(&at.ip) && (self.port == 0 || self.port == at.port)
    }
}

impl Index {
    /// Returns the endpoints on a node at one of these addresses, with those of the same Pod in the other family. Work: all
    /// addresses of all slices.
    pub fn pod_at(&self, node: &str, addresses: &[IpAddr], port: u16) -> PodEndpoints {
        let mut found = PodEndpoints {
            addresses: addresses.iter().copied().collect(),
            port,
            ..PodEndpoints::default()
        };
        let is_on_node = |e: &Endpoint| e.node.as_deref().is_none_or(|name| name == node);
        for (slice, endpoint) in self.slice_endpoints(port) {
            if found.has(endpoint.addr) && is_on_node(endpoint) {
                found.services.insert(slice.service.clone());
                let named = endpoint.pod.clone().filter(|name| !name.is_empty());
                let pod = named.map(|name| (slice.service.namespace.clone(), name));
                found.pod = found.pod.or(pod);
            }
        }
        if port == 0
            && let Some((namespace, name)) = found.pod.clone()
        {
            for (slice, endpoint) in self.slice_endpoints(port) {
                if slice.service.namespace == namespace
                    && endpoint.pod.as_ref() == Some(&name)
                    && is_on_node(endpoint)
                {
                    found.addresses.insert(endpoint.addr.ip);
                    found.services.insert(slice.service.clone());
                }
            }
        }
        found
    }

    /// Returns the endpoints of all slices: with one of their ports if all ports count.
    fn slice_endpoints(&self, port: u16) -> impl Iterator<Item = (&SliceEntry, &Endpoint)> {
        let most = if port == 0 { 1 } else { usize::MAX };
        self.slices.values().flat_map(move |slice| {
            slice
                .ports
                .iter()
                .take(most)
                .flat_map(|port| &port.endpoints)
                .map(move |endpoint| (slice, endpoint))
        })
    }

    /// Returns whether an EndpointSlice says that a Pod is terminating.
    pub fn is_terminating(&self, pod: &PodEndpoints) -> bool {
        let is_ending = |e: &Endpoint| pod.has(e.addr) && e.terminating;
        pod.services.iter().any(|service| {
            self.effective(service)
                .ports
                .into_iter()
                .flat_map(|(_, endpoints)| endpoints)
                .any(|e| is_ending(&e))
        })
    }

    /// Returns whether no slice names an endpoint of a Service, or there is no such Service.
    pub fn is_without_endpoints(&self, service: &ServiceName) -> bool {
        self.effective(service).ports.iter().all(|(_, endpoints)| endpoints.is_empty())
    }

    /// Returns why the rules of some node lead new connections for a Service to a Pod; `None` if no node's do.
    pub fn lead(&self, service: &ServiceName, pod: &PodEndpoints) -> Option<Lead> {
        self.effective(service)
            .ports
            .into_iter()
            .filter_map(|(port, endpoints)| lead(&port, &endpoints, |at| pod.has(at)))
            .max()
    }
}
