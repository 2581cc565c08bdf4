//! What NetworkPolicies say of packets: the oracle of the control plane's unit tests, which is written from the text of the
//! API, asked about the objects of a moment.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{
    Block, Family, NamedPort, NodeName, PodName, PolicyName, Protocol, ServiceName,
};
use kplane_policy::{
    ClusterPolicy, Judgement, Labels, NetworkPolicy, Node, PeerSpec, Pod, Requirement, Rule,
    Selector, TierRule,
};

use crate::dice::Dice;
use crate::truth::{Id, Object, Objects, node_address, node_labels, node_name, pod_ranges};

#[allow(
    dead_code,
    reason = "the control plane's tests ask for more than the simulation"
)]
#[path = "../../../controlplane/policy/src/tests/oracle.rs"]
mod oracle;
#[allow(
    dead_code,
    reason = "the control plane's tests ask for more than the simulation"
)]
#[path = "../../../controlplane/policy/src/tests/random.rs"]
pub(crate) mod random;

/// Packets about which each state is asked.
const SAMPLE: usize = 40;

/// The objects of a moment that NetworkPolicies are about.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cluster {
    policies: BTreeMap<PolicyName, NetworkPolicy>,
    tiers: BTreeMap<Arc<str>, ClusterPolicy>,
    nodes: BTreeMap<NodeName, Node>,
    namespaces: BTreeMap<Arc<str>, Labels>,
    pods: BTreeMap<PodName, Pod>,
    /// No NetworkPolicies are known, although there may be some.
    is_unread: bool,
}

impl Cluster {
    pub(crate) fn of(objects: &Objects) -> Self {
        let mut cluster = Self::default();
        for (id, (_, object)) in objects {
            match (id, &**object) {
                (_, Object::Policy(policy)) => {
                    cluster.policies.insert(policy.name.clone(), policy.clone());
                }
                (_, Object::Tiers(policy)) => {
                    cluster.tiers.insert(policy.name.clone(), policy.clone());
                }
                (Id::Namespace(_), Object::Namespace(labels)) => {
                    cluster.namespaces.insert(id.name(), labels.clone());
                }
                (_, Object::Pod(workload)) if workload.counts() => {
                    cluster.pods.insert(workload.pod.name.clone(), workload.pod.clone());
                }
                (Id::Node(number), Object::Node { zone, ranged }) => {
                    let ranges = pod_ranges(*number).into_iter().filter(|_| *ranged);
                    let node = Node {
                        labels: node_labels(*zone),
                        addresses: vec![node_address(*number)],
                        ranges: ranges.collect(),
                    };
                    cluster.nodes.insert(node_name(*number), node);
                }
                _ => {}
            }
        }
        cluster
    }

    /// Returns what is known of it before NetworkPolicies are.
    pub(crate) fn unread(self) -> Self {
        Self {
            nodes: self.nodes,
            is_unread: true,
            ..Self::default()
        }
    }

    /// Compares an answer of the control plane about a packet with what the API says.
    pub(crate) fn compare(&self, packet: &Packet, judged: &Judgement) -> Option<String> {
        let Packet {
            from,
            to,
            protocol,
            port,
        } = *packet;
        let expected = oracle::allows(self, from, to, protocol, port);
        let twice = [from, to].iter().any(|ip| oracle::holders(self, *ip).len() > 1);
        if self.is_unsure(from) || self.is_unsure(to) {
            return None;
        }
        let differs = judged.is_allowed() != expected && !(twice && judged.is_allowed());
        differs
            .then(|| format!("{packet}: the API says {expected}, and the control plane {judged:?}"))
    }

    /// Returns what a node may do with packets. Where the API, or what the node remembers, leaves it open, it may do both.
    pub(crate) fn answers(&self, node: u8, packets: &[Packet]) -> Answers {
        let mut answers = Answers::default();
        for (bit, packet) in packets.iter().enumerate() {
            let (passes, dropped) = match self.passes(node, packet) {
                Some(passes) => (passes, !passes),
                None => (true, true),
            };
            answers.pass |= u64::from(passes) << bit;
            answers.drop |= u64::from(dropped) << bit;
        }
        answers
    }

    /// Returns whether a node lets a packet pass; `None` = it may do either.
    fn passes(&self, node: u8, packet: &Packet) -> Option<bool> {
        if !self.is_unread && self.policies.is_empty() && self.tiers.is_empty() {
            return Some(true);
        }
        let name = node_name(node);
        let ends = [packet.from, packet.to];
        if ends.contains(&node_address(node)) {
            // NP11
            return None;
        }
        if ends.iter().any(|ip| self.is_unsure(*ip)) {
            return None;
        }
        let here = |ip| oracle::holders(self, ip).into_iter().find(|pod| pod.node == name);
        let [source, destination] = ends.map(here);
        if let (Some(source), Some(destination)) = (source, destination)
            && source.name == destination.name
            && packet.from != packet.to
        {
            // Such packets do not leave the Pod.
            return None;
        }
        let is_open = oracle::is_open(
            self,
            (source, packet.from),
            (destination, packet.to),
            packet.protocol,
            packet.port,
        );
        // NP19
        let is_in_range = |ip: IpAddr| match self.nodes.get(&name) {
            Some(node) => node.ranges.iter().any(|range| range.contains(ip)),
            None => pod_ranges(node).iter().any(|range| range.contains(ip)),
        };
        let unknown = |(ip, pod): (IpAddr, Option<&Pod>)| pod.is_none() && is_in_range(ip);
        let mut unknown = ends
            .into_iter()
            .zip([source, destination])
            .filter(|end| unknown(*end))
            .peekable();
        if unknown.peek().is_none() || !is_open {
            // No packet reaches a node without Pods that it is about. A kernel that refuses a family keeps what it has then.
            let is_about = source.is_some() || destination.is_some();
            return is_about.then_some(is_open);
        }
        // A Node object that is gone named the ranges, or the ranges say nothing, and another node's Pod has the address.
        let mut may_be_known = unknown.map(|(ip, _)| {
            self.ranges_are_void(node, Family::of(ip)) && !oracle::holders(self, ip).is_empty()
        });
        let is_unsure = !self.nodes.contains_key(&name) || may_be_known.all(|known| known);
        if is_unsure { None } else { Some(false) }
    }

    /// Returns whether it is not said which Pod an address means: Pods of several nodes claim it, and it may lie in a range
    /// that a node had before its Node object went.
    fn is_unsure(&self, ip: IpAddr) -> bool {
        let holders = oracle::holders(self, ip);
        holders.len() > 1 && holders.iter().any(|pod| !self.nodes.contains_key(&pod.node))
    }

    /// Returns whether a Pod of a node has an address outside of the node's ranges.
    fn ranges_are_void(&self, node: u8, family: Family) -> bool {
        let name = node_name(node);
        let outside = |ip: &IpAddr| {
            Family::of(*ip) == family && !pod_ranges(node).iter().any(|range| range.contains(*ip))
        };
        self.pods
            .values()
            .filter(|pod| pod.node == name)
            .any(|pod| pod.addresses.iter().any(outside))
    }
}

/// The first packet of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
    pub(crate) protocol: Protocol,
    pub(crate) port: u16,
}

impl Packet {
    /// Returns all packets that make a difference.
    pub(crate) fn all() -> Vec<Self> {
        let kinds = [
            (Protocol::Tcp, 80),
            (Protocol::Tcp, 81),
            (Protocol::Udp, 80),
            (Protocol::Sctp, 80),
        ];
        let mut addresses = random::addresses();
        addresses.extend([0, 1].map(node_address));
        let mut all = Vec::new();
        for from in &addresses {
            for to in &addresses {
                let (from, to) = (*from, *to);
                if Family::of(from) == Family::of(to) {
                    all.extend(kinds.map(|(protocol, port)| Self {
                        from,
                        to,
                        protocol,
                        port,
                    }));
                }
            }
        }
        all
    }

    /// Returns some packets, which a seed chooses.
    pub(crate) fn sample(seed: u64) -> Vec<Self> {
        let mut dice = Dice::new(seed);
        let mut all = Self::all();
        let mut some = Vec::new();
        for _ in 0..SAMPLE {
            let at = usize::try_from(dice.below(all.len() as u64)).unwrap_or(0);
            some.push(all.swap_remove(at));
        }
        some
    }
}

impl fmt::Display for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            from,
            to,
            protocol,
            port,
        } = self;
        write!(f, "{from} -> {to} {port}/{protocol}")
    }
}

/// The packets that may pass, and those that may be dropped, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Answers {
    pub(crate) pass: u64,
    pub(crate) drop: u64,
}

impl Answers {
    /// Everything passes.
    pub(crate) const OPEN: Self = Self {
        pass: u64::MAX,
        drop: 0,
    };

    /// Packets of a family may do both.
    pub(crate) fn either(of: Family, packets: &[Packet]) -> Self {
        let is_of = |(_, packet): &(usize, &Packet)| Family::of(packet.from) == of;
        let bits = packets.iter().enumerate().filter(is_of).fold(0, |all, (bit, _)| all | 1 << bit);
        Self {
            pass: bits,
            drop: bits,
        }
    }

    /// Returns the same, where some packets may be dropped as well.
    pub(crate) fn or_dropped(mut self, packets: &[Packet], some: impl Fn(&Packet) -> bool) -> Self {
        let bits = packets.iter().enumerate().filter(|(_, packet)| some(packet));
        self.drop = bits.fold(self.drop, |drop, (bit, _)| drop | 1 << bit);
        self
    }

    /// Returns the first packet that passes and must not, or that is dropped and must not be, if these are the ones that
    /// pass.
    pub(crate) fn wrong(self, passing: u64, packets: &[Packet]) -> Option<(Packet, bool)> {
        packets.iter().enumerate().find_map(|(bit, packet)| {
            let is = |bits: u64| bits & (1 << bit) != 0;
            let allowed = if is(passing) { self.pass } else { self.drop };
            (!is(allowed)).then_some((*packet, is(passing)))
        })
    }
}

impl std::ops::BitOr for Answers {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self {
            pass: self.pass | other.pass,
            drop: self.drop | other.drop,
        }
    }
}

/// Reads `namespace/name`.
pub(crate) fn name(text: &str) -> ServiceName {
    let (namespace, name) = text.split_once('/').unwrap();
    ServiceName::new(namespace, name)
}

fn named(name: &str, protocol: Protocol, port: u16) -> NamedPort {
    NamedPort {
        name: name.into(),
        protocol,
        port,
    }
}

fn block(range: &str, except: &[&str]) -> PeerSpec {
    PeerSpec::Block(Block {
        range: range.parse().unwrap(),
        except: except.iter().map(|text| text.parse().unwrap()).collect(),
    })
}
