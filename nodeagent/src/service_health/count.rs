//! Derives the targets of health check servers from the desired state. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use kplane_model::{Family, ServiceKey, ServiceName};

use crate::desired::{Desired, View};

/// The target state of one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// The port on which the server listens: `healthCheckNodePort`.
    pub(crate) port: u16,
    /// The number of distinct addresses of ready endpoints on the node, over all ports of the
    /// Service (A25).
    pub(crate) local_endpoints: u32,
    /// The first port of the Service, under which a failure is reported.
    pub(crate) key: ServiceKey,
}

/// Returns the target of one Service's server; `None` when the Service has none. Work: the
/// Service's ports and its endpoints on the node.
pub(crate) fn target(desired: &Desired, service: &ServiceName, family: Family) -> Option<Target> {
    let ports = desired.ports_of(service);
    merge(ports.filter(|(program, _)| program.port.key.family == family))
}

/// Returns the targets of all servers of a family.
pub(crate) fn all_targets(desired: &Desired, family: Family) -> BTreeMap<ServiceName, Target> {
    let mut ports = desired.services(family).peekable();
    let mut targets = BTreeMap::new();
    while let Some(first) = ports.next() {
        // Ports of one Service are adjacent. Most Services have no server and cost nothing here.
        if first.0.port.health_check_node_port.is_none() {
            continue;
        }
        let service = first.0.port.key.service.clone();
        let more = std::iter::from_fn(|| {
            ports.next_if(|(program, _)| program.port.key.service == service)
        });
        let target = merge(std::iter::once(first).chain(more));
        targets.extend(target.map(|target| (service.clone(), target)));
    }
    targets
}

fn merge<'a>(ports: impl Iterator<Item = View<'a>>) -> Option<Target> {
    let mut found: Option<(u16, ServiceKey)> = None;
    let mut ready = BTreeSet::<IpAddr>::new();
    for (program, local) in ports {
        let Some(port) = program.port.health_check_node_port else {
            continue;
        };
        found.get_or_insert_with(|| (port, program.port.key.clone()));
        let endpoints = local.iter().flat_map(|local| &local.endpoints);
        ready.extend(endpoints.filter(|e| e.ready).map(|e| e.addr.ip));
    }
    let (port, key) = found?;
    Some(Target {
        port,
        local_endpoints: u32::try_from(ready.len()).unwrap_or(u32::MAX),
        key,
    })
}
