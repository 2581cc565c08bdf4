//! What the rules of ClusterNetworkPolicies name, and which of it a Pod or an address is.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{
    Cidr, Direction, Family, NamedPort, NodeName, PeerId, PodName, PolicyPort, TierAction, ip_bits,
    ip_from_bits,
};

use crate::identity::{Encoding, Kind};
use crate::namespaces::NamespaceLabels;
use crate::pods::PodEntry;
use crate::rules::PortName;
use crate::{ClusterPolicy, Labels, PeerSpec, Selector};

/// Labels and addresses of nodes.
pub(super) type Nodes = BTreeMap<NodeName, (Labels, Vec<IpAddr>)>;

/// A policy with its rules, by direction.
#[derive(Debug)]
pub(super) struct Policy {
    pub(super) source: Arc<ClusterPolicy>,
    pub(super) rules: [Vec<ResolvedRule>; 2],
}

/// A rule, with places of peers and blocks among all.
#[derive(Debug)]
pub(super) struct ResolvedRule {
    pub(super) action: TierAction,
    pub(super) peers: BTreeSet<usize>,
    pub(super) blocks: BTreeSet<usize>,
    pub(super) ports: Option<Vec<PolicyPort>>,
}

/// Pods that rules name: selectors of their namespaces and of their labels.
type Peer = (Selector, Selector);

/// Addresses that rules name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Block {
    Network(Cidr),
    Nodes(Selector),
}

/// Things with their places.
#[derive(Debug)]
struct Places<T>(BTreeMap<T, usize>);

/// All policies, and what their rules name.
#[derive(Debug, Default)]
pub(super) struct Terms {
    /// Sorted by tier, priority and name.
    pub(super) policies: Vec<Policy>,
    peers: Vec<(PeerId, Peer)>,
    blocks: Vec<(PeerId, Block)>,
    pub(super) pieces: Pieces,
    pub(super) name_nodes: bool,
    egress_names: BTreeSet<PortName>,
    /// The peers that Pods of a namespace may be.
    of_namespace: HashMap<Arc<str>, Vec<usize>>,
}

impl Terms {
    pub(super) fn new<'a>(
        policies: impl Iterator<Item = &'a Arc<ClusterPolicy>>,
        nodes: &Nodes,
    ) -> Self {
        let mut policies: Vec<_> = policies.collect();
        policies.sort_by_key(|policy| policy.rank());
        let (mut peers, mut blocks) = (Places(BTreeMap::new()), Places(BTreeMap::new()));
        let policies = policies.into_iter().map(|policy| Policy {
            source: Arc::clone(policy),
            rules: Direction::ALL.map(|direction| {
                policy
                    .rules(direction)
                    .iter()
                    .map(|rule| ResolvedRule::new(rule, &mut peers, &mut blocks))
                    .collect()
            }),
        });
        let mut terms = Self {
            policies: policies.collect(),
            peers: peers.all(|(namespaces, pods)| {
                Encoding::new(Kind::Group).raw(&[1]).selector(namespaces).selector(pods).id()
            }),
            blocks: blocks.all(|block| match block {
                Block::Network(range) => Encoding::new(Kind::Network).text(&range.to_string()).id(),
                Block::Nodes(nodes) => Encoding::new(Kind::Nodes).selector(nodes).id(),
            }),
            ..Self::default()
        };
        let is_nodes = |(_, block): &(PeerId, Block)| matches!(block, Block::Nodes(_));
        terms.name_nodes = terms.blocks.iter().any(is_nodes);
        let [_, egress] = Direction::ALL.map(|direction| {
            terms
                .policies
                .iter()
                .flat_map(move |p| &p.rules[direction as usize])
                .flat_map(ResolvedRule::names)
                .collect()
        });
        terms.egress_names = egress;
        terms.cut(nodes);
        terms
    }

    /// Cuts the ranges of rules at all of their borders. Returns the pieces before.
    pub(super) fn cut(&mut self, nodes: &Nodes) -> Pieces {
        let ranges = self.blocks.iter().enumerate().flat_map(|(at, (_, block))| {
            let ranges: BTreeSet<(IpAddr, IpAddr)> = match block {
                Block::Network(range) => BTreeSet::from([(range.first(), range.last())]),
                Block::Nodes(selector) => nodes
                    .values()
                    .filter(|(labels, _)| selector.selects(labels))
                    .flat_map(|(_, addresses)| addresses)
                    .map(|ip| (*ip, *ip))
                    .collect(),
            };
            ranges.into_iter().map(move |(first, last)| (first, last, at))
        });
        std::mem::replace(&mut self.pieces, Pieces::new(ranges))
    }

    pub(super) fn forget_namespace(&mut self, name: &str) {
        self.of_namespace.remove(name);
    }

    /// Returns the peers of rules that a Pod is.
    pub(super) fn peers_of(
        &mut self,
        name: &PodName,
        pod: &PodEntry,
        namespaces: &NamespaceLabels,
    ) -> Vec<usize> {
        let peers = &self.peers;
        let of_namespace = self.of_namespace.entry(Arc::clone(&name.namespace));
        let candidates = of_namespace.or_insert_with(|| {
            peers
                .iter()
                .enumerate()
                .filter(|(_, (_, (at, _)))| namespaces.meet(&name.namespace, at))
                .map(|(at, _)| at)
                .collect()
        });
        let is = |at: &&usize| pod.labels.meet(&peers[**at].1.1);
        candidates.iter().filter(is).copied().collect()
    }

    /// Returns the policies that select a Pod.
    pub(super) fn policies_of(
        &self,
        name: &PodName,
        pod: &PodEntry,
        namespaces: &NamespaceLabels,
    ) -> Vec<usize> {
        self.policies
            .iter()
            .enumerate()
            .filter(|(_, of)| of.source.selects(name, pod, namespaces))
            .map(|(at, _)| at)
            .collect()
    }

    pub(super) fn egress_ports(&self, pod: &PodEntry) -> Vec<NamedPort> {
        named(pod, &self.egress_names)
    }

    pub(super) fn ingress_ports(&self, policies: &[usize], pod: &PodEntry) -> Vec<NamedPort> {
        if pod.ports.is_empty() {
            return Vec::new();
        }
        let rules = policies
            .iter()
            .flat_map(|at| &self.policies[*at].rules[Direction::Ingress as usize]);
        named(pod, &rules.flat_map(ResolvedRule::names).collect())
    }

    pub(super) fn class_id(
        &self,
        peers: &[usize],
        blocks: &[usize],
        ports: &[NamedPort],
    ) -> PeerId {
        let peers = peers.iter().map(|at| self.peers[*at].0);
        let blocks = blocks.iter().map(|at| self.blocks[*at].0);
        let mut parts: Vec<PeerId> = peers.chain(blocks).collect();
        // Their places depend on what else there is.
        parts.sort_unstable();
        let mut encoding = Encoding::new(Kind::TierClass);
        encoding.number(parts.len());
        for part in parts {
            encoding.raw(&part.0);
        }
        encoding.ports(ports.iter()).id()
    }

    pub(super) fn subject_id(&self, policies: &[usize], ports: &[NamedPort]) -> PeerId {
        let names: BTreeSet<_> =
            policies.iter().map(|at| &self.policies[*at].source.name).collect();
        let mut encoding = Encoding::new(Kind::TierSubject);
        encoding.number(names.len());
        for name in names {
            encoding.text(name);
        }
        encoding.ports(ports.iter()).id()
    }
}

impl ResolvedRule {
    fn new(rule: &crate::TierRule, peers: &mut Places<Peer>, blocks: &mut Places<Block>) -> Self {
        let mut made = Self {
            action: rule.action,
            peers: BTreeSet::new(),
            blocks: BTreeSet::new(),
            ports: rule.rule.ports.clone(),
        };
        match &rule.rule.peers {
            None => made.blocks.extend(
                Family::ALL.map(|family| blocks.of(Block::Network(Cidr::everything(family)))),
            ),
            Some(specs) => {
                for peer in specs {
                    match peer {
                        PeerSpec::Pods { namespaces, pods } => {
                            let canonical = |of: &Option<Selector>| {
                                of.as_ref().map(Selector::canonical).unwrap_or_default()
                            };
                            made.peers.insert(peers.of((canonical(namespaces), canonical(pods))));
                        }
                        PeerSpec::Block(block) => {
                            made.blocks.insert(blocks.of(Block::Network(block.range)));
                        }
                        PeerSpec::Nodes(nodes) => {
                            made.blocks.insert(blocks.of(Block::Nodes(nodes.canonical())));
                        }
                    }
                }
            }
        }
        made
    }

    fn names(&self) -> impl Iterator<Item = PortName> {
        self.ports.iter().flatten().filter_map(|port| match port {
            PolicyPort::Named(protocol, name) => Some((Arc::clone(name), *protocol)),
            _ => None,
        })
    }
}

impl<T: Ord + Clone> Places<T> {
    fn of(&mut self, thing: T) -> usize {
        let next = self.0.len();
        *self.0.entry(thing).or_insert(next)
    }

    /// Returns all things with identities, by place.
    fn all(self, id: impl Fn(&T) -> PeerId) -> Vec<(PeerId, T)> {
        let mut all: Vec<_> = self.0.into_iter().collect();
        all.sort_unstable_by_key(|(_, at)| *at);
        all.into_iter().map(|(thing, _)| (id(&thing), thing)).collect()
    }
}

fn named(pod: &PodEntry, names: &BTreeSet<PortName>) -> Vec<NamedPort> {
    let ports = pod.ports.iter();
    let is = |port: &&NamedPort| names.contains(&(Arc::clone(&port.name), port.protocol));
    ports.filter(is).cloned().collect()
}

/// Ranges of addresses that do not overlap: by the first address the last one, and the blocks that cover them.
#[derive(Debug, Default)]
pub(super) struct Pieces(BTreeMap<IpAddr, (IpAddr, Arc<[usize]>)>);

impl Pieces {
    fn new(ranges: impl Iterator<Item = (IpAddr, IpAddr, usize)>) -> Self {
        // At each border, blocks begin (true) or have ended.
        let mut borders: [BTreeMap<u128, Vec<(bool, usize)>>; 2] = Default::default();
        for (first, last, at) in ranges {
            let of_family = &mut borders[Family::of(first) as usize];
            of_family.entry(ip_bits(first)).or_default().push((true, at));
            // The last address of all has none behind it.
            if let Some(behind) = ip_bits(last).checked_add(1) {
                of_family.entry(behind).or_default().push((false, at));
            }
        }
        let mut pieces = BTreeMap::new();
        for family in Family::ALL {
            let mut open: BTreeMap<usize, usize> = BTreeMap::new();
            let mut borders = std::mem::take(&mut borders[family as usize]).into_iter().peekable();
            while let Some((first, events)) = borders.next() {
                for (begins, at) in events {
                    let count = open.entry(at).or_default();
                    *count = if begins { *count + 1 } else { count.saturating_sub(1) };
                }
                open.retain(|_, count| *count > 0);
                let last = borders.peek().map_or(u128::MAX, |(next, _)| next - 1);
                if !open.is_empty() {
                    let blocks = open.keys().copied().collect();
                    pieces.insert(
                        ip_from_bits(family, first),
                        (ip_from_bits(family, last), blocks),
                    );
                }
            }
        }
        Self(pieces)
    }

    /// Returns the blocks that cover an address.
    pub(super) fn of(&self, address: IpAddr) -> Arc<[usize]> {
        self.0
            .range(..=address)
            .next_back()
            .filter(|(_, (last, _))| *last >= address)
            .map(|(_, (_, blocks))| Arc::clone(blocks))
            .unwrap_or_default()
    }

    pub(super) fn all(&self) -> Vec<(IpAddr, IpAddr, Arc<[usize]>)> {
        self.0
            .iter()
            .map(|(first, (last, blocks))| (*first, *last, Arc::clone(blocks)))
            .collect()
    }
}
