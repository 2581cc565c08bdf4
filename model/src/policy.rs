//! NetworkPolicies as agents get them.
//!
//! A packet's other end is found in one step: each address of a Pod leads to a [`PeerClass`], whose Pods no rule can tell
//! apart. Classes belong to namespaces, and these to all Pods. Rules name [groups](GroupPart), which are
//! sets of classes, namespaces, or all Pods. So a new Pod of a known workload is one [`Peer`], whatever the number of
//! policies.
//!
//! Nodes share addresses and classes, which no NetworkPolicy changes, and the names of namespaces with one. A [`LocalPod`]
//! is for the Pod's own node, a [`Policy`] for the nodes of Pods that it selects, and a group for the nodes of policies that
//! name it. So what a tenant writes goes to the nodes of its own Pods only.
//!
//! Identities are digests of what they stand for, so that all replicas of a control plane name the same thing alike.
//! Ids such as NP6 refer to the list of semantics of NetworkPolicies.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use crate::cidr::Cidr;
use crate::key::ServiceName;
use crate::net::Protocol;

/// Namespace and name of a NetworkPolicy.
pub type PolicyName = ServiceName;

/// Namespace and name of a Pod.
pub type PodName = ServiceName;

/// Identity of something that a rule can allow as a whole: a class, a namespace, or all Pods.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub [u8; 16]);

/// Identity of a group: of the selectors of a peer in a rule.
pub type GroupId = PeerId;

impl PeerId {
    /// All Pods of the cluster that have addresses of their own.
    pub const ALL_PODS: Self = Self([0; 16]);
}

impl fmt::Debug for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// Identity of a [`PolicyObject`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicyKey {
    /// An address of a Pod.
    Peer(IpAddr),
    /// A class of Pods.
    Class(PeerId),
    /// A part of a group.
    Group(GroupId, u8),
    /// A policy.
    Policy(PolicyName),
    /// A namespace with a policy.
    Namespace(Arc<str>),
    /// A ClusterNetworkPolicy.
    Cluster(Arc<str>),
    /// The first and the last address of a [`TierSpan`].
    Span(IpAddr, IpAddr),
    /// The Pods and the part of [`Decisions`].
    Decisions(PeerId, u8),
    /// A Pod of the node. The last kind, so that these are together in the order of keys.
    Pod(PodName),
}

impl PolicyKey {
    /// Returns whether all nodes have the object. The others are for the nodes of some Pods.
    pub fn is_shared(&self) -> bool {
        !matches!(self, Self::Group(..) | Self::Policy(_) | Self::Pod(_))
    }
}

impl fmt::Display for PolicyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Peer(address) => write!(f, "Pod address {address}"),
            Self::Class(id) => write!(f, "class {id:?} of Pods"),
            Self::Group(id, part) => write!(f, "group {id:?} of Pods, part {part}"),
            Self::Policy(name) => write!(f, "NetworkPolicy {name}"),
            Self::Namespace(name) => write!(f, "namespace {name} with NetworkPolicies"),
            Self::Cluster(name) => write!(f, "ClusterNetworkPolicy {name}"),
            Self::Span(first, last) => write!(f, "addresses {first} to {last}"),
            Self::Decisions(id, part) => {
                write!(
                    f,
                    "decisions of ClusterNetworkPolicies for Pods {id:?}, part {part}"
                )
            }
            Self::Pod(name) => write!(f, "policies of Pod {name}"),
        }
    }
}

/// An object that NetworkPolicies consist of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyObject {
    /// An address of a Pod.
    Peer(Peer),
    /// A class of Pods.
    Class(PeerClass),
    /// A part of a group.
    Group(GroupPart),
    /// A policy.
    Policy(Policy),
    /// A namespace with a policy, whomever that selects.
    Namespace(Arc<str>),
    /// A ClusterNetworkPolicy.
    Cluster(Arc<str>),
    /// Addresses outside of Pods.
    Span(TierSpan),
    /// Decisions of ClusterNetworkPolicies.
    Decisions(Decisions),
    /// A Pod of the node.
    Pod(LocalPod),
}

impl PolicyObject {
    /// Returns the object's identity.
    pub fn key(&self) -> PolicyKey {
        match self {
            Self::Peer(peer) => PolicyKey::Peer(peer.address),
            Self::Class(class) => PolicyKey::Class(class.id),
            Self::Group(group) => PolicyKey::Group(group.group, group.part),
            Self::Policy(policy) => PolicyKey::Policy(policy.name.clone()),
            Self::Namespace(name) => PolicyKey::Namespace(name.clone()),
            Self::Cluster(name) => PolicyKey::Cluster(name.clone()),
            Self::Span(span) => PolicyKey::Span(span.first, span.last),
            Self::Decisions(of) => PolicyKey::Decisions(of.subject, of.part),
            Self::Pod(pod) => PolicyKey::Pod(pod.name.clone()),
        }
    }
}

/// An address of a Pod, and the Pod's class. Pods on their node's network, and finished ones, have none (NP12, NP18).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The address.
    pub address: IpAddr,
    /// The class.
    pub class: PeerId,
    /// What ClusterNetworkPolicies take the address for; `None` = no rule of them names it.
    pub tier: Option<PeerId>,
}

/// Pods of a namespace with the same labels and the same named ports. No policy changes which Pods these are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerClass {
    /// The identity.
    pub id: PeerId,
    /// The namespace's identity, of which the class is a part.
    pub parent: PeerId,
    /// The namespace.
    pub namespace: Arc<str>,
    /// Container ports with names, sorted and unique: egress rules may name them (NP9).
    pub ports: Vec<NamedPort>,
}

/// A container port with a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamedPort {
    /// The name.
    pub name: Arc<str>,
    /// The protocol.
    pub protocol: Protocol,
    /// The port.
    pub port: u16,
}

/// A part of a group's members: those whose identities begin with the same bits, the more bits the larger the group is. So
/// a new class changes a small object, and a small group is one object. Groups without members have no part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupPart {
    /// The group.
    pub group: GroupId,
    /// The first bits of the members' identities.
    pub part: u8,
    /// Classes, namespaces, or all Pods; sorted and unique.
    pub members: Vec<PeerId>,
}

/// A NetworkPolicy. Which Pods it is for, the Pods say.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// The policy's name.
    pub name: PolicyName,
    /// What may come to its Pods; `None` = the policy is not about ingress (NP3).
    pub ingress: Option<Vec<PolicyRule>>,
    /// What its Pods may reach; `None` = the policy is not about egress (NP3).
    pub egress: Option<Vec<PolicyRule>>,
}

impl Policy {
    /// Returns the rules of a direction; `None` = the policy is not about it.
    pub fn rules(&self, direction: Direction) -> Option<&[PolicyRule]> {
        match direction {
            Direction::Ingress => self.ingress.as_deref(),
            Direction::Egress => self.egress.as_deref(),
        }
    }
}

/// The side of a connection that a rule is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// Connections to the Pod.
    Ingress,
    /// Connections from the Pod.
    Egress,
}

impl Direction {
    /// Both directions.
    pub const ALL: [Self; 2] = [Self::Ingress, Self::Egress];
}

/// What a rule allows: connections with one of the peers, to one of the ports (NP2).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PolicyRule {
    /// The other ends; `None` = everybody (NP4).
    pub peers: Option<Peers>,
    /// The destination's ports; `None` = all ports of all protocols (NP8, NP20).
    pub ports: Option<Vec<PolicyPort>>,
}

/// Other ends of connections; nobody if both are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Peers {
    /// Groups of Pods.
    pub groups: Vec<GroupId>,
    /// Ranges of addresses. Pods with such addresses are among them (NP7).
    pub blocks: Vec<Block>,
}

/// A range of addresses without some ranges in it (NP7).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block {
    /// The range.
    pub range: Cidr,
    /// Ranges in it that this block does not allow.
    pub except: Vec<Cidr>,
}

/// A port, or several, of a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicyPort {
    /// All ports of a protocol (NP8).
    All(Protocol),
    /// A port, or all ports up to a last one (NP10). The first is not above the last.
    Range(Protocol, u16, u16),
    /// The container port of this name at the destination (NP9).
    Named(Protocol, Arc<str>),
}

/// A Pod of the node for which the policies are known. Pods on the node's network have none (NP12).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalPod {
    /// The Pod.
    pub name: PodName,
    /// Its addresses, sorted and unique.
    pub addresses: Vec<IpAddr>,
    /// Its container ports with names, sorted and unique, as far as an ingress rule of its policies names them (NP9).
    pub ports: Vec<NamedPort>,
    /// The policies that select it, sorted and unique (NP1).
    pub policies: Vec<PolicyName>,
    /// Whose [`Decisions`] are for it; `None` = no ClusterNetworkPolicy selects it.
    pub tier: Option<PeerId>,
}

/// A tier of ClusterNetworkPolicies. NetworkPolicies stand between the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Before NetworkPolicies.
    Admin,
    /// For directions in which no NetworkPolicy isolates the Pod.
    Baseline,
}

impl Tier {
    /// Both tiers, in order.
    pub const ALL: [Self; 2] = [Self::Admin, Self::Baseline];
}

/// The action of a rule of a ClusterNetworkPolicy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TierAction {
    /// The connection is denied.
    Deny,
    /// The rest of the tier does not count.
    Pass,
    /// The connection is allowed, as far as this direction is concerned.
    Accept,
}

/// Addresses, apart from those of Pods, that no rule of a ClusterNetworkPolicy can tell apart. Spans do not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierSpan {
    /// The first address.
    pub first: IpAddr,
    /// The last address, of the same family and not below the first.
    pub last: IpAddr,
    /// What ClusterNetworkPolicies take them for.
    pub tier: PeerId,
}

/// What the ClusterNetworkPolicies that select some Pods decide about other ends whose identities begin with a byte.
/// Of Pods with decisions, part 0 is always there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decisions {
    /// The Pods: [`LocalPod::tier`].
    pub subject: PeerId,
    /// The first byte of the other ends' identities.
    pub part: u8,
    /// The decisions. No other end is in two rows of a direction and tier.
    pub rows: Vec<DecisionRow>,
}

/// The decision about some other ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecisionRow {
    /// The direction.
    pub direction: Direction,
    /// The tier.
    pub tier: Tier,
    /// The actions.
    pub actions: PortActions,
    /// The other ends, sorted and unique.
    pub peers: Vec<PeerId>,
}

/// Actions by the destination's port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortActions {
    /// The action for all other ports and protocols.
    pub rest: TierAction,
    /// Ranges of ports with other actions, sorted. They do not overlap.
    pub ranges: Vec<PortAction>,
}

/// A protocol, its first and last port, and what happens to connections to them.
pub type PortAction = (Protocol, u16, u16, TierAction);

impl PortActions {
    /// The actions for what no rule is about.
    pub const PASS: Self = Self {
        rest: TierAction::Pass,
        ranges: Vec::new(),
    };
    /// The denial of everything.
    pub const DENY: Self = Self {
        rest: TierAction::Deny,
        ranges: Vec::new(),
    };

    /// Returns the action for a port.
    pub fn action(&self, protocol: Protocol, port: u16) -> TierAction {
        let range = self
            .ranges
            .iter()
            .find(|(of, first, last, _)| *of == protocol && (*first..=*last).contains(&port));
        range.map_or(self.rest, |(.., action)| *action)
    }
}
