//! The API server: all objects, and the order of their changes.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use kplane_desired_state::k8s::{self, Kind};
use kplane_model::{Cidr, Family};
use kplane_policy::{ClusterPolicy, Labels, NetworkPolicy};

use crate::dice::Dice;
use crate::written::{self, NAMESPACES, PODS, POLICIES, TIERS, Workload};

/// The kinds that change: those that Services need, and those of NetworkPolicies. (The cluster has no ServiceCIDR.)
pub(crate) const KINDS: [Kind; 7] = [
    Kind::Service,
    Kind::EndpointSlice,
    Kind::Node,
    Kind::NetworkPolicy,
    Kind::ClusterNetworkPolicy,
    Kind::Namespace,
    Kind::Pod,
];

/// The number of the kinds that Services need.
pub(crate) const OF_SERVICES: usize = 3;

/// The namespace of Services.
pub(crate) const NAMESPACE: &str = "sim";

/// Slices that a Service may have: two with IPv4 addresses, and one with IPv6.
pub(crate) const SLICES: u8 = 3;
/// The numbers of pods that each slice has for itself.
const IN_SLICE: u8 = 16;
/// The slice that Kubernetes' controller does not write.
const FOREIGN: u8 = 1;
/// The number of the slice with IPv6 addresses.
pub(crate) const SLICE_V6: u8 = 2;

/// The name of an object. Services, and the nodes, have numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Id {
    Service(u8),
    Slice(u8, u8),
    Node(u8),
    Policy(u8),
    Tiers(u8),
    Namespace(u8),
    Pod(u8),
    /// A Pod of a Service that is being deleted.
    Ending(u8, u8),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Object {
    Service(Service),
    Slice(Vec<Pod>),
    /// A node, with ranges for its Pods or without.
    Node {
        zone: u8,
        ranged: bool,
    },
    Policy(NetworkPolicy),
    Tiers(ClusterPolicy),
    Namespace(Labels),
    Pod(Workload),
    Ending,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Service {
    pub(crate) dual: bool,
    pub(crate) two_ports: bool,
    pub(crate) node_ports: bool,
    /// Its internal and its external policy is Local.
    pub(crate) local: [bool; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pod {
    pub(crate) number: u8,
    pub(crate) node: u8,
    pub(crate) condition: Condition,
    pub(crate) zone: Option<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    Ready,
    Draining,
    Starting,
}

/// A change of an object, or its deletion.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) version: u64,
    pub(crate) id: Id,
    pub(crate) object: Option<Arc<Object>>,
}

/// Objects with the versions of their last changes.
pub(crate) type Objects = BTreeMap<Id, (u64, Arc<Object>)>;

#[derive(Debug, Default)]
pub(crate) struct Truth {
    changes: Vec<Change>,
    now: Objects,
}

impl Truth {
    /// Writes an object, or deletes it.
    pub(crate) fn write(&mut self, id: Id, object: Option<Object>) {
        let version = self.head() + 1;
        let object = object.map(Arc::new);
        let before = match &object {
            Some(object) => self.now.insert(id, (version, Arc::clone(object))),
            None => self.now.remove(&id),
        };
        if before.is_some() || object.is_some() {
            self.changes.push(Change {
                version,
                id,
                object,
            });
        }
    }

    /// Returns the version of the newest change.
    pub(crate) fn head(&self) -> u64 {
        FIRST_VERSION + self.changes.len() as u64
    }

    pub(crate) fn now(&self) -> &Objects {
        &self.now
    }

    /// Returns all objects as they were at a version.
    pub(crate) fn at(&self, version: u64) -> Objects {
        let mut objects = Objects::new();
        for change in self.changes.iter().take_while(|c| c.version <= version) {
            match &change.object {
                Some(object) => objects.insert(change.id, (change.version, Arc::clone(object))),
                None => objects.remove(&change.id),
            };
        }
        objects
    }

    /// Returns the changes of a kind after a version, oldest first.
    pub(crate) fn after(&self, kind: Kind, version: u64) -> impl Iterator<Item = &Change> {
        self.changes
            .iter()
            .filter(move |c| c.version > version)
            .filter(move |change| change.id.kind() == kind)
    }
}

/// The version of a cluster without objects.
pub(crate) const FIRST_VERSION: u64 = 1_000;

impl Id {
    pub(crate) fn kind(self) -> Kind {
        match self {
            Self::Service(_) => Kind::Service,
            Self::Slice(..) => Kind::EndpointSlice,
            Self::Node(_) => Kind::Node,
            Self::Policy(_) => Kind::NetworkPolicy,
            Self::Tiers(_) => Kind::ClusterNetworkPolicy,
            Self::Namespace(_) => Kind::Namespace,
            Self::Pod(_) | Self::Ending(..) => Kind::Pod,
        }
    }

    /// Returns whether NetworkPolicies are about the object.
    pub(crate) fn is_for_policies(self) -> bool {
        !matches!(self, Self::Service(_) | Self::Slice(..) | Self::Ending(..))
    }

    pub(crate) fn to_kubernetes(self) -> k8s::ObjectId {
        let namespace = match self {
            Self::Node(_) | Self::Tiers(_) | Self::Namespace(_) => "",
            Self::Service(_) | Self::Slice(..) | Self::Ending(..) => NAMESPACE,
            Self::Policy(number) => split(&POLICIES, number).0,
            Self::Pod(number) => split(&PODS, number).0,
        };
        k8s::ObjectId {
            kind: self.kind(),
            namespace: namespace.into(),
            name: self.name(),
        }
    }

    pub(crate) fn name(self) -> Arc<str> {
        match self {
            Self::Service(number) => format!("s{number}").into(),
            Self::Slice(service, number) => format!("s{service}-{number}").into(),
            Self::Node(number) => node_name(number),
            Self::Policy(number) => split(&POLICIES, number).1.into(),
            Self::Pod(number) => split(&PODS, number).1.into(),
            Self::Ending(service, pod) => pod_name(service, pod),
            Self::Tiers(number) => TIERS[usize::from(number)].into(),
            Self::Namespace(number) => NAMESPACES[usize::from(number)].into(),
        }
    }

    fn metadata(self) -> k8s::ObjectMeta {
        let id = self.to_kubernetes();
        k8s::ObjectMeta {
            name: id.name,
            namespace: Some(id.namespace),
            ..k8s::ObjectMeta::default()
        }
    }
}

/// Returns the name of a pod of a Service.
fn pod_name(service: u8, pod: u8) -> Arc<str> {
    format!("e{service}-{pod}").into()
}

fn split(names: &[&'static str], number: u8) -> (&'static str, &'static str) {
    names[usize::from(number)].split_once('/').unwrap()
}

/// Returns the address of a node's machine.
pub(crate) fn node_address(number: u8) -> IpAddr {
    Ipv4Addr::new(10, 9, 1, number).into()
}

/// Returns the ranges of a node's Pods.
pub(crate) fn pod_ranges(number: u8) -> [Cidr; 2] {
    let first = 2 * number;
    [format!("10.0.0.{first}/31"), format!("fd00::{first:x}/127")].map(|text| text.parse().unwrap())
}

pub(crate) fn node_name(number: u8) -> Arc<str> {
    format!("n{number}").into()
}

pub(crate) fn zone_name(number: u8) -> Arc<str> {
    format!("z{number}").into()
}

/// Returns the address of a Service in a family.
pub(crate) fn service_ip(service: u8, family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(10, 96, 0, service + 1).into(),
        Family::V6 => Ipv6Addr::new(0xfd96, 0, 0, 0, 0, 0, 0, u16::from(service) + 1).into(),
    }
}

/// Returns the address of a pod of a Service.
pub(crate) fn pod_ip(service: u8, pod: u8, family: Family) -> IpAddr {
    let (service, pod) = (service + 1, pod + 1);
    match family {
        Family::V4 => Ipv4Addr::new(10, 1, service, pod).into(),
        Family::V6 => Ipv6Addr::new(0xfd01, 0, 0, 0, 0, 0, service.into(), pod.into()).into(),
    }
}

/// The ports of a Service: name, port, the pods' port.
pub(crate) const PORTS: [(&str, u16, u16); 2] = [("a", 80, 8_080), ("b", 81, 8_081)];

pub(crate) fn node_port(service: u8, port: usize) -> u16 {
    30_000 + 2 * u16::from(service) + u16::from(port > 0)
}

impl Service {
    /// Returns a Service whose properties a number chooses.
    pub(crate) fn of(shape: u8) -> Self {
        let is = |bit: u8| shape & (1 << bit) != 0;
        Self {
            dual: is(0) && is(1),
            two_ports: is(2) && is(3),
            node_ports: is(4),
            local: [is(5) && is(0), is(6)],
        }
    }

    pub(crate) fn ports(self) -> &'static [(&'static str, u16, u16)] {
        if self.two_ports { &PORTS } else { &PORTS[..1] }
    }

    pub(crate) fn families(self) -> &'static [Family] {
        if self.dual { &Family::ALL } else { &[Family::V4] }
    }

    fn to_kubernetes(self, number: u8) -> k8s::Service {
        let policy = |local: bool| Some(if local { "Local" } else { "Cluster" }.to_owned());
        let ips: Vec<String> = self
            .families()
            .iter()
            .map(|family| service_ip(number, *family).to_string())
            .collect();
        let ports =
            self.ports()
                .iter()
                .enumerate()
                .map(|(index, (name, port, _))| k8s::ServicePort {
                    name: Some((*name).into()),
                    protocol: Some("TCP".to_owned()),
                    port: (*port).into(),
                    node_port: self.node_ports.then(|| node_port(number, index).into()),
                    target_port: None,
                });
        k8s::Service {
            metadata: Id::Service(number).metadata(),
            spec: k8s::ServiceSpec {
                type_: Some(if self.node_ports { "NodePort" } else { "ClusterIP" }.to_owned()),
                cluster_ip: ips.first().cloned(),
                cluster_ips: Some(ips),
                ip_families: Some(self.families().iter().map(ToString::to_string).collect()),
                ports: Some(ports.collect()),
                internal_traffic_policy: policy(self.local[0]),
                external_traffic_policy: policy(self.local[1]),
                ..k8s::ServiceSpec::default()
            },
            status: k8s::ServiceStatus::default(),
        }
    }
}

impl Pod {
    /// Returns the pods of a slice, which a seed chooses.
    pub(crate) fn some(slice: u8, seed: u64, nodes: u8) -> Vec<Self> {
        let mut dice = Dice::new(seed);
        let hinted = dice.one_in(3);
        let count = if dice.one_in(8) { 0 } else { 1 + dice.small(3) };
        let mut pods: Vec<_> = (0..count)
            .map(|_| Self {
                // No pod is in two slices.
                number: IN_SLICE * slice + dice.small(IN_SLICE),
                node: dice.small(nodes),
                condition: match dice.below(8) {
                    0 => Condition::Draining,
                    1 => Condition::Starting,
                    _ => Condition::Ready,
                },
                zone: hinted.then(|| dice.small(2)),
            })
            .collect();
        pods.sort_by_key(|pod| pod.number);
        pods.dedup_by_key(|pod| pod.number);
        pods
    }

    fn to_kubernetes(self, service: u8, family: Family) -> k8s::SliceEndpoint {
        let conditions = k8s::EndpointConditions {
            ready: Some(self.condition == Condition::Ready),
            serving: Some(self.condition != Condition::Starting),
            terminating: Some(self.condition == Condition::Draining),
        };
        let hints = self.zone.map(|zone| k8s::EndpointHints {
            for_zones: Some(vec![k8s::Hint {
                name: zone_name(zone),
            }]),
            for_nodes: None,
        });
        k8s::SliceEndpoint {
            addresses: vec![pod_ip(service, self.number, family).to_string().into()],
            conditions: Some(conditions),
            node_name: Some(node_name(self.node)),
            hints,
            target_ref: Some(k8s::TargetRef {
                kind: "Pod".into(),
                namespace: None,
                name: Some(pod_name(service, self.number)),
            }),
        }
    }
}

impl Object {
    pub(crate) fn to_kubernetes(&self, id: Id) -> k8s::Object {
        match (self, id) {
            (Self::Service(service), Id::Service(number)) => {
                k8s::Object::Service(service.to_kubernetes(number))
            }
            (Self::Slice(pods), Id::Slice(service, number)) => {
                k8s::Object::EndpointSlice(slice(service, number, pods))
            }
            (Self::Node { zone, ranged }, Id::Node(number)) => {
                let address = k8s::NodeAddress {
                    type_: "InternalIP".to_owned(),
                    address: node_address(number).to_string(),
                };
                let mut metadata = id.metadata();
                let zone_label = (k8s::ZONE_LABEL.into(), zone_name(*zone));
                metadata.labels = Some([zone_label].into_iter().collect());
                let ranges = pod_ranges(number).map(|range| range.to_string()).to_vec();
                k8s::Object::Node(k8s::Node {
                    metadata,
                    labels: node_labels(*zone),
                    spec: k8s::NodeSpec {
                        pod_cidrs: ranged.then_some(ranges),
                        ..k8s::NodeSpec::default()
                    },
                    status: k8s::NodeStatus {
                        addresses: Some(vec![address]),
                    },
                })
            }
            (Self::Policy(policy), _) => {
                k8s::Object::NetworkPolicy(written::network_policy(id.metadata(), policy))
            }
            (Self::Tiers(policy), _) => {
                k8s::Object::ClusterNetworkPolicy(written::cluster_policy(id.metadata(), policy))
            }
            (Self::Namespace(labels), _) => {
                k8s::Object::Namespace(written::namespace(id.metadata(), labels))
            }
            (Self::Pod(workload), _) => k8s::Object::Pod(written::pod(id.metadata(), workload)),
            (Self::Ending, Id::Ending(service, pod)) => {
                k8s::Object::Pod(ending(id.metadata(), service, pod))
            }
            (object, id) => panic!("{id:?} is {object:?}"),
        }
    }
}

/// Returns the labels of a node in a zone. Selectors use the second.
pub(crate) fn node_labels(zone: u8) -> Labels {
    [
        (k8s::ZONE_LABEL.into(), zone_name(zone)),
        ("zone".into(), zone.to_string().into()),
    ]
    .into_iter()
    .collect()
}

fn slice(service: u8, number: u8, pods: &[Pod]) -> k8s::EndpointSlice {
    let family = slice_family(number);
    let mut metadata = Id::Slice(service, number).metadata();
    let owner = (k8s::SERVICE_NAME_LABEL.into(), Id::Service(service).name());
    let writer = if number == FOREIGN { "somebody" } else { k8s::SLICE_CONTROLLER };
    let writer = (k8s::MANAGED_BY_LABEL.into(), writer.into());
    metadata.labels = Some([owner, writer].into_iter().collect());
    let ports = PORTS.map(|(name, _, target)| k8s::SlicePort {
        name: Some(name.into()),
        protocol: Some("TCP".to_owned()),
        port: Some(target.into()),
    });
    let pods = pods.iter().map(|pod| pod.to_kubernetes(service, family));
    k8s::EndpointSlice {
        metadata,
        address_type: family.to_string(),
        endpoints: Some(pods.collect()),
        ports: Some(ports.to_vec()),
    }
}

/// Returns a Pod that is being deleted. It is on its node's network, so that it is nothing to NetworkPolicies.
fn ending(mut metadata: k8s::ObjectMeta, service: u8, pod: u8) -> k8s::Pod {
    metadata.deletion_timestamp = Some("2026-01-03T00:00:00Z".into());
    let ip = pod_ip(service, pod, slice_family(pod / IN_SLICE));
    k8s::Pod {
        metadata,
        spec: k8s::PodSpec {
            host_network: true,
            ..k8s::PodSpec::default()
        },
        status: k8s::PodStatus {
            pod_ip: Some(ip.to_string()),
            ..k8s::PodStatus::default()
        },
        labels: Labels::default(),
    }
}

/// Returns whether the conditions of a pod follow from its state, by its number.
pub(crate) fn is_followed(pod: u8) -> bool {
    pod / IN_SLICE != FOREIGN
}

/// Returns the slice that has a pod.
pub(crate) fn slice_of(service: u8, pod: u8) -> Id {
    Id::Slice(service, pod / IN_SLICE)
}

/// Returns the family of a Service's slice.
pub(crate) fn slice_family(number: u8) -> Family {
    match number {
        SLICE_V6 => Family::V6,
        _ => Family::V4,
    }
}
