//! The Services that get the agents' userspace proxy. It connects with the rights of the node, whose packets filters let
//! through that hold for Pods: so the operator says who may ask, and endpoints must be Pods.

use kplane_model::{Endpoint, Protocol, ProxyEndpoints, ProxyNamespaces, ServiceName, ServicePort};

use super::Index;
use super::claims::{Claim, node_port_claim};

impl Index {
    /// Returns the Services that ask for the proxy.
    pub(super) fn asking_for_proxy(&self) -> Vec<ServiceName> {
        if self.proxying.services == ProxyNamespaces::None {
            return Vec::new();
        }
        self.services
            .iter()
            .filter(|(name, entry)| {
                let asks = entry.ports.iter().any(|port| port.proxied.is_some());
                asks && self.proxying.services.allow(&name.namespace)
            })
            .map(|(name, _)| name.clone())
            .collect()
    }

    /// Leaves a Service to the kernel that asks for the proxy and must not have it. Returns why.
    pub(super) fn refuse_proxy(
        &self,
        ports: &mut [(ServicePort, Vec<Endpoint>)],
    ) -> Option<String> {
        let mut asking = ports.iter().filter(|(port, _)| port.proxied.is_some());
        let refusal = asking.find_map(|(port, endpoints)| self.proxy_refusal(port, endpoints))?;
        ports.iter_mut().for_each(|(port, _)| port.proxied = None);
        Some(format!(
            "asks for the userspace proxy, but {refusal}: the kernel serves it instead"
        ))
    }

    fn proxy_refusal(&self, port: &ServicePort, endpoints: &[Endpoint]) -> Option<String> {
        let namespace = &port.key.service.namespace;
        if !self.proxying.services.allow(namespace) {
            return Some(format!(
                "the operator lets no Service of namespace {namespace} ask (--userspace-services of the control plane)"
            ));
        }
        if self.policies.is_some() {
            // The other end would see the node in place of the Pod.
            return Some("NetworkPolicies cannot judge what it relays".to_owned());
        }
        endpoints.iter().find_map(|endpoint| {
            let why = self.endpoint_refusal(port, endpoint)?;
            Some(format!("its endpoint {} {why}", endpoint.addr))
        })
    }

    /// Returns why the proxy must not connect to an endpoint.
    fn endpoint_refusal(&self, port: &ServicePort, endpoint: &Endpoint) -> Option<String> {
        let (ip, protocol) = (endpoint.addr.ip, port.key.protocol);
        if let Some(owner) = self.owner_of(port, endpoint, protocol) {
            // Nodes would pass one connection on to each other for ever.
            return Some(format!(
                "is a place of {owner}: name the Pods behind it instead"
            ));
        }
        let allowed = &self.proxying.endpoints;
        if *allowed == ProxyEndpoints::Any {
            return None;
        }
        let why = if self.address_claims.is_of_a_node(ip) {
            "is a node's address"
        } else if endpoint.pod.is_none() {
            "is not a Pod of its namespace (targetRef)"
        } else if !allowed.contain(ip) {
            "is not in the ranges of --userspace-endpoints"
        } else if *allowed == ProxyEndpoints::Pods && self.address_claims.pod_range(ip).is_none() {
            "is in no Node's pod range (set --userspace-endpoints to the ranges of Pods if Nodes do not name them)"
        } else {
            return None;
        };
        Some(why.to_owned())
    }

    /// Returns the ServicePort whose connections arrive where an endpoint is.
    fn owner_of(
        &self,
        port: &ServicePort,
        endpoint: &Endpoint,
        protocol: Protocol,
    ) -> Option<String> {
        let (ip, number) = (endpoint.addr.ip, endpoint.addr.port);
        let address = Claim::Address {
            ip,
            protocol,
            port: number,
        };
        let at_node = || {
            let claim = node_port_claim(port, number);
            self.address_claims.is_of_a_node(ip).then(|| self.claims.owner(&claim))?
        };
        let owner = self.claims.owner(&address).or_else(at_node)?;
        Some(owner.to_string())
    }
}
