//! Decides a connection by the published objects alone, as the agents of all nodes together would.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{
    Direction, GroupId, GroupPart, LocalPod, NamedPort, NodeName, PeerId, Policy, PolicyKey,
    PolicyName, PolicyObject, PolicyPort, PolicyRule, PortActions, Protocol, Tier, TierAction,
    TierSpan,
};

use crate::PolicyChanges;

/// All published objects: those of all nodes, and those of each.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Agent {
    pub(super) shared: BTreeMap<PolicyKey, PolicyObject>,
    pub(super) own: BTreeMap<(NodeName, PolicyKey), PolicyObject>,
}

impl Agent {
    /// Takes changes. Each must change something.
    pub(super) fn apply(&mut self, changes: PolicyChanges) {
        for (key, object) in changes.shared {
            assert!(key.is_shared());
            match object {
                Some(object) => {
                    assert_eq!(object.key(), key);
                    let before = self.shared.insert(key, object.clone());
                    assert_ne!(before, Some(object));
                }
                None => assert!(self.shared.remove(&key).is_some(), "{key}"),
            }
        }
        for change in changes.own {
            assert!(!change.key.is_shared() && !change.nodes.is_empty());
            for node in change.nodes {
                let place = (node, change.key.clone());
                match &change.object {
                    Some(object) => {
                        assert_eq!(object.key(), change.key);
                        let before = self.own.insert(place, object.clone());
                        assert_ne!(before.as_ref(), Some(object));
                    }
                    None => assert!(self.own.remove(&place).is_some(), "{place:?}"),
                }
            }
        }
    }

    /// Returns the Pods of all nodes.
    pub(super) fn pods(&self) -> impl Iterator<Item = (&NodeName, &LocalPod)> {
        self.own.iter().filter_map(|((node, _), object)| match object {
            PolicyObject::Pod(pod) => Some((node, pod)),
            _ => None,
        })
    }

    /// Returns the parts of groups of all nodes.
    pub(super) fn parts(&self) -> impl Iterator<Item = (&NodeName, &GroupPart)> {
        self.own.iter().filter_map(|((node, _), object)| match object {
            PolicyObject::Group(part) => Some((node, part)),
            _ => None,
        })
    }

    /// Checks that nodes have the policies of their Pods and the groups of these policies, and nothing else.
    fn check_interest(&self, view: &View<'_>) {
        let mut policies = BTreeSet::new();
        for (node, pod) in self.pods() {
            policies.extend(pod.policies.iter().map(|policy| (node, policy)));
        }
        let known: BTreeSet<_> = view.policies.keys().copied().collect();
        assert_eq!(known, policies);
        let mut groups = BTreeSet::new();
        for ((node, _), policy) in &view.policies {
            let rules = Direction::ALL.map(|direction| policy.rules(direction).unwrap_or_default());
            let peers = rules.into_iter().flatten().filter_map(|rule| rule.peers.as_ref());
            groups.extend(peers.flat_map(|peers| peers.groups.iter().map(|group| (*node, *group))));
        }
        for (node, part) in self.parts() {
            assert!(groups.contains(&(node, part.group)), "{node}: {part:?}");
        }
        let namespaces: BTreeSet<_> = self
            .shared
            .keys()
            .filter_map(|key| match key {
                PolicyKey::Namespace(name) => Some(name),
                _ => None,
            })
            .collect();
        assert!(known.iter().all(|(_, policy)| namespaces.contains(&policy.namespace)));
    }

    /// Returns a view in which an address is found quickly. All references must lead somewhere.
    pub(super) fn view(&self) -> View<'_> {
        let mut view = View::default();
        for object in self.shared.values() {
            match object {
                PolicyObject::Peer(peer) => {
                    let class = self.shared.get(&PolicyKey::Class(peer.class));
                    let Some(PolicyObject::Class(class)) = class else {
                        panic!("{peer:?} has no class");
                    };
                    let chain = vec![class.id, class.parent, PeerId::ALL_PODS];
                    view.peers.insert(peer.address, (chain, &class.ports));
                    view.tiers.extend(peer.tier.map(|tier| (peer.address, tier)));
                }
                PolicyObject::Span(span) => {
                    let before = view.spans.last();
                    assert!(
                        before.is_none_or(|before| before.last < span.first),
                        "{span:?}"
                    );
                    view.spans.push(*span);
                }
                PolicyObject::Decisions(decisions) => {
                    assert!(decisions.part == 0 || !decisions.rows.is_empty());
                    let known = view.decisions.entry(decisions.subject).or_default();
                    for row in &decisions.rows {
                        assert!(row.peers.is_sorted());
                        for peer in &row.peers {
                            assert_eq!(peer.0[0], decisions.part);
                            let key = (row.direction, row.tier, *peer);
                            assert_eq!(known.insert(key, &row.actions), None);
                        }
                    }
                }
                _ => {}
            }
        }
        for (node, part) in self.parts() {
            assert!(!part.members.is_empty() && part.members.is_sorted());
            let members = view.members.entry((node, part.group)).or_default();
            assert!(part.members.iter().all(|member| !members.contains(member)));
            members.extend(&part.members);
        }
        for ((node, _), object) in &self.own {
            if let PolicyObject::Policy(policy) = object {
                view.policies.insert((node, &policy.name), policy);
            }
        }
        let mut counting = BTreeSet::new();
        for (node, pod) in self.pods() {
            assert!(pod.policies.is_sorted() && pod.ports.is_sorted());
            for address in &pod.addresses {
                assert!(counting.insert((node, address)), "{address} twice");
                view.pods.entry(*address).or_default().push((node, pod));
            }
        }
        self.check_interest(&view);
        view
    }

    pub(super) fn allows(&self, from: IpAddr, to: IpAddr, protocol: Protocol, port: u16) -> bool {
        self.view().allows(from, to, protocol, port)
    }
}

/// A Pod, and the node that enforces its policies with what it has.
type PodOn<'a> = (&'a NodeName, &'a LocalPod);

/// Decisions by direction, tier and other end.
type Rows<'a> = HashMap<(Direction, Tier, PeerId), &'a PortActions>;

#[derive(Default)]
pub(super) struct View<'a> {
    peers: HashMap<IpAddr, (Vec<PeerId>, &'a [NamedPort])>,
    members: HashMap<(&'a NodeName, GroupId), Vec<PeerId>>,
    policies: HashMap<(&'a NodeName, &'a PolicyName), &'a Policy>,
    pods: HashMap<IpAddr, Vec<PodOn<'a>>>,
    tiers: HashMap<IpAddr, PeerId>,
    spans: Vec<TierSpan>,
    decisions: HashMap<PeerId, Rows<'a>>,
}

impl View<'_> {
    /// Returns whether the nodes of all Pods with these addresses let a connection pass.
    pub(super) fn allows(&self, from: IpAddr, to: IpAddr, protocol: Protocol, port: u16) -> bool {
        let pods = |address| match self.pods.get(&address) {
            None => vec![None],
            Some(pods) => pods.iter().map(Some).collect(),
        };
        pods(from).into_iter().all(|source| {
            pods(to)
                .into_iter()
                .all(|pod| self.is_open((source, from), (pod, to), protocol, port))
        })
    }

    fn is_open(
        &self,
        (source, from): (Option<&PodOn<'_>>, IpAddr),
        (destination, to): (Option<&PodOn<'_>>, IpAddr),
        protocol: Protocol,
        port: u16,
    ) -> bool {
        if let (Some(source), Some(destination)) = (source, destination)
            && source.1.name == destination.1.name
        {
            return true;
        }
        let at_peer = self.peers.get(&to).map_or(&[][..], |(_, ports)| ports);
        let at_pod = destination.map_or(&[][..], |(_, pod)| &pod.ports);
        let egress = |node: &NodeName, rule: &PolicyRule| {
            // Ranges of addresses have no containers, whose ports have names.
            let port_of = |ports| has_port(rule, ports, protocol, port);
            self.in_groups(node, rule, to) && port_of(at_peer)
                || in_blocks(rule, to) && port_of(&[])
        };
        let ingress = |node: &NodeName, rule: &PolicyRule| {
            (self.in_groups(node, rule, from) || in_blocks(rule, from))
                && has_port(rule, at_pod, protocol, port)
        };
        let side = |pod: Option<&PodOn<'_>>, direction, other, passes: bool| {
            let decide = |tier| match pod.and_then(|(_, pod)| pod.tier) {
                None => TierAction::Pass,
                Some(subject) => {
                    let decisions = &self.decisions[&subject];
                    self.tier(other)
                        .and_then(|of| decisions.get(&(direction, tier, of)))
                        .map_or(TierAction::Pass, |of| of.action(protocol, port))
                }
            };
            let mut isolated = self.rules(pod, direction);
            match decide(Tier::Admin) {
                TierAction::Accept => true,
                TierAction::Deny => false,
                TierAction::Pass if isolated.next().is_some() => passes,
                TierAction::Pass => decide(Tier::Baseline) != TierAction::Deny,
            }
        };
        let passes = self.passes(source, Direction::Egress, egress);
        let egress = side(source, Direction::Egress, to, passes);
        let passes = self.passes(destination, Direction::Ingress, ingress);
        egress && side(destination, Direction::Ingress, from, passes)
    }

    fn tier(&self, address: IpAddr) -> Option<PeerId> {
        let in_span = |span: &&TierSpan| span.first <= address && address <= span.last;
        let span = || self.spans.iter().find(in_span).map(|span| span.tier);
        if self.peers.contains_key(&address) {
            // A Pod's class counts the ranges as well.
            let tier = self.tiers.get(&address).copied();
            assert!(tier.is_some() || span().is_none());
            tier
        } else {
            span()
        }
    }

    fn passes(
        &self,
        pod: Option<&PodOn<'_>>,
        direction: Direction,
        allows: impl Fn(&NodeName, &PolicyRule) -> bool,
    ) -> bool {
        let Some((node, _)) = pod else { return true };
        let rules: Vec<_> = self.rules(pod, direction).collect();
        let mut all = rules.iter().copied().flatten();
        rules.is_empty() || all.any(|rule| allows(node, rule))
    }

    /// Returns the rules of each policy of a Pod that is about a direction.
    fn rules(
        &self,
        pod: Option<&PodOn<'_>>,
        direction: Direction,
    ) -> impl Iterator<Item = &[PolicyRule]> {
        pod.into_iter()
            .flat_map(|(node, pod)| pod.policies.iter().map(|name| (*node, name)))
            .filter_map(move |policy| self.policies[&policy].rules(direction))
    }

    fn in_groups(&self, node: &NodeName, rule: &PolicyRule, address: IpAddr) -> bool {
        let Some(peers) = &rule.peers else {
            return true;
        };
        let chain = self.peers.get(&address).map_or(&[][..], |(chain, _)| chain);
        peers.groups.iter().any(|group| {
            let members = self.members.get(&(node, *group));
            let members = members.map_or(&[][..], |members| members);
            chain.iter().any(|id| members.contains(id))
        })
    }
}

fn in_blocks(rule: &PolicyRule, address: IpAddr) -> bool {
    rule.peers.iter().flat_map(|peers| &peers.blocks).any(|block| {
        block.range.contains(address) && block.except.iter().all(|e| !e.contains(address))
    })
}

fn has_port(rule: &PolicyRule, named: &[NamedPort], protocol: Protocol, port: u16) -> bool {
    let is = |name: &Arc<str>, p: &Protocol| {
        let one = NamedPort {
            name: name.clone(),
            protocol: *p,
            port,
        };
        *p == protocol && named.contains(&one)
    };
    rule.ports.as_ref().is_none_or(|ports| {
        ports.iter().any(|allowed| match allowed {
            PolicyPort::All(p) => *p == protocol,
            PolicyPort::Range(p, first, last) => *p == protocol && (*first..=*last).contains(&port),
            PolicyPort::Named(p, name) => is(name, p),
        })
    })
}
