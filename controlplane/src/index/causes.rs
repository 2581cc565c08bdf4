//! The causes of changes: which object changed, and what changed in it. The flight recorder keeps them.
//!
//! The work is proportional to the object that changed, as its conversion is. Nothing is noted before the picture is
//! complete.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

use kplane_model::{Endpoint, EndpointAddr, ServiceName, ServicePort};

use super::holding::service_name;
use super::{Index, Pending, SliceEntry};
use crate::convert::SliceEndpoints;
use crate::k8s::{Kind, ObjectId};
use crate::source::Located;

/// Maximum number of endpoints, and of fields, that a cause names; the rest is counted.
const NAMED: usize = 16;
/// Maximum number of causes of a batch that are kept for each Service.
const CAUSES: usize = 8;
/// Maximum length of a field's value, in bytes.
const MAX_VALUE: usize = 200;

/// What happened to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// The source named it for the first time.
    Added,
    /// It changed.
    Changed,
    /// It is gone.
    Removed,
}

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

/// An object that changed, and what changed in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// The object.
    pub object: ObjectId,
    /// Its `resourceVersion`; 0 = unknown.
    pub version: u64,
    /// Its place, such as `shop.yaml, document 2, line 14`; empty if the source has none.
    pub location: Arc<str>,
    /// What happened to it.
    pub verb: Verb,
    /// Time of the change that led to it, milliseconds since 1970 by the writer's clock; 0 = unknown.
    pub written_ms: u64,
    /// Its endpoints that changed.
    pub endpoints: Vec<EndpointChange>,
    /// Its fields that changed.
    pub fields: Vec<FieldChange>,
    /// Number of changes that are not listed.
    pub omitted: u32,
}

impl Cause {
    /// Creates a cause without details.
    pub(super) fn new(object: ObjectId, version: u64, location: &Arc<str>, verb: Verb) -> Self {
        Self {
            object,
            version,
            location: Arc::clone(location),
            verb,
            written_ms: 0,
            endpoints: Vec::new(),
            fields: Vec::new(),
            omitted: 0,
        }
    }

    /// Returns whether nothing that kplane uses has changed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.endpoints.is_empty() && self.fields.is_empty() && self.omitted == 0
    }

    /// Compares the endpoints of a slice.
    pub(super) fn compare_slices(&mut self, before: &[SliceEndpoints], after: &[SliceEndpoints]) {
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
    pub(super) fn compare_ports(&mut self, before: &[ServicePort], after: &[ServicePort]) {
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
    let all = ports.iter().flat_map(|port| &port.endpoints);
    all.map(|endpoint| (endpoint.addr, endpoint))
}

/// The causes of a batch, by the Service that each concerns; `None` for those that concern more, such as Nodes.
#[derive(Debug, Default)]
pub struct Causes {
    by_service: BTreeMap<Option<ServiceName>, Vec<Arc<Cause>>>,
}

impl Causes {
    /// Adds a cause, unless there are many.
    pub(super) fn add(&mut self, service: Option<ServiceName>, cause: Cause) {
        let causes = self.by_service.entry(service).or_default();
        if causes.len() < CAUSES {
            causes.push(Arc::new(cause));
        }
    }

    /// Returns the causes that are about a Service.
    #[must_use]
    pub fn of(&self, service: &ServiceName) -> &[Arc<Cause>] {
        let key = Some(service.clone());
        self.by_service.get(&key).map_or(&[], Vec::as_slice)
    }

    /// Returns the Services with causes of their own that say what changed.
    pub fn services(&self) -> impl Iterator<Item = &ServiceName> {
        let named = self.by_service.iter();
        let named = named.filter(|(_, causes)| causes.iter().any(|cause| !cause.is_empty()));
        named.filter_map(|(service, _)| service.as_ref())
    }

    /// Returns a few causes that are about other objects.
    pub fn others(&self) -> impl Iterator<Item = &Arc<Cause>> {
        let by = self.by_service.values();
        by.flatten()
    }
}

impl Pending {
    /// Adds the cause of a change, if causes are noted.
    pub(super) fn note(&mut self, service: Option<ServiceName>, cause: Option<Cause>) {
        if let Some(cause) = cause {
            self.causes.add(service, cause);
        }
    }
}

impl Index {
    /// Begins the cause of a change, once the picture is complete.
    pub(super) fn cause(&self, located: &Located) -> Option<Cause> {
        if !self.is_synced() {
            return None;
        }
        let id = located.object.id();
        let known = match id.kind {
            Kind::Service => self.services.contains_key(&service_name(&id)),
            Kind::EndpointSlice => self.slices.contains_key(&id),
            Kind::Node => self.nodes.contains_key(&id.name),
            Kind::ServiceCidr => self.cidrs.contains_key(&id.name),
        };
        let verb = if known { Verb::Changed } else { Verb::Added };
        let version = located.object.metadata().resource_version.number();
        Some(Cause::new(id, version, &located.location, verb))
    }

    /// Notes that an object goes, before it does.
    pub(super) fn note_removal(&mut self, id: &ObjectId) {
        if !self.is_synced() {
            return;
        }
        let mut cause = Cause::new(id.clone(), 0, &Arc::default(), Verb::Removed);
        let service = match id.kind {
            Kind::Service => {
                let name = service_name(id);
                if let Some(entry) = self.services.get(&name) {
                    cause.compare_ports(&entry.ports, &[]);
                }
                Some(name)
            }
            Kind::EndpointSlice => self.slices.get(id).map(|entry| {
                cause.compare_slices(&entry.ports, &[]);
                entry.service.clone()
            }),
            Kind::Node | Kind::ServiceCidr => None,
        };
        self.pending.causes.add(service, cause);
    }

    /// Notes how a slice that is stored now differs from what it was.
    pub(super) fn note_slice(&mut self, id: &ObjectId, before: Option<SliceEntry>, cause: Option<Cause>) {
        let (Some(mut cause), Some(now)) = (cause, self.slices.get(id)) else {
            return;
        };
        let was = before.as_ref().map_or(&[][..], |before| &before.ports);
        cause.written_ms = now.trigger_ms;
        cause.compare_slices(was, &now.ports);
        self.pending.causes.add(Some(now.service.clone()), cause);
    }
}
