//! Objects of the desired state.

use bytes::Bytes;
use kplane_model::{
    DesiredKey, DesiredObject, IpvsScheduler, KeyParts, LocalEndpoint, LocalEndpoints, NodeFacts,
    ServiceKey, ServiceName, ServicePort, ServiceProgram, TrafficPolicy, shared,
};
use prost::Message;

use super::address::{
    cidr_from_wire, cidr_to_wire, ip_bytes, optional_port, pack_endpoints, pack_ips, port, put_ip,
    unpack_endpoints, unpack_ip, unpack_ip_of, unpack_ips,
};
use super::enums::{family, protocol};
use super::{ConvertError, policy};
use crate::v1 as pb;

/// Longest idle time of session affinity that the API allows, in seconds.
const MAX_AFFINITY_TIMEOUT_S: u32 = 86_400;

/// Encodes an object once, for every agent that gets it. Digests are computed from these bytes.
pub fn encode_object(object: &DesiredObject) -> Bytes {
    pb::Object::from(object).encode_to_vec().into()
}

/// Decodes an object. `Ok(None)` is a kind that this version does not know.
///
/// # Errors
/// [`ConvertError`] with the field that is invalid; it does not affect other objects.
pub fn decode_object(encoded: Bytes) -> Result<Option<DesiredObject>, ConvertError> {
    let object = pb::Object::decode(encoded)
        .map_err(|error| ConvertError::new("object", error.to_string()))?;
    Ok(match object.kind {
        None => None,
        Some(pb::object::Kind::Service(program)) => {
            Some(DesiredObject::Service(program.try_into()?))
        }
        Some(pb::object::Kind::Local(local)) => Some(DesiredObject::Local(local.try_into()?)),
        Some(pb::object::Kind::Node(node)) => Some(DesiredObject::Node(node.try_into()?)),
        Some(pb::object::Kind::Policy(object)) => {
            policy::object(object)?.map(DesiredObject::Policy)
        }
    })
}

/// Returns the identity of an encoded object that may be invalid in other respects.
pub fn key_of_object(encoded: Bytes) -> Option<DesiredKey> {
    Some(match pb::Object::decode(encoded).ok()?.kind? {
        pb::object::Kind::Service(service) => DesiredKey::Service(service.key?.try_into().ok()?),
        pb::object::Kind::Local(local) => DesiredKey::Local(local.key?.try_into().ok()?),
        pb::object::Kind::Node(_) => DesiredKey::Node,
        pb::object::Kind::Policy(object) => DesiredKey::Policy(policy::key_of(object)?),
    })
}

impl From<&DesiredObject> for pb::Object {
    fn from(object: &DesiredObject) -> Self {
        let kind = match object {
            DesiredObject::Service(program) => pb::object::Kind::Service(program.into()),
            DesiredObject::Local(local) => pb::object::Kind::Local(local.into()),
            DesiredObject::Node(node) => pb::object::Kind::Node(node.into()),
            DesiredObject::Policy(object) => pb::object::Kind::Policy(object.into()),
        };
        Self { kind: Some(kind) }
    }
}

impl From<&DesiredKey> for pb::ObjectKey {
    fn from(key: &DesiredKey) -> Self {
        let kind = match key {
            DesiredKey::Service(key) => pb::object_key::Kind::Service(key.into()),
            DesiredKey::Local(key) => pb::object_key::Kind::Local(key.into()),
            DesiredKey::Node => pb::object_key::Kind::Node(true),
            DesiredKey::Policy(key) => pb::object_key::Kind::Policy(key.into()),
        };
        Self { kind: Some(kind) }
    }
}

impl TryFrom<pb::ObjectKey> for DesiredKey {
    type Error = ConvertError;

    fn try_from(key: pb::ObjectKey) -> Result<Self, ConvertError> {
        Ok(match key.kind {
            Some(pb::object_key::Kind::Service(key)) => Self::Service(key.try_into()?),
            Some(pb::object_key::Kind::Local(key)) => Self::Local(key.try_into()?),
            Some(pb::object_key::Kind::Node(_)) => Self::Node,
            Some(pb::object_key::Kind::Policy(key)) => Self::Policy(key.try_into()?),
            None => return Err(ConvertError::new("kind", "unknown kind of object")),
        })
    }
}

impl From<TrafficPolicy> for pb::TrafficPolicy {
    fn from(policy: TrafficPolicy) -> Self {
        match policy {
            TrafficPolicy::Cluster => Self::Cluster,
            TrafficPolicy::Local => Self::Local,
        }
    }
}

fn traffic_policy(field: &'static str, value: i32) -> Result<TrafficPolicy, ConvertError> {
    match pb::TrafficPolicy::try_from(value) {
        Ok(pb::TrafficPolicy::Cluster) => Ok(TrafficPolicy::Cluster),
        Ok(pb::TrafficPolicy::Local) => Ok(TrafficPolicy::Local),
        Err(_) => Err(ConvertError::new(field, format!("unknown value {value}"))),
    }
}

impl From<&ServiceKey> for pb::ServiceKey {
    fn from(key: &ServiceKey) -> Self {
        Self {
            namespace: key.service.namespace.to_string(),
            name: key.service.name.to_string(),
            port_name: key.port_name.to_string(),
            protocol: pb::Protocol::from(key.protocol).into(),
            family: pb::Family::from(key.family).into(),
        }
    }
}

impl TryFrom<pb::ServiceKey> for ServiceKey {
    type Error = ConvertError;

    fn try_from(key: pb::ServiceKey) -> Result<Self, ConvertError> {
        if key.namespace.is_empty() || key.name.is_empty() {
            return Err(ConvertError::new("key", "namespace and name are needed"));
        }
        Ok(Self::from(KeyParts {
            service: ServiceName::of(shared(&key.namespace), key.name.into()),
            port_name: shared(&key.port_name),
            protocol: protocol(key.protocol)?,
            family: family(key.family)?,
        }))
    }
}

fn required_key(key: Option<pb::ServiceKey>) -> Result<ServiceKey, ConvertError> {
    key.ok_or_else(|| ConvertError::new("key", "missing"))?.try_into()
}

impl From<&ServiceProgram> for pb::ServiceProgram {
    fn from(program: &ServiceProgram) -> Self {
        let port = &program.port;
        let mut cluster_ip = Vec::with_capacity(16);
        put_ip(&mut cluster_ip, port.cluster_ip);
        Self {
            key: Some((&port.key).into()),
            port: port.port.into(),
            cluster_ip: cluster_ip.into(),
            external_ips: pack_ips(&port.external_ips),
            load_balancer_ips: pack_ips(&port.load_balancer_ips),
            node_port: port.node_port.unwrap_or(0).into(),
            internal_policy: pb::TrafficPolicy::from(port.internal_policy).into(),
            external_policy: pb::TrafficPolicy::from(port.external_policy).into(),
            affinity_timeout_s: port.affinity_timeout_s.unwrap_or(0),
            source_ranges: port.source_ranges.iter().map(cidr_to_wire).collect(),
            health_check_node_port: port.health_check_node_port.unwrap_or(0).into(),
            endpoints: pack_endpoints(program.endpoints.iter().copied()),
            has_any: program.has_any,
            serving_others: pack_endpoints(program.serving_others.iter().copied()),
            dead: pack_endpoints(program.dead.iter().copied()),
            ipvs_scheduler: port
                .ipvs_scheduler
                .map(|scheduler| scheduler.as_str().to_owned())
                .unwrap_or_default(),
            proxied: port.proxied.map(Into::into),
        }
    }
}

impl TryFrom<pb::ServiceProgram> for ServiceProgram {
    type Error = ConvertError;

    fn try_from(wire: pb::ServiceProgram) -> Result<Self, ConvertError> {
        let key = required_key(wire.key)?;
        let family = key.family;
        let affinity = wire.affinity_timeout_s;
        if affinity > MAX_AFFINITY_TIMEOUT_S {
            return Err(ConvertError::new(
                "affinity_timeout_s",
                format!("{affinity} is above {MAX_AFFINITY_TIMEOUT_S}"),
            ));
        }
        let source_ranges = wire.source_ranges.iter().map(|range| {
            let range = cidr_from_wire("source_ranges", range)?;
            if range.family() == family {
                Ok(range)
            } else {
                Err(ConvertError::new(
                    "source_ranges",
                    format!("{range} is not {family}"),
                ))
            }
        });
        let port = ServicePort {
            port: port("port", wire.port)?,
            cluster_ip: unpack_ip_of("cluster_ip", family, &wire.cluster_ip)?,
            external_ips: unpack_ips("external_ips", family, &wire.external_ips)?,
            load_balancer_ips: unpack_ips("load_balancer_ips", family, &wire.load_balancer_ips)?,
            node_port: optional_port("node_port", wire.node_port)?,
            internal_policy: traffic_policy("internal_policy", wire.internal_policy)?,
            external_policy: traffic_policy("external_policy", wire.external_policy)?,
            affinity_timeout_s: (affinity != 0).then_some(affinity),
            source_ranges: source_ranges.collect::<Result<_, _>>()?,
            health_check_node_port: optional_port(
                "health_check_node_port",
                wire.health_check_node_port,
            )?,
            ipvs_scheduler: scheduler(&wire.ipvs_scheduler)?,
            proxied: wire.proxied.map(Into::into),
            key,
        };
        Ok(Self {
            port,
            endpoints: unpack_endpoints("endpoints", family, &wire.endpoints)?,
            has_any: wire.has_any,
            serving_others: unpack_endpoints("serving_others", family, &wire.serving_others)?,
            dead: unpack_endpoints("dead", family, &wire.dead)?,
        })
    }
}

fn scheduler(name: &str) -> Result<Option<IpvsScheduler>, ConvertError> {
    if name.is_empty() {
        return Ok(None);
    }
    let known = IpvsScheduler::parse(name);
    let unknown = || ConvertError::new("ipvs_scheduler", format!("{name:?} is unknown"));
    known.ok_or_else(unknown).map(Some)
}

impl From<&LocalEndpoints> for pb::LocalEndpoints {
    fn from(local: &LocalEndpoints) -> Self {
        let pack = |ready| {
            let those = local.endpoints.iter().filter(move |e| e.ready == ready);
            pack_endpoints(those.map(|e| e.addr))
        };
        Self {
            key: Some((&local.key).into()),
            ready: pack(true),
            draining: pack(false),
        }
    }
}

impl TryFrom<pb::LocalEndpoints> for LocalEndpoints {
    type Error = ConvertError;

    fn try_from(wire: pb::LocalEndpoints) -> Result<Self, ConvertError> {
        let key = required_key(wire.key)?;
        let unpack = |field, ready, bytes: &[u8]| {
            let addrs = unpack_endpoints(field, key.family, bytes)?;
            Ok(addrs.into_iter().map(move |addr| LocalEndpoint { addr, ready }))
        };
        let mut endpoints: Vec<_> = unpack("ready", true, &wire.ready)?
            .chain(unpack("draining", false, &wire.draining)?)
            .collect();
        endpoints.sort();
        Ok(Self { key, endpoints })
    }
}

impl From<&NodeFacts> for pb::NodeConfig {
    fn from(node: &NodeFacts) -> Self {
        Self {
            name: node.name.to_string(),
            zone: node.zone.as_deref().unwrap_or_default().to_owned(),
            addresses: node.addresses.iter().map(|ip| ip_bytes(*ip)).collect(),
            pod_cidrs: node.pod_cidrs.iter().map(cidr_to_wire).collect(),
            service_cidrs: node.service_cidrs.iter().map(cidr_to_wire).collect(),
            eligible: node.eligible,
            known: node.known,
            other_nodes: node.other_nodes,
        }
    }
}

impl TryFrom<pb::NodeConfig> for NodeFacts {
    type Error = ConvertError;

    fn try_from(wire: pb::NodeConfig) -> Result<Self, ConvertError> {
        let cidrs = |field, cidrs: &[pb::Cidr]| {
            cidrs
                .iter()
                .map(|cidr| cidr_from_wire(field, cidr))
                .collect::<Result<Vec<_>, _>>()
        };
        let addresses = wire.addresses.iter().map(|ip| unpack_ip("addresses", ip));
        Ok(Self {
            name: wire.name.into(),
            zone: (!wire.zone.is_empty()).then(|| wire.zone.into()),
            addresses: addresses.collect::<Result<_, _>>()?,
            pod_cidrs: cidrs("pod_cidrs", &wire.pod_cidrs)?,
            service_cidrs: cidrs("service_cidrs", &wire.service_cidrs)?,
            eligible: wire.eligible,
            known: wire.known,
            other_nodes: wire.other_nodes,
        })
    }
}
