//! Objects of NetworkPolicies.

use std::net::IpAddr;

use kplane_model::{
    Block, GroupPart, LocalPod, NamedPort, Peer, PeerClass, PeerId, Peers, Policy, PolicyKey,
    PolicyObject, PolicyPort, PolicyRule, ServiceName, shared,
};

use super::ConvertError;
use super::address::{cidr_from_wire, cidr_to_wire, ip_bytes, port, unpack_ip};
use super::enums::protocol;
use super::ids::{id, pack_ids, unpack_ids};
use super::tiers;
use crate::v1 as pb;

impl From<&PolicyObject> for pb::PolicyObject {
    fn from(object: &PolicyObject) -> Self {
        use pb::policy_object::Kind;
        let kind = match object {
            PolicyObject::Peer(peer) => Kind::Peer(pb::PolicyPeer {
                address: ip_bytes(peer.address),
                class: peer.class.0.to_vec(),
                tier: tiers::optional(peer.tier),
            }),
            PolicyObject::Class(class) => Kind::Class(pb::PolicyClass {
                id: class.id.0.to_vec(),
                parent: class.parent.0.to_vec(),
                namespace: class.namespace.to_string(),
                ports: class.ports.iter().map(Into::into).collect(),
            }),
            PolicyObject::Group(group) => Kind::Group(pb::PolicyGroup {
                group: group.group.0.to_vec(),
                part: group.part.into(),
                members: pack_ids(&group.members),
            }),
            PolicyObject::Policy(policy) => Kind::Policy(policy.into()),
            PolicyObject::Pod(pod) => Kind::Pod(pb::PolicyPod {
                name: Some((&pod.name).into()),
                addresses: pod.addresses.iter().copied().map(ip_bytes).collect(),
                ports: pod.ports.iter().map(Into::into).collect(),
                policies: pod.policies.iter().map(Into::into).collect(),
                tier: tiers::optional(pod.tier),
            }),
            PolicyObject::Namespace(name) => Kind::Namespace(pb::PolicyNamespace {
                name: name.to_string(),
            }),
            PolicyObject::Cluster(name) => Kind::Cluster(pb::ClusterPolicy {
                name: name.to_string(),
            }),
            PolicyObject::Span(span) => Kind::Span(span.into()),
            PolicyObject::Decisions(decisions) => Kind::Decisions(decisions.into()),
        };
        Self { kind: Some(kind) }
    }
}

/// Converts an object; `None` is a kind that this version does not know.
pub(super) fn object(wire: pb::PolicyObject) -> Result<Option<PolicyObject>, ConvertError> {
    use pb::policy_object::Kind;
    let Some(kind) = wire.kind else {
        return Ok(None);
    };
    Ok(Some(match kind {
        Kind::Peer(peer) => PolicyObject::Peer(Peer {
            address: unpack_ip("address", &peer.address)?,
            class: id("class", &peer.class)?,
            tier: tiers::id("tier", &peer.tier)?,
        }),
        Kind::Class(class) => PolicyObject::Class(PeerClass {
            id: id("id", &class.id)?,
            parent: id("parent", &class.parent)?,
            namespace: shared(&class.namespace),
            ports: named_ports(class.ports)?,
        }),
        Kind::Group(group) => PolicyObject::Group(part_of_group(&group)?),
        Kind::Policy(policy) => PolicyObject::Policy(policy.try_into()?),
        Kind::Pod(pod) => PolicyObject::Pod(local_pod(pod)?),
        Kind::Namespace(of) => PolicyObject::Namespace(tiers::name(&of.name)?),
        Kind::Cluster(policy) => PolicyObject::Cluster(tiers::name(&policy.name)?),
        Kind::Span(span) => PolicyObject::Span(tiers::span(&span)?),
        Kind::Decisions(decisions) => PolicyObject::Decisions(tiers::decisions(&decisions)?),
    }))
}

/// Returns the identity of an object that may be invalid in other respects.
pub(super) fn key_of(wire: pb::PolicyObject) -> Option<PolicyKey> {
    use pb::policy_object::Kind;
    Some(match wire.kind? {
        Kind::Peer(peer) => PolicyKey::Peer(unpack_ip("address", &peer.address).ok()?),
        Kind::Class(class) => PolicyKey::Class(id("id", &class.id).ok()?),
        Kind::Group(group) => {
            let part = u8::try_from(group.part).ok()?;
            PolicyKey::Group(id("group", &group.group).ok()?, part)
        }
        Kind::Policy(policy) => PolicyKey::Policy(name("name", policy.name).ok()?),
        Kind::Pod(pod) => PolicyKey::Pod(name("name", pod.name).ok()?),
        Kind::Namespace(of) => PolicyKey::Namespace(tiers::name(&of.name).ok()?),
        Kind::Cluster(policy) => PolicyKey::Cluster(tiers::name(&policy.name).ok()?),
        Kind::Span(span) => PolicyKey::Span(
            unpack_ip("first", &span.first).ok()?,
            unpack_ip("last", &span.last).ok()?,
        ),
        Kind::Decisions(of) => {
            let part = u8::try_from(of.part).ok()?;
            PolicyKey::Decisions(id("subject", &of.subject).ok()?, part)
        }
    })
}

impl From<&PolicyKey> for pb::PolicyKey {
    fn from(key: &PolicyKey) -> Self {
        use pb::policy_key::Kind;
        let kind = match key {
            PolicyKey::Peer(address) => Kind::Peer(ip_bytes(*address)),
            PolicyKey::Class(id) => Kind::Class(id.0.to_vec()),
            PolicyKey::Group(id, part) => Kind::Group([&id.0[..], &[*part]].concat()),
            PolicyKey::Policy(name) => Kind::Policy(name.into()),
            PolicyKey::Pod(name) => Kind::Pod(name.into()),
            PolicyKey::Namespace(name) => Kind::Namespace(name.to_string()),
            PolicyKey::Cluster(name) => Kind::Cluster(name.to_string()),
            PolicyKey::Span(first, last) => {
                Kind::Span([ip_bytes(*first), ip_bytes(*last)].concat())
            }
            PolicyKey::Decisions(id, part) => Kind::Decisions([&id.0[..], &[*part]].concat()),
        };
        Self { kind: Some(kind) }
    }
}

impl TryFrom<pb::PolicyKey> for PolicyKey {
    type Error = ConvertError;

    fn try_from(wire: pb::PolicyKey) -> Result<Self, ConvertError> {
        use pb::policy_key::Kind;
        Ok(match wire.kind {
            Some(Kind::Peer(address)) => Self::Peer(unpack_ip("peer", &address)?),
            Some(Kind::Class(class)) => Self::Class(id("class", &class)?),
            Some(Kind::Group(group)) => {
                let (id, part) = part_of("group", &group)?;
                Self::Group(id, part)
            }
            Some(Kind::Policy(policy)) => Self::Policy(name("policy", Some(policy))?),
            Some(Kind::Pod(pod)) => Self::Pod(name("pod", Some(pod))?),
            Some(Kind::Namespace(name)) => Self::Namespace(tiers::name(&name)?),
            Some(Kind::Cluster(policy)) => Self::Cluster(tiers::name(&policy)?),
            Some(Kind::Span(span)) => {
                let (first, last) = span.split_at(span.len() / 2);
                Self::Span(unpack_ip("span", first)?, unpack_ip("span", last)?)
            }
            Some(Kind::Decisions(of)) => {
                let (id, part) = part_of("decisions", &of)?;
                Self::Decisions(id, part)
            }
            None => return Err(ConvertError::new("policy", "unknown kind of object")),
        })
    }
}

impl From<&ServiceName> for pb::NamespacedName {
    fn from(name: &ServiceName) -> Self {
        Self {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
        }
    }
}

fn name(
    field: &'static str,
    wire: Option<pb::NamespacedName>,
) -> Result<ServiceName, ConvertError> {
    match wire {
        Some(wire) if !wire.namespace.is_empty() && !wire.name.is_empty() => {
            Ok(ServiceName::of(shared(&wire.namespace), wire.name.into()))
        }
        _ => Err(ConvertError::new(field, "namespace and name are needed")),
    }
}

/// Reads an identity and a part.
fn part_of(field: &'static str, bytes: &[u8]) -> Result<(PeerId, u8), ConvertError> {
    let (part, rest) = bytes.split_last().ok_or_else(|| ConvertError::new(field, "empty"))?;
    Ok((id(field, rest)?, *part))
}

/// Converts a part of a group. How a group is cut into parts is the control plane's business.
fn part_of_group(wire: &pb::PolicyGroup) -> Result<GroupPart, ConvertError> {
    let wrong = |_| ConvertError::new("part", format!("{} is above 255", wire.part));
    let part = u8::try_from(wire.part).map_err(wrong)?;
    let members = unpack_ids("members", &wire.members)?;
    Ok(GroupPart {
        group: id("group", &wire.group)?,
        part,
        members,
    })
}

impl From<&NamedPort> for pb::NamedPort {
    fn from(port: &NamedPort) -> Self {
        Self {
            name: port.name.to_string(),
            protocol: pb::Protocol::from(port.protocol).into(),
            port: port.port.into(),
        }
    }
}

fn named_ports(wire: Vec<pb::NamedPort>) -> Result<Vec<NamedPort>, ConvertError> {
    let mut ports = wire
        .into_iter()
        .map(|wire| {
            Ok(NamedPort {
                name: shared(&wire.name),
                protocol: protocol(wire.protocol)?,
                port: port("port", wire.port)?,
            })
        })
        .collect::<Result<Vec<_>, ConvertError>>()?;
    ports.sort_unstable();
    ports.dedup();
    Ok(ports)
}

fn local_pod(wire: pb::PolicyPod) -> Result<LocalPod, ConvertError> {
    let mut addresses = wire
        .addresses
        .iter()
        .map(|ip| unpack_ip("addresses", ip))
        .collect::<Result<Vec<IpAddr>, _>>()?;
    addresses.sort_unstable();
    addresses.dedup();
    let mut policies = wire
        .policies
        .into_iter()
        .map(|policy| name("policies", Some(policy)))
        .collect::<Result<Vec<_>, _>>()?;
    policies.sort_unstable();
    policies.dedup();
    Ok(LocalPod {
        name: name("name", wire.name)?,
        addresses,
        ports: named_ports(wire.ports)?,
        policies,
        tier: tiers::id("tier", &wire.tier)?,
    })
}

impl From<&Policy> for pb::Policy {
    fn from(policy: &Policy) -> Self {
        let rules = |rules: &Vec<PolicyRule>| pb::PolicyRules {
            rules: rules.iter().map(Into::into).collect(),
        };
        Self {
            name: Some((&policy.name).into()),
            ingress: policy.ingress.as_ref().map(rules),
            egress: policy.egress.as_ref().map(rules),
        }
    }
}

impl TryFrom<pb::Policy> for Policy {
    type Error = ConvertError;

    fn try_from(wire: pb::Policy) -> Result<Self, ConvertError> {
        let rules = |rules: Option<pb::PolicyRules>| {
            rules
                .map(|rules| rules.rules.into_iter().map(TryInto::try_into).collect())
                .transpose()
        };
        Ok(Self {
            name: name("name", wire.name)?,
            ingress: rules(wire.ingress)?,
            egress: rules(wire.egress)?,
        })
    }
}

impl From<&PolicyRule> for pb::PolicyRule {
    fn from(rule: &PolicyRule) -> Self {
        let block = |block: &Block| pb::PolicyBlock {
            range: Some(cidr_to_wire(&block.range)),
            except: block.except.iter().map(cidr_to_wire).collect(),
        };
        Self {
            peers: rule.peers.as_ref().map(|peers| pb::PolicyPeers {
                groups: pack_ids(&peers.groups),
                blocks: peers.blocks.iter().map(block).collect(),
            }),
            ports: rule.ports.as_ref().map(|ports| pb::PolicyPorts {
                ports: ports.iter().map(Into::into).collect(),
            }),
        }
    }
}

impl TryFrom<pb::PolicyRule> for PolicyRule {
    type Error = ConvertError;

    fn try_from(wire: pb::PolicyRule) -> Result<Self, ConvertError> {
        let block = |block: pb::PolicyBlock| {
            let missing = || ConvertError::new("range", "missing");
            let range = block.range.as_ref().ok_or_else(missing)?;
            let except = block.except.iter().map(|range| cidr_from_wire("except", range));
            Ok::<_, ConvertError>(Block {
                range: cidr_from_wire("range", range)?,
                except: except.collect::<Result<_, _>>()?,
            })
        };
        let peers = wire.peers.map(|peers| {
            Ok::<_, ConvertError>(Peers {
                groups: unpack_ids("groups", &peers.groups)?,
                blocks: peers.blocks.into_iter().map(block).collect::<Result<_, _>>()?,
            })
        });
        let ports =
            wire.ports.map(|ports| ports.ports.into_iter().map(TryInto::try_into).collect());
        Ok(Self {
            peers: peers.transpose()?,
            ports: ports.transpose()?,
        })
    }
}

impl From<&PolicyPort> for pb::PolicyPort {
    fn from(port: &PolicyPort) -> Self {
        let (protocol, first, last, name) = match port {
            PolicyPort::All(protocol) => (*protocol, 0, 0, ""),
            PolicyPort::Range(protocol, first, last) => (*protocol, *first, *last, ""),
            PolicyPort::Named(protocol, name) => (*protocol, 0, 0, &**name),
        };
        Self {
            protocol: pb::Protocol::from(protocol).into(),
            first: first.into(),
            last: last.into(),
            name: name.to_owned(),
        }
    }
}

impl TryFrom<pb::PolicyPort> for PolicyPort {
    type Error = ConvertError;

    fn try_from(wire: pb::PolicyPort) -> Result<Self, ConvertError> {
        let protocol = protocol(wire.protocol)?;
        if !wire.name.is_empty() {
            return Ok(Self::Named(protocol, shared(&wire.name)));
        }
        if wire.first == 0 {
            return Ok(Self::All(protocol));
        }
        let (first, last) = (port("first", wire.first)?, port("last", wire.last)?);
        if first <= last {
            Ok(Self::Range(protocol, first, last))
        } else {
            Err(ConvertError::new(
                "last",
                format!("{last} is below {first}"),
            ))
        }
    }
}
