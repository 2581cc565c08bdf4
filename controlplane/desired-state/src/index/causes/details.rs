//! What changed in an object, or differs between two states of a Service.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use kplane_model::{Endpoint, EndpointAddr, ServicePort};

use crate::convert::SliceEndpoints;

/// Maximum number of endpoints, and of fields, that are named; the rest is counted.
const NAMED: usize = 16;
/// Maximum length of a field's value, in bytes.
const MAX_VALUE: usize = 200;

/// The state of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointState {
    /// It does not exist.
    Absent,
    /// It takes new connections.
    Ready,
    /// It takes no connections.
    NotReady,
    /// It is about to end, and still serves.
    Draining,
    /// It is about to end, and does not serve.
    Terminating,
}

impl From<&Endpoint> for EndpointState {
    fn from(endpoint: &Endpoint) -> Self {
        match endpoint {
            endpoint if endpoint.ready => Self::Ready,
            endpoint if endpoint.is_draining() => Self::Draining,
            endpoint if endpoint.terminating => Self::Terminating,
            _ => Self::NotReady,
        }
    }
}

/// The change of one endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointChange {
    /// Its address.
    pub addr: EndpointAddr,
    /// Its node.
    pub node: Option<Arc<str>>,
    /// State before.
    pub before: EndpointState,
    /// State afterwards.
    pub after: EndpointState,
}

/// The change of one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldChange {
    /// The field, such as `shop/web:http/TCP (IPv4) nodePort`.
    pub field: String,
    /// Value before; empty = none.
    pub before: String,
    /// Value afterwards; empty = none.
    pub after: String,
}

/// What changed in an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Details {
    /// Endpoints that changed.
    pub endpoints: Vec<EndpointChange>,
    /// Fields that changed.
    pub fields: Vec<FieldChange>,
    /// Number of changes that are not listed.
    pub omitted: u32,
}

impl Details {
    /// Returns whether nothing that kplane uses has changed.
    pub fn is_empty(&self) -> bool {
        self.endpoints.is_empty() && self.fields.is_empty() && self.omitted == 0
    }

    /// Compares the endpoints of a slice.
    pub(in crate::index) fn compare_slices(
        &mut self,
        before: &[SliceEndpoints],
        after: &[SliceEndpoints],
    ) {
        if before == after {
            return;
        }
        let mut left: HashMap<EndpointAddr, &Endpoint> = endpoints(before).collect();
        for (addr, now) in endpoints(after) {
            let was = left.remove(&addr);
            let (state, is) = (was.map_or(EndpointState::Absent, Into::into), now.into());
            if state != is {
                self.endpoint(addr, now, state, is);
            } else if was.is_some_and(|was| was != now) {
                // Hints or the node.
                self.omitted += 1;
            }
        }
        let mut gone: Vec<_> = left.into_iter().collect();
        gone.sort_by_key(|(addr, _)| (addr.ip, addr.port));
        for (addr, was) in gone {
            self.endpoint(addr, was, was.into(), EndpointState::Absent);
        }
    }

    fn endpoint(
        &mut self,
        addr: EndpointAddr,
        endpoint: &Endpoint,
        before: EndpointState,
        after: EndpointState,
    ) {
        if self.endpoints.len() == NAMED {
            self.omitted += 1;
            return;
        }
        self.endpoints.push(EndpointChange {
            addr,
            node: endpoint.node.clone(),
            before,
            after,
        });
    }

    /// Compares the ports of a Service.
    pub fn compare_ports(&mut self, before: &[ServicePort], after: &[ServicePort]) {
        if before == after {
            return;
        }
        for now in after {
            let was = before.iter().find(|was| was.key == now.key);
            if was != Some(now) {
                self.port(was, Some(now));
            }
        }
        for was in before {
            if !after.iter().any(|now| now.key == was.key) {
                self.port(Some(was), None);
            }
        }
    }

    fn port(&mut self, before: Option<&ServicePort>, after: Option<&ServicePort>) {
        let Some(key) = after.or(before).map(|port| &port.key) else {
            return;
        };
        let name = match &*key.port_name {
            "" => format!("{} {}", key.protocol, key.family),
            name => format!("{name} {}", key.family),
        };
        let (Some(before), Some(after)) = (before, after) else {
            let place = |port: Option<&ServicePort>| {
                port.map(|port| SocketAddr::new(port.cluster_ip, port.port).to_string())
            };
            let (before, after) = (place(before), place(after));
            self.field(name, before.unwrap_or_default(), after.unwrap_or_default());
            return;
        };
        for (field, show) in FIELDS {
            let (before, after) = (show(before), show(after));
            if before != after {
                self.field(format!("{name} {field}"), before, after);
            }
        }
    }

    fn field(&mut self, field: String, before: String, after: String) {
        if self.fields.len() == NAMED {
            self.omitted += 1;
            return;
        }
        let cut = |mut value: String| {
            value.truncate(value.floor_char_boundary(MAX_VALUE));
            value
        };
        self.fields.push(FieldChange {
            field,
            before: cut(before),
            after: cut(after),
        });
    }
}

/// Name of a field of a Service, and its value as text.
type Field = (&'static str, fn(&ServicePort) -> String);

const FIELDS: &[Field] = &[
    ("clusterIP", |port| port.cluster_ip.to_string()),
    ("port", |port| port.port.to_string()),
    ("nodePort", |port| optional(port.node_port)),
    ("externalIPs", |port| list(&port.external_ips)),
    ("loadBalancer", |port| list(&port.load_balancer_ips)),
    ("sourceRanges", |port| list(&port.source_ranges)),
    ("internalTrafficPolicy", |port| {
        format!("{:?}", port.internal_policy)
    }),
    ("externalTrafficPolicy", |port| {
        format!("{:?}", port.external_policy)
    }),
    ("sessionAffinitySeconds", |port| {
        optional(port.affinity_timeout_s)
    }),
    ("healthCheckNodePort", |port| {
        optional(port.health_check_node_port)
    }),
];

fn optional(value: Option<impl ToString>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

fn list(values: &[impl ToString]) -> String {
    let values: Vec<String> = values.iter().map(ToString::to_string).collect();
    values.join(",")
}

fn endpoints(ports: &[SliceEndpoints]) -> impl Iterator<Item = (EndpointAddr, &Endpoint)> {
    ports
        .iter()
        .flat_map(|port| &port.endpoints)
        .map(|endpoint| (endpoint.addr, endpoint))
}
