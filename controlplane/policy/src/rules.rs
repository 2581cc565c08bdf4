//! A policy's rules: which groups and port names they use, their size in a message, and how agents get them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kplane_model::{Block, Direction, GroupId, Peers, Policy, PolicyPort, PolicyRule, Protocol};

use crate::group::GroupSpec;
use crate::{NetworkPolicy, PeerSpec, Rule, Selector};

/// The name and protocol of a container port.
pub(crate) type PortName = (Arc<str>, Protocol);

/// A policy as it is enforced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) policy: NetworkPolicy,
    /// The size of its object in bytes, at most.
    pub(crate) size: usize,
    /// What it takes of its namespace's share: its object, and the groups of Pods that it names.
    pub(crate) weight: usize,
    /// The policy fits into no message. It isolates its Pods then, and allows nothing.
    pub(crate) is_too_large: bool,
    /// The policy is beyond the share of its namespace. It isolates its Pods then, and allows nothing.
    pub(crate) is_beyond: bool,
    /// The groups that it names are beyond the share of its namespace. It isolates its Pods then, and allows nothing.
    pub(crate) is_wide: bool,
    /// Its rules are not known any more.
    pub(crate) is_forgotten: bool,
}

/// What a group of Pods takes of a namespace's share, in bytes: its selector, its members, and its parts on nodes.
const GROUP: usize = 1 << 10;

impl Entry {
    /// Takes a policy over, whose object may have this size in bytes.
    pub(crate) fn new(policy: NetworkPolicy, max: usize) -> Self {
        let size = size(&policy);
        let mut entry = Self {
            size,
            weight: size + GROUP * groups(&policy),
            is_too_large: size > max,
            is_beyond: false,
            is_wide: false,
            is_forgotten: false,
            policy,
        };
        if entry.is_too_large {
            entry.weight = 0;
            entry.forget();
        }
        entry
    }

    /// Returns whether it allows nothing, whatever its rules say.
    fn is_stub(&self) -> bool {
        self.is_too_large || self.is_beyond || self.is_wide
    }

    /// Forgets the rules.
    pub(crate) fn forget(&mut self) {
        let policy = &mut self.policy;
        for rules in policy.ingress.iter_mut().chain(&mut policy.egress) {
            *rules = Vec::new();
        }
        self.is_forgotten = true;
    }

    /// Returns the rules of a direction; `None` = the policy is not about it.
    pub(crate) fn rules(&self, direction: Direction) -> Option<&[Rule]> {
        let rules = match direction {
            Direction::Ingress => self.policy.ingress.as_deref(),
            Direction::Egress => self.policy.egress.as_deref(),
        };
        rules.map(|rules| if self.is_stub() { &[] } else { rules })
    }

    /// Returns what Pods' objects take from the policy, apart from its name.
    pub(crate) fn matters_to_pods(&self) -> (&Selector, [bool; 2], BTreeSet<PortName>) {
        let types = Direction::ALL.map(|d| self.rules(d).is_some());
        (&self.policy.pods, types, self.names(Direction::Ingress))
    }

    /// Returns the names of ports in rules of a direction.
    pub(crate) fn names(&self, direction: Direction) -> BTreeSet<PortName> {
        self.rules(direction)
            .unwrap_or_default()
            .iter()
            .filter_map(|rule| rule.ports.as_ref())
            .flatten()
            .filter_map(|port| match port {
                PolicyPort::Named(protocol, name) => Some((Arc::clone(name), *protocol)),
                _ => None,
            })
            .collect()
    }

    /// Returns the groups that rules name.
    pub(crate) fn groups(&self) -> BTreeMap<GroupId, GroupSpec> {
        if self.is_stub() { BTreeMap::new() } else { self.written_groups() }
    }

    /// Returns the groups that rules name as they are written, whether or not they count.
    pub(crate) fn written_groups(&self) -> BTreeMap<GroupId, GroupSpec> {
        self.policy
            .ingress
            .iter()
            .chain(&self.policy.egress)
            .flatten()
            .filter_map(|rule| rule.peers.as_ref())
            .flatten()
            .filter_map(|peer| match peer {
                PeerSpec::Pods { namespaces, pods } => Some(self.group(namespaces, pods)),
                PeerSpec::Block(_) | PeerSpec::Nodes(_) => None,
            })
            .map(|spec| (spec.id(), spec))
            .collect()
    }

    fn group(&self, namespaces: &Option<Selector>, pods: &Option<Selector>) -> GroupSpec {
        let own = &self.policy.name.namespace;
        GroupSpec::of(own, namespaces.as_ref(), pods.as_ref())
    }

    /// Returns the object that agents get.
    pub(crate) fn object(&self) -> Policy {
        let rules =
            |direction| Some(self.rules(direction)?.iter().map(|rule| self.rule(rule)).collect());
        Policy {
            name: self.policy.name.clone(),
            ingress: rules(Direction::Ingress),
            egress: rules(Direction::Egress),
        }
    }

    fn rule(&self, rule: &Rule) -> PolicyRule {
        let peers = rule.peers.as_ref().map(|peers| {
            let mut groups = BTreeSet::new();
            let mut blocks = BTreeSet::new();
            for peer in peers {
                match peer {
                    PeerSpec::Pods { namespaces, pods } => {
                        groups.insert(self.group(namespaces, pods).id());
                    }
                    PeerSpec::Block(block) => {
                        blocks.insert(block.clone());
                    }
                    PeerSpec::Nodes(_) => {}
                }
            }
            Peers {
                groups: groups.into_iter().collect(),
                blocks: blocks.into_iter().collect(),
            }
        });
        let ports = rule.ports.as_ref().map(|ports| {
            let ports: BTreeSet<_> = ports.iter().cloned().collect();
            ports.into_iter().collect()
        });
        PolicyRule { peers, ports }
    }
}

/// Returns the size of a policy's object in bytes, or somewhat more. It counts what each field takes on the wire.
fn size(policy: &NetworkPolicy) -> usize {
    let rules = policy.ingress.iter().chain(&policy.egress).flatten();
    let name = policy.name.namespace.len() + policy.name.name.len();
    64 + name + rules.map(size_of_rule).sum::<usize>()
}

/// Returns how many peers of a policy are Pods with some labels.
fn groups(policy: &NetworkPolicy) -> usize {
    let rules = policy.ingress.iter().chain(&policy.egress).flatten();
    let peers = rules.flat_map(|rule| &rule.peers).flatten();
    let by_label = |peer: &&PeerSpec| match peer {
        PeerSpec::Pods { pods, .. } => pods.as_ref().is_some_and(|pods| !pods.is_everything()),
        PeerSpec::Block(_) | PeerSpec::Nodes(_) => false,
    };
    peers.filter(by_label).count()
}

fn size_of_rule(rule: &Rule) -> usize {
    let peers = rule.peers.iter().flatten().map(|peer| match peer {
        PeerSpec::Pods { .. } | PeerSpec::Nodes(_) => 16,
        PeerSpec::Block(Block { except, .. }) => 32 + 28 * except.len(),
    });
    let ports = rule.ports.iter().flatten().map(|port| match port {
        PolicyPort::Named(_, name) => 16 + name.len(),
        PolicyPort::All(_) | PolicyPort::Range(..) => 16,
    });
    32 + peers.chain(ports).sum::<usize>()
}
