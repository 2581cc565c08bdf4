//! Decides a connection by the published objects alone, as the agents of all nodes together would.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{
    Direction, GroupId, LocalPod, NamedPort, NodeName, PeerId, PodName, Policy, PolicyKey,
    PolicyObject, PolicyPort, PolicyRule, PortActions, Protocol, Tier, TierAction, TierSpan,
};

use crate::PolicyChanges;

/// All published objects.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Agent {
    pub(super) shared: BTreeMap<PolicyKey, PolicyObject>,
    pub(super) pods: BTreeMap<(NodeName, PodName), LocalPod>,
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
        for (node, name, pod) in changes.pods {
            match pod {
                Some(pod) => {
                    assert_eq!(pod.name, name);
                    let before = self.pods.insert((node, name), pod.clone());
                    assert_ne!(before, Some(pod));
                }
                None => assert!(self.pods.remove(&(node, name)).is_some()),
            }
        }
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
                    view.tiers
                        .extend(peer.tier.map(|tier| (peer.address, tier)));
                }
                PolicyObject::Group(part) => {
                    assert!(!part.members.is_empty() && part.members.is_sorted());
                    assert!(part.members.iter().all(|m| m.0[0] == part.part));
                    view.members
                        .entry(part.group)
                        .or_default()
                        .extend(&part.members);
                }
                PolicyObject::Policy(policy) => {
                    view.policies.insert(policy.name.clone(), policy);
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
                PolicyObject::Class(_) | PolicyObject::Pod(_) | PolicyObject::Cluster(_) => {}
            }
        }
        let mut counting = BTreeSet::new();
        for ((node, _), pod) in &self.pods {
            assert!(pod.policies.is_sorted() && pod.ports.is_sorted());
            for address in &pod.addresses {
                assert!(counting.insert((node, address)), "{address} twice");
                view.pods.entry(*address).or_default().push(pod);
            }
        }
        view
    }

    pub(super) fn allows(&self, from: IpAddr, to: IpAddr, protocol: Protocol, port: u16) -> bool {
        self.view().allows(from, to, protocol, port)
    }
}

/// Decisions by direction, tier and other end.
type Rows<'a> = HashMap<(Direction, Tier, PeerId), &'a PortActions>;

#[derive(Default)]
pub(super) struct View<'a> {
    peers: HashMap<IpAddr, (Vec<PeerId>, &'a [NamedPort])>,
    members: HashMap<GroupId, Vec<PeerId>>,
    policies: HashMap<kplane_model::PolicyName, &'a Policy>,
    pods: HashMap<IpAddr, Vec<&'a LocalPod>>,
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
            let mut destinations = pods(to).into_iter();
            destinations.all(|pod| self.is_open((source, from), (pod, to), protocol, port))
        })
    }

    fn is_open(
        &self,
        (source, from): (Option<&&LocalPod>, IpAddr),
        (destination, to): (Option<&&LocalPod>, IpAddr),
        protocol: Protocol,
        port: u16,
    ) -> bool {
        if let (Some(source), Some(destination)) = (source, destination)
            && source.name == destination.name
        {
            return true;
        }
        let at_peer = self.peers.get(&to).map_or(&[][..], |(_, ports)| ports);
        let at_pod = destination.map_or(&[][..], |pod| &pod.ports);
        let egress =
            |rule: &PolicyRule| self.has_peer(rule, to) && has_port(rule, at_peer, protocol, port);
        let ingress =
            |rule: &PolicyRule| self.has_peer(rule, from) && has_port(rule, at_pod, protocol, port);
        let side = |pod: Option<&&LocalPod>, direction, other, passes: bool| {
            let decide = |tier| match pod.and_then(|pod| pod.tier) {
                None => TierAction::Pass,
                Some(subject) => {
                    let decisions = &self.decisions[&subject];
                    let actions = self
                        .tier(other)
                        .map(|of| decisions.get(&(direction, tier, of)));
                    let actions = actions.flatten();
                    actions.map_or(TierAction::Pass, |of| of.action(protocol, port))
                }
            };
            let isolated = pod.into_iter().flat_map(|pod| &pod.policies);
            let mut isolated = isolated.filter_map(|name| self.policies[name].rules(direction));
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
        match self.peers.contains_key(&address) {
            // A Pod's class counts the ranges as well.
            true => {
                let tier = self.tiers.get(&address).copied();
                assert!(tier.is_some() || span().is_none());
                tier
            }
            false => span(),
        }
    }

    fn passes(
        &self,
        pod: Option<&&LocalPod>,
        direction: Direction,
        allows: impl Fn(&PolicyRule) -> bool,
    ) -> bool {
        let names = pod.into_iter().flat_map(|pod| &pod.policies);
        let rules: Vec<_> = names
            .filter_map(|name| self.policies[name].rules(direction))
            .collect();
        rules.is_empty() || rules.into_iter().flatten().any(allows)
    }

    fn has_peer(&self, rule: &PolicyRule, address: IpAddr) -> bool {
        let Some(peers) = &rule.peers else {
            return true;
        };
        let chain = self.peers.get(&address).map_or(&[][..], |(chain, _)| chain);
        let in_groups = peers.groups.iter().any(|group| {
            let members = self.members.get(group).map_or(&[][..], |members| members);
            chain.iter().any(|id| members.contains(id))
        });
        let in_blocks = peers.blocks.iter().any(|block| {
            block.range.contains(address) && block.except.iter().all(|e| !e.contains(address))
        });
        in_groups || in_blocks
    }
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
