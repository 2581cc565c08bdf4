//! The objects in the manifests: nodes, Services with their endpoints, and the pods behind them.
//! They are read with the product's own conversions, so that both use the same objects.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use kplane_desired_state::convert::{self, SkipReason};
use kplane_desired_state::k8s;
use kplane_model::{
    Cidr, Endpoint, Family, KeyParts, NodeFacts, Protocol, ServiceKey, ServiceName,
};
use kplane_model::{ServicePort, parse_ip, select};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::manifests::Manifests;

/// Everything in the manifests that the demo needs.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    /// The nodes, by name.
    pub(crate) nodes: Vec<NodeFacts>,
    /// Ranges of ClusterIPs.
    pub(crate) service_cidrs: Vec<Cidr>,
    /// The Services, by namespace and name.
    pub(crate) services: Vec<Service>,
    /// The pods: everything that has an endpoint's address.
    pub(crate) pods: Vec<PodSpec>,
}

#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) name: ServiceName,
    /// Its type.
    pub(crate) kind: String,
    /// The reason why the Service is not proxied.
    pub(crate) skipped: Option<SkipReason>,
    /// Its ports, separately for each family.
    pub(crate) ports: Vec<Arc<Port>>,
}

/// One port of a Service in one family.
#[derive(Debug)]
pub(crate) struct Port {
    /// The addresses and rules of the port.
    pub(crate) port: ServicePort,
    /// All endpoints, usable or not.
    pub(crate) endpoints: Vec<Endpoint>,
}

/// A pod that must exist.
#[derive(Clone, Debug, Default)]
pub(crate) struct PodSpec {
    /// Its namespace and name.
    pub(crate) name: String,
    /// Its node, if that is known.
    pub(crate) node: Option<String>,
    pub(crate) ips: BTreeSet<IpAddr>,
    /// The ports on which the pod answers.
    pub(crate) listens: BTreeSet<(Protocol, u16)>,
}

impl Objects {
    /// Reads all objects, except those of families that this machine does not have.
    pub(crate) fn read(manifests: &Manifests, families: &[Family]) -> Result<Self> {
        let is_of = |kind| move |value: &&Value| value["kind"] == kind;
        let of_kind = |kind: &'static str| manifests.objects().filter(is_of(kind));
        let has = |cidr: &Cidr| families.contains(&cidr.family());
        let mut objects = Self::default();
        for value in of_kind("Node") {
            let (mut node, _) = convert::node(&typed::<k8s::Node>(value)?, "");
            // Others, such as those that a cloud translates for the node, are not on its links.
            let own = families.iter().filter_map(|f| node.primary_address(*f));
            node.addresses = own.collect();
            node.pod_cidrs.retain(has);
            objects.nodes.push(node);
        }
        for value in of_kind("ServiceCIDR") {
            let (cidrs, _) = convert::service_cidr(&typed(value)?, "");
            let cidrs = cidrs.into_iter().filter(has);
            objects.service_cidrs.extend(cidrs);
        }
        let mut endpoints = BTreeMap::<ServiceKey, Vec<Endpoint>>::new();
        for value in of_kind("EndpointSlice") {
            let slice = convert::slice(&typed(value)?, "");
            for port in slice.ports {
                let Some(service) = slice.service.clone() else {
                    continue;
                };
                let key = ServiceKey::from(KeyParts {
                    service,
                    port_name: port.port_name,
                    protocol: port.protocol,
                    family: port.family,
                });
                endpoints.entry(key).or_default().extend(port.endpoints);
            }
        }
        for value in of_kind("Service") {
            let object: k8s::Service = typed(value)?;
            let namespace = object.metadata.namespace_of(k8s::Kind::Service);
            let mut converted = convert::service(&object, "", &convert::ExternalIps::All);
            let has_family = |port: &ServicePort| families.contains(&port.key.family);
            converted.ports.retain(has_family);
            let port = |port: ServicePort| {
                let endpoints = endpoints.get(&port.key).cloned().unwrap_or_default();
                let endpoints = select::merge(endpoints);
                Arc::new(Port { port, endpoints })
            };
            objects.services.push(Service {
                name: ServiceName::new(&namespace, &object.metadata.name),
                kind: object.spec.type_.unwrap_or_else(|| "ClusterIP".to_owned()),
                skipped: converted.skipped,
                ports: converted.ports.into_iter().map(port).collect(),
            });
        }
        objects.nodes.sort_by(|a, b| a.name.cmp(&b.name));
        objects.services.sort_by(|a, b| a.name.cmp(&b.name));
        objects.pods = pods(of_kind("EndpointSlice"), families);
        Ok(objects)
    }

    /// Returns the ports of all Services.
    pub(crate) fn ports(&self) -> impl Iterator<Item = &ServicePort> {
        self.services.iter().flat_map(|service| &service.ports).map(|port| &port.port)
    }

    pub(crate) fn node(&self, name: &str) -> Result<&NodeFacts> {
        self.nodes
            .iter()
            .find(|node| *node.name == *name)
            .with_context(|| format!("no Node {name}"))
    }

    pub(crate) fn service(&self, name: &ServiceName) -> Result<&Service> {
        self.services
            .iter()
            .find(|service| service.name == *name)
            .with_context(|| format!("no Service {name}"))
    }

    /// Returns the pod with an address.
    pub(crate) fn pod(&self, ip: IpAddr) -> Option<&PodSpec> {
        self.pods.iter().find(|pod| pod.ips.contains(&ip))
    }

    /// Returns the name of the pod with an address, without its namespace.
    pub(crate) fn pod_name(&self, ip: IpAddr) -> String {
        self.pod(ip).map_or(ip.to_string(), |pod| short(&pod.name).to_owned())
    }
}

/// Returns a pod's name without its namespace.
pub(crate) fn short(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

fn typed<T: DeserializeOwned>(value: &Value) -> Result<T> {
    let name = || format!("{} {}", value["kind"], value["metadata"]["name"]);
    serde_json::from_value(value.clone()).with_context(name)
}

/// Returns the pods behind all endpoints: one for each name of a pod, or else for each address.
fn pods<'a>(slices: impl Iterator<Item = &'a Value>, families: &[Family]) -> Vec<PodSpec> {
    // A pod and its address may stand in several slices, and not all of them name the pod.
    let mut by_ip = BTreeMap::<IpAddr, PodSpec>::new();
    for slice in slices {
        let namespace = slice["metadata"]["namespace"].as_str().unwrap_or("default");
        let service = slice["metadata"]["labels"][k8s::SERVICE_NAME_LABEL].as_str();
        for endpoint in slice["endpoints"].as_array().into_iter().flatten() {
            // An address that is none is an FQDN, which no proxy serves.
            let ip = endpoint["addresses"][0].as_str().map(parse_ip).and_then(Result::ok);
            let Some(ip) = ip.filter(|ip| families.contains(&Family::of(*ip))) else {
                continue;
            };
            let pod = by_ip.entry(ip).or_default();
            pod.ips.insert(ip);
            if let Some(name) = endpoint["targetRef"]["name"].as_str() {
                pod.name = format!("{namespace}/{name}");
            } else if pod.name.is_empty() {
                pod.name = format!("{namespace}/{}-{ip}", service.unwrap_or("endpoint"));
            }
            let node = endpoint["nodeName"].as_str().map(str::to_owned);
            pod.node = pod.node.take().or(node);
            // Unset conditions are true (A27).
            let is = |name: &str| endpoint["conditions"][name].as_bool().unwrap_or(true);
            if is("ready") || is("serving") {
                pod.listens.extend(ports(slice));
            }
        }
    }
    let mut by_name = BTreeMap::<String, PodSpec>::new();
    for pod in by_ip.into_values() {
        let known = by_name.entry(pod.name.clone()).or_default();
        known.ips.extend(&pod.ips);
        known.listens.extend(&pod.listens);
        (known.name, known.node) = (pod.name, pod.node);
    }
    by_name.into_values().collect()
}

fn ports(slice: &Value) -> impl Iterator<Item = (Protocol, u16)> {
    slice["ports"].as_array().into_iter().flatten().filter_map(|port| {
        let protocol = port["protocol"].as_str().unwrap_or("TCP").parse().ok()?;
        let number = u16::try_from(port["port"].as_u64()?).ok()?;
        Some((protocol, number))
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Nothing that is missing here is ever called, and no check fails for it.
    #[test]
    fn all_objects_are_read() {
        for (path, sizes) in [
            ("deploy/demo", [3, 8, 0, 27]),
            ("tests/data/cluster-dump.yaml", [6, 22, 2, 51]),
        ] {
            let temp = tempfile::tempdir().unwrap();
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
            let manifests = Manifests::copy(&path, temp.path().join("copy")).unwrap();
            let read = Objects::read(&manifests, &Family::ALL).unwrap();
            let skipped = read.services.iter().filter(|s| s.skipped.is_some()).count();
            let (nodes, services) = (read.nodes.len(), read.services.len());
            let found = [nodes, services, skipped, read.pods.len()];
            assert_eq!(found, sizes, "{}", path.display());
        }
    }
}
