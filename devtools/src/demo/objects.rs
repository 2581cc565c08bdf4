//! The objects in the manifests: nodes, Services with their endpoints, and the pods behind them.
//! They are read with the product's own conversions, so that both use the same objects.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::{Context as _, Result};
use kp_controlplane::convert::{self, SkipReason};
use kp_controlplane::k8s;
use kplane_model::{
    Cidr, Endpoint, Family, NodeFacts, Protocol, ServiceKey, ServiceName, ServicePort, parse_ip,
    select,
};
use serde::de::DeserializeOwned;
use serde_json::Value;

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

/// A Service.
#[derive(Debug)]
pub(crate) struct Service {
    /// Its name.
    pub(crate) name: ServiceName,
    /// Its type.
    pub(crate) kind: String,
    /// The reason why the Service is not proxied.
    pub(crate) skipped: Option<SkipReason>,
    /// Its ports, separately for each family.
    pub(crate) ports: Vec<Port>,
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PodSpec {
    /// The name; unique.
    pub(crate) name: String,
    /// Its node, if that is known.
    pub(crate) node: Option<String>,
    /// Its addresses.
    pub(crate) ips: BTreeSet<IpAddr>,
    /// The ports on which the pod answers.
    pub(crate) listens: BTreeSet<(Protocol, u16)>,
}

impl Objects {
    /// Reads all objects, except those of families that this machine does not have.
    pub(crate) fn read<'a>(
        values: impl Iterator<Item = &'a Value> + Clone,
        families: &[Family],
    ) -> Result<Self> {
        let has = |ip: &IpAddr| families.contains(&Family::of(*ip));
        let mut objects = Self::default();
        let mut slices = Vec::new();
        for value in values.clone() {
            match value["kind"].as_str().unwrap_or_default() {
                "Node" => {
                    let (mut node, _) = convert::node(&typed::<k8s::Node>(value)?, "");
                    node.addresses = primary(&node, families);
                    node.pod_cidrs.retain(|cidr| has(&cidr.first()));
                    objects.nodes.push(node);
                }
                "ServiceCIDR" => {
                    let (cidrs, _) = convert::service_cidr(&typed(value)?, "");
                    objects
                        .service_cidrs
                        .extend(cidrs.iter().filter(|cidr| has(&cidr.first())));
                }
                "EndpointSlice" => slices.push(value),
                _ => {}
            }
        }
        let endpoints = endpoints(&slices)?;
        for value in values.filter(|value| value["kind"] == "Service") {
            let mut service = service(value, &endpoints)?;
            service
                .ports
                .retain(|port| families.contains(&port.port.key.family));
            objects.services.push(service);
        }
        objects.nodes.sort_by(|a, b| a.name.cmp(&b.name));
        objects.services.sort_by(|a, b| a.name.cmp(&b.name));
        objects.pods = Pods::of(&slices)?;
        objects.pods.iter_mut().for_each(|pod| pod.ips.retain(has));
        objects.pods.retain(|pod| !pod.ips.is_empty());
        Ok(objects)
    }

    /// Returns a Service.
    pub(crate) fn service(&self, name: &ServiceName) -> Result<&Service> {
        let found = self.services.iter().find(|service| service.name == *name);
        found.with_context(|| format!("no Service {name}"))
    }
}

/// Returns a node's own address in each family. Other addresses, such as those that a cloud
/// translates for the node, are not on its links.
fn primary(node: &NodeFacts, families: &[Family]) -> Vec<IpAddr> {
    let families = families.iter();
    families
        .filter_map(|family| node.primary_address(*family))
        .collect()
}

/// Returns the joined endpoints of all slices by ServicePort.
fn endpoints(slices: &[&Value]) -> Result<BTreeMap<ServiceKey, Vec<Endpoint>>> {
    let mut all = BTreeMap::<ServiceKey, Vec<Endpoint>>::new();
    for value in slices {
        let slice = convert::slice(&typed(value)?, "");
        let Some(service) = slice.service else {
            continue;
        };
        for port in slice.ports {
            let key = ServiceKey {
                service: service.clone(),
                port_name: port.port_name,
                protocol: port.protocol,
                family: port.family,
            };
            all.entry(key).or_default().extend(port.endpoints);
        }
    }
    for endpoints in all.values_mut() {
        *endpoints = select::merge(std::mem::take(endpoints));
    }
    Ok(all)
}

fn service(value: &Value, endpoints: &BTreeMap<ServiceKey, Vec<Endpoint>>) -> Result<Service> {
    let object: k8s::Service = typed(value)?;
    let namespace = object.metadata.namespace_of(k8s::Kind::Service);
    let converted = convert::service(&object, "", &convert::ExternalIps::All);
    let ports = converted.ports.into_iter().map(|port| Port {
        endpoints: endpoints.get(&port.key).cloned().unwrap_or_default(),
        port,
    });
    Ok(Service {
        name: ServiceName::new(&namespace, &object.metadata.name),
        kind: object.spec.type_.unwrap_or_else(|| "ClusterIP".to_owned()),
        skipped: converted.skipped,
        ports: ports.collect(),
    })
}

fn typed<T: DeserializeOwned>(value: &Value) -> Result<T> {
    let name = || format!("{} {}", value["kind"], value["metadata"]["name"]);
    serde_json::from_value(value.clone()).with_context(name)
}

/// Groups endpoints into pods, by the pods that they name or else by address.
#[derive(Debug, Default)]
struct Pods {
    pods: Vec<PodSpec>,
    by_name: BTreeMap<String, usize>,
    by_ip: BTreeMap<IpAddr, usize>,
}

impl Pods {
    fn of(slices: &[&Value]) -> Result<Vec<PodSpec>> {
        let mut pods = Self::default();
        for slice in slices {
            for endpoint in slice["endpoints"].as_array().into_iter().flatten() {
                let Some(text) = endpoint["addresses"][0].as_str() else {
                    continue;
                };
                // The address is an FQDN, which no proxy serves.
                let Ok(ip) = parse_ip(text) else {
                    continue;
                };
                pods.add(slice, endpoint, ip);
            }
        }
        pods.pods.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(pods.pods)
    }

    fn add(&mut self, slice: &Value, endpoint: &Value, ip: IpAddr) {
        let name = endpoint["targetRef"]["name"].as_str().map(str::to_owned);
        let name = name.unwrap_or_else(|| {
            let service = slice["metadata"]["labels"][k8s::SERVICE_NAME_LABEL].as_str();
            format!("{}-{ip}", service.unwrap_or("endpoint"))
        });
        let namespace = slice["metadata"]["namespace"].as_str().unwrap_or("default");
        let full = format!("{namespace}/{name}");
        let known = self.by_ip.get(&ip).or_else(|| self.by_name.get(&full));
        let index = known.copied().unwrap_or_else(|| {
            let taken = self.pods.iter().any(|pod| pod.name == name);
            let name = if taken { full.replace('/', ".") } else { name };
            let node = endpoint["nodeName"].as_str().map(str::to_owned);
            self.pods.push(PodSpec {
                name,
                node,
                ..PodSpec::default()
            });
            self.pods.len() - 1
        });
        self.by_name.insert(full, index);
        self.by_ip.insert(ip, index);
        let pod = &mut self.pods[index];
        pod.ips.insert(ip);
        if answers(&endpoint["conditions"]) {
            pod.listens.extend(ports(slice));
        }
    }
}

/// Returns whether an endpoint is ready or serving; an unset condition is true (A27).
fn answers(conditions: &Value) -> bool {
    let is = |name: &str| conditions[name].as_bool().unwrap_or(true);
    is("ready") || is("serving")
}

fn ports(slice: &Value) -> impl Iterator<Item = (Protocol, u16)> {
    let ports = slice["ports"].as_array().into_iter().flatten();
    ports.filter_map(|port| {
        let protocol = port["protocol"].as_str().unwrap_or("TCP").parse().ok()?;
        let number = u16::try_from(port["port"].as_u64()?).ok()?;
        Some((protocol, number))
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::layout::{cluster_cidrs, networks};
    use super::super::manifests::Manifests;
    use super::*;

    fn read(path: &str) -> Objects {
        let temp = tempfile::tempdir().unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
        let manifests = Manifests::copy(&path, temp.path().join("copy")).unwrap();
        Objects::read(manifests.objects(), &Family::ALL).unwrap()
    }

    fn pod<'a>(objects: &'a Objects, name: &str) -> &'a PodSpec {
        objects.pods.iter().find(|pod| pod.name == name).unwrap()
    }

    fn texts(cidrs: &[Cidr]) -> Vec<String> {
        cidrs.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_shop() {
        let shop = read("deploy/demo");
        let sizes = (shop.nodes.len(), shop.services.len(), shop.pods.len());
        assert_eq!(sizes, (3, 8, 27));
        assert_eq!(pod(&shop, "web-1").ips.len(), 2);
        assert!(pod(&shop, "dns-3").listens.is_empty());
        let dns = pod(&shop, "dns-1").listens.iter().copied();
        assert!(dns.eq([(Protocol::Tcp, 5353), (Protocol::Udp, 5353)]));
        let networks = networks(&shop);
        assert_eq!(texts(&networks), ["172.30.0.0/23", "fd30::/111"]);
        let pods = cluster_cidrs(&shop, &networks);
        assert_eq!(texts(&pods), ["10.244.0.0/22", "fd44::/62"]);
    }

    #[test]
    fn a_real_cluster() {
        let dump = read("tests/data/cluster-dump.yaml");
        assert_eq!((dump.nodes.len(), dump.services.len()), (6, 22));
        let skipped = dump.services.iter().filter(|s| s.skipped.is_some());
        assert_eq!(skipped.count(), 2);
        // The API server is not a pod, and has no name.
        let api_server = pod(&dump, "kubernetes-192.168.77.2");
        assert_eq!((&api_server.node, api_server.listens.len()), (&None, 1));
        let any = dump
            .service(&ServiceName::new("shop", "redis-any"))
            .unwrap();
        assert_eq!(any.ports[0].endpoints.len(), 3);
        assert!(
            any.ports[0]
                .endpoints
                .iter()
                .all(|e| e.zone_hints.len() == 1)
        );
    }
}
