//! Round trips, refusals, and random bytes.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bytes::Bytes;
use kplane_model::{
    Block, Cidr, DecisionRow, Decisions, DesiredKey, DesiredObject, Direction, EndpointAddr,
    Family, GroupPart, IpvsScheduler, KeyParts, LocalEndpoint, LocalEndpoints, LocalPod, NamedPort,
    NodeFacts, Peer, PeerClass, PeerId, Peers, Policy, PolicyObject, PolicyPort, PolicyRule,
    PortActions, Protocol, Proxied, ServiceKey, ServiceName, ServicePort, ServiceProgram, Tier,
    TierAction, TierSpan, TrafficPolicy, refused_endpoint_ip,
};
use proptest::prelude::*;
use prost::Message;

use super::address::{ip_bytes, pack_endpoints};
use super::*;
use crate::v1 as pb;

fn any_ip(family: Family) -> BoxedStrategy<IpAddr> {
    match family {
        Family::V4 => any::<u32>().prop_map(|bits| Ipv4Addr::from(bits).into()).boxed(),
        Family::V6 => any::<u128>().prop_map(|bits| Ipv6Addr::from(bits).into()).boxed(),
    }
}

fn any_endpoint(family: Family) -> impl Strategy<Value = EndpointAddr> {
    (any_ip(family), 1_u16..)
        .prop_filter("reachable", |(ip, _)| refused_endpoint_ip(*ip).is_none())
        .prop_map(|(ip, port)| EndpointAddr { ip, port })
}

fn any_cidr(family: Family) -> impl Strategy<Value = Cidr> {
    (any_ip(family), 0_u8..=32).prop_map(|(ip, len)| Cidr::new(ip, len).unwrap())
}

fn any_key(family: Family) -> impl Strategy<Value = ServiceKey> {
    ("[a-z]{1,20}", "[a-z]{1,20}", "[a-z]{0,15}", 0_usize..3).prop_map(
        move |(namespace, name, port_name, protocol)| {
            ServiceKey::from(KeyParts {
                service: ServiceName::new(&namespace, &name),
                port_name: port_name.into(),
                protocol: Protocol::ALL[protocol],
                family,
            })
        },
    )
}

fn any_policy() -> impl Strategy<Value = TrafficPolicy> {
    prop::sample::select(vec![TrafficPolicy::Cluster, TrafficPolicy::Local])
}

fn any_service(family: Family) -> impl Strategy<Value = DesiredObject> {
    let ips = || prop::collection::vec(any_ip(family), 0..3);
    let addresses = (
        any_ip(family),
        ips(),
        ips(),
        prop::collection::vec(any_cidr(family), 0..3),
    );
    let ports = (
        1_u16..,
        prop::option::of(1_u16..),
        prop::option::of(1_u16..),
    );
    let rest = (
        any_policy(),
        any_policy(),
        prop::option::of(1_u32..=86_400),
        prop::collection::vec(any_endpoint(family), 0..5),
        any::<bool>(),
        prop::collection::vec(any_endpoint(family), 0..5),
        prop::option::of(prop::sample::select(vec!["rr", "mh"]))
            .prop_map(|name| name.and_then(IpvsScheduler::parse)),
        prop::option::of(any::<bool>()),
        prop::collection::vec(any_endpoint(family), 0..3),
    );
    (any_key(family), addresses, ports, rest).prop_map(|(key, addresses, ports, rest)| {
        DesiredObject::Service(ServiceProgram {
            port: ServicePort {
                key,
                port: ports.0,
                cluster_ip: addresses.0,
                external_ips: addresses.1,
                load_balancer_ips: addresses.2,
                node_port: ports.1,
                internal_policy: rest.0,
                external_policy: rest.1,
                affinity_timeout_s: rest.2,
                source_ranges: addresses.3,
                health_check_node_port: ports.2,
                ipvs_scheduler: rest.6,
                proxied: rest.7.map(|retry| Proxied { retry }),
            },
            endpoints: rest.3,
            has_any: rest.4,
            serving_others: rest.5,
            dead: rest.8,
        })
    })
}

fn any_local(family: Family) -> impl Strategy<Value = DesiredObject> {
    let endpoints = prop::collection::btree_map(any_endpoint(family), any::<bool>(), 0..5);
    (any_key(family), endpoints).prop_map(|(key, endpoints)| {
        let endpoints = endpoints.into_iter().map(|(addr, ready)| LocalEndpoint { addr, ready });
        DesiredObject::Local(LocalEndpoints {
            key,
            endpoints: endpoints.collect(),
        })
    })
}

fn any_node() -> impl Strategy<Value = DesiredObject> {
    let ips = prop::collection::vec(prop_oneof![any_ip(Family::V4), any_ip(Family::V6)], 0..3);
    let cidrs = || {
        prop::collection::vec(
            prop_oneof![any_cidr(Family::V4), any_cidr(Family::V6)],
            0..3,
        )
    };
    (
        "[a-z]{1,9}",
        prop::option::of("[a-z]{1,9}"),
        ips,
        cidrs(),
        cidrs(),
        any::<(bool, bool, bool)>(),
    )
        .prop_map(
            |(name, zone, addresses, pod_cidrs, service_cidrs, (eligible, known, other_nodes))| {
                DesiredObject::Node(NodeFacts {
                    name: name.into(),
                    zone: zone.map(Into::into),
                    addresses,
                    pod_cidrs,
                    service_cidrs,
                    eligible,
                    known,
                    other_nodes,
                })
            },
        )
}

fn any_protocol() -> impl Strategy<Value = Protocol> {
    (0_usize..3).prop_map(|at| Protocol::ALL[at])
}

fn any_rules() -> impl Strategy<Value = Option<Vec<PolicyRule>>> {
    let id = any::<[u8; 16]>().prop_map(PeerId);
    let port = prop_oneof![
        any_protocol().prop_map(PolicyPort::All),
        (any_protocol(), 1_u16.., 0_u16..9).prop_map(|(protocol, first, more)| {
            PolicyPort::Range(protocol, first, first.saturating_add(more))
        }),
        (any_protocol(), "[a-z]{1,15}")
            .prop_map(|(protocol, name)| PolicyPort::Named(protocol, name.into())),
    ];
    let block = (
        any_cidr(Family::V4),
        prop::collection::vec(any_cidr(Family::V4), 0..3),
    )
        .prop_map(|(range, except)| Block { range, except });
    let peers = (
        prop::collection::btree_set(id, 0..3),
        prop::collection::vec(block, 0..3),
    )
        .prop_map(|(groups, blocks)| Peers {
            groups: groups.into_iter().collect(),
            blocks,
        });
    let rule = (
        prop::option::of(peers),
        prop::option::of(prop::collection::vec(port, 0..4)),
    )
        .prop_map(|(peers, ports)| PolicyRule { peers, ports });
    prop::option::of(prop::collection::vec(rule, 0..3))
}

fn any_decisions() -> impl Strategy<Value = Decisions> {
    let action =
        || prop::sample::select(vec![TierAction::Deny, TierAction::Pass, TierAction::Accept]);
    let port = (any_protocol(), 0_u16..100, 0_u16..100, action());
    let row = (
        action(),
        prop::collection::vec(port, 0..3),
        prop::collection::btree_set(any::<[u8; 15]>(), 0..4),
    );
    let rows = prop::collection::vec(row, 0..5);
    (any::<[u8; 16]>(), any::<u8>(), rows).prop_map(|(subject, part, rows)| {
        let places = Direction::ALL.into_iter().flat_map(|d| Tier::ALL.map(|t| (d, t)));
        let rows = places.zip(rows).map(|((direction, tier), (rest, ports, peers))| {
            // One range of a protocol, so that they cannot overlap.
            let ports: BTreeMap<_, _> = ports.into_iter().map(|port| (port.0, port)).collect();
            let ranges =
                ports.into_values().map(|(p, a, b, action)| (p, a.min(b), a.max(b), action));
            let id = |rest: [u8; 15]| {
                let mut id = [part; 16];
                id[1..].copy_from_slice(&rest);
                PeerId(id)
            };
            DecisionRow {
                direction,
                tier,
                actions: PortActions {
                    rest,
                    ranges: ranges.collect(),
                },
                peers: peers.into_iter().map(id).collect(),
            }
        });
        Decisions {
            subject: PeerId(subject),
            part,
            rows: rows.collect(),
        }
    })
}

/// A part of a group.
fn part((group, part, mut members): (PeerId, u8, Vec<PeerId>)) -> PolicyObject {
    members.iter_mut().for_each(|member| member.0[0] = part);
    members.sort_unstable();
    members.dedup();
    PolicyObject::Group(GroupPart {
        group,
        part,
        members,
    })
}

fn any_policy_object() -> impl Strategy<Value = DesiredObject> {
    let id = || any::<[u8; 16]>().prop_map(PeerId);
    let name =
        || ("[a-z]{1,20}", "[a-z]{1,20}").prop_map(|(ns, name)| ServiceName::new(&ns, &name));
    let ports = || {
        let port = ("[a-z]{1,15}", any_protocol(), 1_u16..);
        let port = port.prop_map(|(name, protocol, port)| NamedPort {
            name: name.into(),
            protocol,
            port,
        });
        prop::collection::btree_set(port, 0..4).prop_map(Vec::from_iter)
    };
    let pod = (
        name(),
        prop::collection::btree_set(any_ip(Family::V6), 0..3),
        ports(),
        prop::collection::btree_set(name(), 0..4),
        prop::option::of(id()),
    );
    let object = prop_oneof![
        id().prop_map(|id| PolicyObject::Cluster(format!("{id:?}").into())),
        id().prop_map(|id| PolicyObject::Namespace(format!("{id:?}").into())),
        (any_ip(Family::V6), any_ip(Family::V6), id()).prop_map(|(a, b, tier)| {
            let (first, last) = (a.min(b), a.max(b));
            PolicyObject::Span(TierSpan { first, last, tier })
        }),
        any_decisions().prop_map(PolicyObject::Decisions),
        (any_ip(Family::V4), id(), id()).prop_map(|(address, class, tier)| {
            let tier = Some(tier);
            PolicyObject::Peer(Peer {
                address,
                class,
                tier,
            })
        }),
        (any_ip(Family::V4), id()).prop_map(|(address, class)| PolicyObject::Peer(Peer {
            address,
            class,
            tier: None
        })),
        (id(), id(), "[a-z]{1,20}", ports()).prop_map(|(id, parent, namespace, ports)| {
            PolicyObject::Class(PeerClass {
                id,
                parent,
                namespace: namespace.into(),
                ports,
            })
        }),
        (id(), any::<u8>(), prop::collection::vec(id(), 0..5)).prop_map(part),
        (name(), any_rules(), any_rules()).prop_map(|(name, ingress, egress)| {
            PolicyObject::Policy(Policy {
                name,
                ingress,
                egress,
            })
        }),
        pod.prop_map(|(name, addresses, ports, policies, tier)| {
            PolicyObject::Pod(LocalPod {
                name,
                addresses: addresses.into_iter().collect(),
                ports,
                policies: policies.into_iter().collect(),
                tier,
            })
        }),
    ];
    object.prop_map(DesiredObject::Policy)
}

fn any_object() -> impl Strategy<Value = DesiredObject> {
    prop_oneof![
        any_service(Family::V4),
        any_service(Family::V6),
        any_local(Family::V4),
        any_local(Family::V6),
        any_node(),
        any_policy_object(),
    ]
}

proptest! {
    #[test]
    fn objects_survive_the_wire(object in any_object()) {
        let decoded = decode_object(encode_object(&object)).unwrap();
        prop_assert_eq!(decoded.as_ref(), Some(&object));
        let key = DesiredKey::try_from(pb::ObjectKey::from(&object.key())).unwrap();
        prop_assert_eq!(key, object.key());
        prop_assert_eq!(key_of_object(encode_object(&object)), Some(object.key()));
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode_object(bytes.clone().into());
        if let Ok(key) = pb::ObjectKey::decode(&bytes[..]) {
            let _ = DesiredKey::try_from(key);
        }
    }

    /// Valid messages with one byte changed reach deeper code than random bytes.
    #[test]
    fn damaged_objects_never_panic(object in any_object(), at in any::<prop::sample::Index>(), byte: u8) {
        let mut bytes = encode_object(&object).to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = decode_object(bytes.clone().into());
        let _ = key_of_object(bytes.into());
    }
}

fn service() -> pb::ServiceProgram {
    pb::ServiceProgram {
        key: Some(pb::ServiceKey {
            namespace: "shop".into(),
            name: "web".into(),
            port_name: "http".into(),
            protocol: pb::Protocol::Tcp.into(),
            family: pb::Family::Ipv4.into(),
        }),
        port: 80,
        cluster_ip: vec![10, 96, 0, 1].into(),
        endpoints: vec![10, 0, 0, 1, 0x1f, 0x90].into(),
        ..Default::default()
    }
}

/// Each refusal names its field.
#[test]
fn hostile_services_are_refused_by_field() {
    type Change = fn(&mut pb::ServiceProgram);
    let cases: [(&str, Change); 13] = [
        ("key", |s| s.key = None),
        ("key", |s| s.key.as_mut().unwrap().name.clear()),
        ("protocol", |s| s.key.as_mut().unwrap().protocol = 9),
        ("family", |s| s.key.as_mut().unwrap().family = 0),
        ("port", |s| s.port = 0),
        ("node_port", |s| s.node_port = 70_000),
        ("cluster_ip", |s| s.cluster_ip = vec![0; 16].into()),
        ("external_ips", |s| s.external_ips = vec![1, 2, 3].into()),
        ("endpoints", |s| {
            s.endpoints = vec![127, 0, 0, 1, 0, 80].into();
        }),
        ("endpoints", |s| {
            s.endpoints = vec![10, 0, 0, 1, 0, 0].into();
        }),
        ("serving_others", |s| {
            s.serving_others = vec![1, 2, 3].into();
        }),
        ("affinity_timeout_s", |s| s.affinity_timeout_s = 90_000),
        ("ipvs_scheduler", |s| s.ipvs_scheduler = "random".to_owned()),
    ];
    assert!(ServiceProgram::try_from(service()).is_ok());
    for (field, change) in cases {
        let mut wire = service();
        change(&mut wire);
        let error = ServiceProgram::try_from(wire).unwrap_err();
        assert_eq!(error.field, field, "{error}");
    }
}

/// Agents check every list of endpoints, and do not rely on the control plane.
#[test]
fn cve_2021_25737_endpoints_on_the_node_itself_are_refused_by_agents() {
    let forbidden = [
        "0.0.0.0",
        "0.1.2.3",
        "127.0.0.1",
        "127.255.255.255",
        "169.254.169.254",
        "224.0.0.1",
        "239.255.255.255",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "febf::1",
        "ff02::1",
        "::ffff:10.0.0.1",
        "::ffff:127.0.0.1",
    ];
    for ip in forbidden.map(|text| text.parse::<IpAddr>().unwrap()) {
        let good: IpAddr = match ip {
            IpAddr::V4(_) => [10, 0, 0, 1].into(),
            IpAddr::V6(_) => "fd00::1".parse().unwrap(),
        };
        let list = pack_endpoints([good, ip].map(|ip| EndpointAddr { ip, port: 80 }).into_iter());
        let mut wire = service();
        wire.key.as_mut().unwrap().family = match ip {
            IpAddr::V4(_) => pb::Family::Ipv4.into(),
            IpAddr::V6(_) => pb::Family::Ipv6.into(),
        };
        wire.cluster_ip = ip_bytes(good).into();
        let local = |ready: &Bytes, draining: &Bytes| pb::LocalEndpoints {
            key: wire.key.clone(),
            ready: ready.clone(),
            draining: draining.clone(),
        };
        let (ready, draining) = (local(&list, &Bytes::new()), local(&Bytes::new(), &list));
        wire.endpoints = list;
        let fields = [
            ServiceProgram::try_from(wire).unwrap_err().field,
            LocalEndpoints::try_from(ready).unwrap_err().field,
            LocalEndpoints::try_from(draining).unwrap_err().field,
        ];
        assert_eq!(fields, ["endpoints", "ready", "draining"], "{ip}");
    }
}

/// One endpoint change of an ordinary Service stays within the budget of 128 bytes (design.md).
#[test]
fn one_service_fits_the_change_budget() {
    let object = pb::Object {
        kind: Some(pb::object::Kind::Service(service())),
    };
    let update = pb::ServerMessage {
        kind: Some(pb::server_message::Kind::Update(pb::Update {
            objects: vec![object.encode_to_vec().into()],
            end: Some(pb::UpdateEnd {
                revision: 1_000_000,
                digest: vec![0xff; 16],
                changed_at_ms: 1_800_000_000_000,
                triggers: vec![pb::Trigger {
                    id: 1_000_000,
                    family: pb::Family::Ipv4.into(),
                    at_ms: 1_800_000_000_000,
                }],
                ..Default::default()
            }),
            ..Default::default()
        })),
    };
    let grpc_prefix = 5;
    let len = update.encoded_len() + grpc_prefix;
    assert!(len <= 128, "{len}");
}

/// An older control plane does not send the field, and an older agent skips it.
#[test]
fn what_serves_besides_is_optional() {
    let program = ServiceProgram::try_from(service()).unwrap();
    assert!(program.serving_others.is_empty());
    let len = pb::ServiceProgram::from(&program).encoded_len();
    assert_eq!(len, service().encoded_len(), "nothing costs nothing");
}
