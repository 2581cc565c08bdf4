//! Answers for operators: may a connection come about, and why?
//!
//! They follow from the inputs, and not from the published objects, so tests compare both.

use std::net::IpAddr;

use std::sync::Arc;

use kplane_model::{
    Direction, Family, PodName, PolicyName, PolicyPort, Protocol, Tier, TierAction,
};

use crate::group::{GroupSpec, Namespaces};
use crate::namespaces::NamespaceLabels;
use crate::pods;
use crate::rules::Entry;
use crate::{PeerSpec, Policies, Rule};

/// An end of a connection.
///
/// A Pod that is not known, such as a finished one or one on its node's network, is nobody: nothing isolates it, and only
/// rules for everybody allow it (NP12, NP18). Ask by address instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// A Pod, whichever of its addresses is used: of the families that both ends have.
    Pod(PodName),
    /// An address. If a Pod has it, that Pod.
    Address(IpAddr),
}

/// What policies say about a connection. It comes about if both directions allow it (NP1). A Pod and its own node can
/// always reach each other (NP11): callers know nodes' addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// What the policies of the source say.
    pub egress: Verdict,
    /// What the policies of the destination say.
    pub ingress: Verdict,
}

impl Judgement {
    /// Returns whether the connection comes about.
    pub fn is_allowed(&self) -> bool {
        [&self.egress, &self.ingress].map(Verdict::is_allowed) == [true; 2]
    }
}

/// What policies say about a direction of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The Pod talks to itself, which is always allowed (NP15).
    Itself,
    /// No policy isolates the end in this direction, or the end is not a Pod (NP1).
    NotIsolated,
    /// A rule allows the connection. Others may do so as well.
    Allowed {
        /// The policy.
        policy: PolicyName,
        /// The rule's index among the policy's rules of the direction.
        rule: usize,
        /// The peer's index in the rule; `None` = the rule is for everybody.
        peer: Option<usize>,
    },
    /// These policies isolate the Pod, and no rule allows the connection. Sorted.
    Denied(Vec<PolicyName>),
    /// A ClusterNetworkPolicy accepts or denies it.
    Ruled(Ruling),
}

/// The rule of a ClusterNetworkPolicy that counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ruling {
    /// The policy.
    pub policy: Arc<str>,
    /// Its tier.
    pub tier: Tier,
    /// Its priority.
    pub priority: u16,
    /// The rule's index among the policy's rules of the direction.
    pub rule: usize,
    /// What happens to the connection.
    pub action: TierAction,
}

/// The rule that comes nearest to allowing a connection that is denied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nearest {
    /// The policy.
    pub policy: PolicyName,
    /// The rule's index among the policy's rules of the direction.
    pub rule: usize,
    /// What the rule lacks.
    pub lacks: Lack,
}

/// What a rule lacks to allow a connection. The order is that of nearness.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lack {
    /// The other end is one of its peers, and the port is none of its ports.
    Port,
    /// The port is one of its ports, and the other end is none of its peers.
    Peer,
}

impl Verdict {
    /// Returns whether the connection is allowed.
    pub fn is_allowed(&self) -> bool {
        match self {
            Self::Itself | Self::NotIsolated | Self::Allowed { .. } => true,
            Self::Denied(_) => false,
            Self::Ruled(ruling) => ruling.action == TierAction::Accept,
        }
    }
}

/// An end, looked up.
pub(crate) struct Found<'a> {
    pub(crate) pod: Option<(&'a PodName, &'a pods::PodEntry)>,
    pub(crate) addresses: Vec<IpAddr>,
}

/// The destination's port.
#[derive(Clone, Copy)]
pub(crate) struct Port<'a> {
    protocol: Protocol,
    port: u16,
    pod: Option<&'a pods::PodEntry>,
}

impl Policies {
    /// Returns what the policies say about a new connection to a port. Addresses and port are those that the Pods see
    /// (NP14).
    pub fn judge(&self, from: &End, to: &End, protocol: Protocol, port: u16) -> Judgement {
        let (source, destination) = self.find_both(from, to);
        let name = |end: &Found<'_>| end.pod.map(|(name, _)| name.clone());
        if name(&source).is_some() && name(&source) == name(&destination) {
            let (egress, ingress) = (Verdict::Itself, Verdict::Itself);
            return Judgement { egress, ingress };
        }
        let port = Port::of(&destination, protocol, port);
        Judgement {
            egress: self.verdict(Direction::Egress, &source, &destination, port),
            ingress: self.verdict(Direction::Ingress, &destination, &source, port),
        }
    }

    /// Returns the rule that comes nearest to allowing a connection that NetworkPolicies deny in a direction; `None` if
    /// each rule lacks both, the peer and the port, or there is none.
    pub fn nearest(
        &self,
        direction: Direction,
        (from, to): (&End, &End),
        protocol: Protocol,
        port: u16,
    ) -> Option<Nearest> {
        let (source, destination) = self.find_both(from, to);
        let port = Port::of(&destination, protocol, port);
        let (subject, other) = match direction {
            Direction::Ingress => (&destination, &source),
            Direction::Egress => (&source, &destination),
        };
        let (name, pod) = subject.pod?;
        let entries = self.policies.enforced(&name.namespace, &pod.labels).0;
        let rules = entries.into_iter().flat_map(|entry| {
            entry
                .rules(direction)
                .unwrap_or_default()
                .iter()
                .enumerate()
                .map(move |(at, rule)| (entry, at, rule))
        });
        let near = rules.filter_map(|(entry, at, rule)| {
            let lacks = match (port.is_among(rule, true), self.peer_of(entry, rule, other)) {
                (false, Some(_)) => Lack::Port,
                (true, None) => Lack::Peer,
                (true, Some(_)) | (false, None) => return None,
            };
            let near = Nearest {
                policy: entry.policy.name.clone(),
                rule: at,
                lacks,
            };
            // A rule that names the port is nearer than one for all ports.
            Some(((lacks, rule.ports.is_none()), near))
        });
        near.min_by_key(|(distance, _)| *distance).map(|(_, near)| near)
    }

    /// Returns both ends, with the addresses of the families that both have.
    fn find_both<'a>(&'a self, from: &'a End, to: &'a End) -> (Found<'a>, Found<'a>) {
        let (mut source, mut destination) = (self.find(from), self.find(to));
        let (of_source, of_destination) = (source.families(), destination.families());
        source.keep_families(of_destination);
        destination.keep_families(of_source);
        (source, destination)
    }

    fn find<'a>(&'a self, end: &'a End) -> Found<'a> {
        let (name, addresses) = match end {
            End::Pod(name) => (Some(name), self.pods.addresses(name).collect()),
            End::Address(address) => (self.pods.of_address(*address), vec![*address]),
        };
        let pod = name.and_then(|name| Some((name, self.pods.get(name)?)));
        Found { pod, addresses }
    }

    /// Returns what the policies of one end say about the other.
    fn verdict(
        &self,
        direction: Direction,
        subject: &Found<'_>,
        other: &Found<'_>,
        port: Port<'_>,
    ) -> Verdict {
        let Some((name, pod)) = subject.pod else {
            return Verdict::NotIsolated;
        };
        let ruling = |tier| {
            let (of, tiers) = ((tier, direction), &self.tiers);
            let ruling = tiers.ruling(of, (name, pod), other, port, &self.namespaces);
            ruling.filter(|ruling| ruling.action != TierAction::Pass)
        };
        if let Some(ruling) = ruling(Tier::Admin) {
            return Verdict::Ruled(ruling);
        }
        let mut isolating = Vec::new();
        for entry in self.policies.enforced(&name.namespace, &pod.labels).0 {
            let Some(rules) = entry.rules(direction) else {
                continue;
            };
            isolating.push(entry.policy.name.clone());
            for (number, rule) in rules.iter().enumerate() {
                if let Some(peer) = self.allows(entry, rule, direction, other, port) {
                    return Verdict::Allowed {
                        policy: entry.policy.name.clone(),
                        rule: number,
                        peer,
                    };
                }
            }
        }
        if isolating.is_empty() {
            ruling(Tier::Baseline).map_or(Verdict::NotIsolated, Verdict::Ruled)
        } else {
            Verdict::Denied(isolating)
        }
    }

    /// Returns which peer of a rule is allowed, if one is: `Some(None)` = everybody.
    fn allows(
        &self,
        entry: &Entry,
        rule: &Rule,
        direction: Direction,
        other: &Found<'_>,
        port: Port<'_>,
    ) -> Option<Option<usize>> {
        let Some(peers) = &rule.peers else {
            return port.is_among(rule, true).then_some(None);
        };
        let own = &entry.policy.name.namespace;
        let allows = |peer: &PeerSpec| {
            // A name is that of a container's port, and a range of addresses has no containers.
            let names = direction == Direction::Ingress || !matches!(peer, PeerSpec::Block(_));
            other.is_among(peer, own, &self.namespaces) && port.is_among(rule, names)
        };
        peers.iter().position(allows).map(Some)
    }

    /// Returns which peer of a rule an end is, whatever the port: `Some(None)` = everybody.
    fn peer_of(&self, entry: &Entry, rule: &Rule, other: &Found<'_>) -> Option<Option<usize>> {
        let Some(peers) = &rule.peers else {
            return Some(None);
        };
        let own = &entry.policy.name.namespace;
        let is = |peer| other.is_among(peer, own, &self.namespaces);
        peers.iter().position(is).map(Some)
    }
}

impl Found<'_> {
    /// Returns whether it is one of a peer. `own` is the policy's namespace.
    pub(crate) fn is_among(&self, peer: &PeerSpec, own: &Arc<str>, all: &NamespaceLabels) -> bool {
        match peer {
            PeerSpec::Block(block) => self.addresses.iter().any(|address| {
                let mut except = block.except.iter();
                block.range.contains(*address) && !except.any(|e| e.contains(*address))
            }),
            PeerSpec::Pods { namespaces, pods } => {
                let Some((name, pod)) = self.pod else {
                    return false;
                };
                let group = GroupSpec::of(own, namespaces.as_ref(), pods.as_ref());
                let is_there = match &group.namespaces {
                    Namespaces::Own(own) => name.namespace == *own,
                    Namespaces::Selected(some) => all.meet(&name.namespace, some),
                };
                is_there && pod.labels.meet(&group.pods)
            }
            // Only ClusterNetworkPolicies know nodes.
            PeerSpec::Nodes(_) => false,
        }
    }

    /// Returns whether it has addresses of each family.
    fn families(&self) -> [bool; 2] {
        let has = |family| self.addresses.iter().any(|a| Family::of(*a) == family);
        Family::ALL.map(has)
    }

    /// Leaves out addresses of families that the other end does not have (NP16).
    fn keep_families(&mut self, others: [bool; 2]) {
        if others == [false; 2] {
            return;
        }
        let [v4, v6] = others;
        self.addresses.retain(|address| Family::of(*address).pick(v4, v6));
    }
}

impl<'a> Port<'a> {
    fn of(destination: &Found<'a>, protocol: Protocol, port: u16) -> Self {
        let pod = destination.pod.map(|(_, entry)| entry);
        Self {
            protocol,
            port,
            pod,
        }
    }

    /// Returns whether a rule allows the port. `names` says whether names of ports mean anything.
    fn is_among(self, rule: &Rule, names: bool) -> bool {
        let counts = |port: &&PolicyPort| names || !matches!(port, PolicyPort::Named(..));
        let ports = rule.ports.as_ref();
        ports.is_none_or(|ports| ports.iter().filter(counts).any(|port| self.is(port)))
    }

    pub(crate) fn is(self, allowed: &PolicyPort) -> bool {
        match allowed {
            PolicyPort::All(protocol) => self.protocol == *protocol,
            PolicyPort::Range(protocol, first, last) => {
                self.protocol == *protocol && (*first..=*last).contains(&self.port)
            }
            PolicyPort::Named(protocol, name) => {
                let ports = self.pod.map(|pod| &pod.ports[..]).unwrap_or_default();
                let named =
                    |p: &kplane_model::NamedPort| (&p.name, p.protocol) == (name, *protocol);
                let mut named = ports.iter().filter(|p| named(p));
                self.protocol == *protocol && named.any(|p| p.port == self.port)
            }
        }
    }
}
