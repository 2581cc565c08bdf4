//! Human-readable views of the mirror: Kubernetes objects, as far as published objects contain them.

use std::collections::BTreeMap;

use kplane_model::{
    DesiredObject, Endpoint, EndpointAddr, LocalEndpoint, NodeName, ServiceKey, ServiceName,
    ServiceProgram,
};
use kplane_proto::convert::decode_object;
use prost::bytes::Bytes;

use super::Mirror;
use crate::index::{Page, PortView, Selection, ServiceDetail};
use crate::publish::{Layers, Store};

impl Mirror {
    /// Returns a page of the ServicePorts that a selection wants, sorted by key.
    #[must_use]
    pub fn ports(&self, store: &Store, selection: &Selection) -> Page {
        let read = |key| port(store, key);
        match &selection.among {
            Some(among) => {
                let services = among.iter().filter(|service| selection.wants(service));
                let keys = services.flat_map(|service| self.book.ports_of(service));
                selection.page(keys.filter_map(read))
            }
            None => {
                let keys = self.book.keys();
                let keys = keys.filter(|key| selection.wants(&key.service));
                selection.page(keys.filter_map(read))
            }
        }
    }

    /// Returns one Service, if it is known.
    #[must_use]
    pub fn detail(&self, store: &Store, name: &ServiceName) -> Option<ServiceDetail> {
        let ports = self.book.ports_of(name);
        self.book.contains(name).then(|| ServiceDetail {
            ports: ports.filter_map(|key| port(store, key)).collect(),
            issues: Vec::new(),
            facts: None,
        })
    }
}

fn port(store: &Store, key: &ServiceKey) -> Option<PortView> {
    let layers = store.layers(key)?;
    let default = program(layers.default.clone())?;
    Some(PortView {
        endpoints: endpoints(&layers, &default),
        port: default.port,
    })
}

fn program(bytes: Bytes) -> Option<ServiceProgram> {
    match decode_object(bytes) {
        Ok(Some(DesiredObject::Service(program))) => Some(program),
        _ => None,
    }
}

fn locals(bytes: Bytes) -> Vec<LocalEndpoint> {
    match decode_object(bytes) {
        Ok(Some(DesiredObject::Local(local))) => local.endpoints,
        _ => Vec::new(),
    }
}

/// Returns the endpoints that some node has, with the hints that lead to what zones and nodes have.
fn endpoints(layers: &Layers, default: &ServiceProgram) -> Vec<Endpoint> {
    let mut endpoints = BTreeMap::new();
    for addr in &default.endpoints {
        endpoints.insert(*addr, Endpoint::ready(*addr));
    }
    for addr in &default.serving_others {
        let endpoint = endpoints.entry(*addr);
        endpoint.or_insert_with(|| draining(*addr));
    }
    for (node, bytes) in &layers.local {
        for local in locals(bytes.clone()) {
            let new = || Endpoint::ready(local.addr);
            let endpoint = endpoints.entry(local.addr).or_insert_with(new);
            endpoint.node = Some(node.clone());
            if !local.ready {
                *endpoint = Endpoint {
                    node: endpoint.node.take(),
                    ..draining(local.addr)
                };
            }
        }
    }
    hint(&mut endpoints, &layers.by_zone, |endpoint, zone| {
        endpoint.zone_hints.push(zone);
    });
    hint(&mut endpoints, &layers.by_node, |endpoint, node| {
        endpoint.node_hints.push(node);
    });
    endpoints.into_values().collect()
}

fn draining(addr: EndpointAddr) -> Endpoint {
    Endpoint {
        ready: false,
        terminating: true,
        ..Endpoint::ready(addr)
    }
}

fn hint(
    endpoints: &mut BTreeMap<EndpointAddr, Endpoint>,
    variants: &[(NodeName, Bytes)],
    add: impl Fn(&mut Endpoint, NodeName),
) {
    for (name, bytes) in variants {
        let program = program(bytes.clone());
        for addr in program.into_iter().flat_map(|program| program.endpoints) {
            let new = || Endpoint::ready(addr);
            add(endpoints.entry(addr).or_insert_with(new), name.clone());
        }
    }
}
