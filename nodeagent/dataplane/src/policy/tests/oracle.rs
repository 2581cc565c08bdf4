//! What policies say about a packet, straight from the objects.

use std::net::IpAddr;

use kplane_model::{
    Direction, LocalPod, PeerClass, PeerId, Peers, PolicyKey, PolicyObject, PolicyPort, PolicyRule,
    PortActions, Tier, TierAction,
};

use super::super::judge::Packet;
use super::{World, ranges};

pub(super) struct Oracle<'a> {
    pub(super) world: &'a World,
}

impl Oracle<'_> {
    fn pods(&self, address: IpAddr) -> impl Iterator<Item = &LocalPod> {
        self.world.values().filter_map(move |object| match object {
            PolicyObject::Pod(pod) if pod.addresses.contains(&address) => Some(pod),
            _ => None,
        })
    }

    pub(super) fn allows(&self, packet: &Packet) -> bool {
        let (source, destination) = (packet.source, packet.destination);
        let is_here = |ip| ranges().iter().any(|range| range.contains(ip));
        let ranges_are_void = self.world.values().any(|object| match object {
            PolicyObject::Pod(pod) => pod.addresses.iter().any(|ip| !is_here(*ip)),
            _ => false,
        });
        let is_elsewhere = |ip| {
            let is_peer = self.world.contains_key(&PolicyKey::Peer(ip));
            ranges_are_void && is_peer && self.pods(ip).next().is_none()
        };
        let is_known = |ip| self.pods(ip).any(|pod| self.knows(pod)) || is_elsewhere(ip);
        if source == destination && self.pods(source).next().is_some() {
            return true;
        }
        if [source, destination].into_iter().any(|ip| is_here(ip) && !is_known(ip)) {
            return false;
        }
        self.side(Direction::Egress, source, destination, packet)
            && self.side(Direction::Ingress, destination, source, packet)
    }

    fn side(&self, direction: Direction, at: IpAddr, other: IpAddr, packet: &Packet) -> bool {
        match self.tier((direction, Tier::Admin), at, other, packet) {
            TierAction::Accept => return true,
            TierAction::Deny => return false,
            TierAction::Pass => {}
        }
        let mut isolated = self.pods(at).any(|pod| !self.knows(pod));
        for pod in self.pods(at) {
            for name in &pod.policies {
                let Some(PolicyObject::Policy(policy)) =
                    self.world.get(&PolicyKey::Policy(name.clone()))
                else {
                    isolated = true;
                    continue;
                };
                for rule in policy.rules(direction).into_iter().flatten() {
                    if self.matches(pod, direction, rule, other, packet) {
                        return true;
                    }
                }
                isolated |= policy.rules(direction).is_some();
            }
        }
        let baseline = self.tier((direction, Tier::Baseline), at, other, packet);
        !isolated && baseline != TierAction::Deny
    }

    /// Returns whether the decisions for a Pod are known.
    fn knows(&self, pod: &LocalPod) -> bool {
        let is_it =
            |key: &PolicyKey| matches!(key, PolicyKey::Decisions(id, _) if Some(*id) == pod.tier);
        pod.tier.is_none() || self.world.keys().any(is_it)
    }

    /// What a tier decides. If two Pods have the address and do not agree, everything is denied.
    fn tier(
        &self,
        (direction, tier): (Direction, Tier),
        at: IpAddr,
        other: IpAddr,
        packet: &Packet,
    ) -> TierAction {
        let mut end = None;
        // Spans that overlap an earlier one do not count.
        let mut covered = None;
        for object in self.world.values() {
            if let PolicyObject::Span(span) = object
                && covered.is_none_or(|last| last < span.first)
            {
                covered = Some(span.last);
                if (span.first..=span.last).contains(&other) {
                    end = Some(span.tier);
                }
            }
        }
        if let Some(PolicyObject::Peer(peer)) = self.world.get(&PolicyKey::Peer(other)) {
            end = peer.tier.or(end);
        }
        let mut found: Vec<&PortActions> = Vec::new();
        for pod in self.pods(at) {
            for object in self.world.values() {
                if let PolicyObject::Decisions(of) = object
                    && Some(of.subject) == pod.tier
                {
                    let mut rows = of
                        .rows
                        .iter()
                        .filter(|row| (row.direction, row.tier) == (direction, tier))
                        .filter(|row| row.peers.iter().any(|p| Some(*p) == end));
                    found.extend(rows.next().map(|row| &row.actions));
                }
            }
        }
        found.dedup();
        match found[..] {
            [] => TierAction::Pass,
            [actions] => match packet.port {
                Some((protocol, port)) => actions.action(protocol, port),
                None => actions.rest,
            },
            _ => TierAction::Deny,
        }
    }

    fn matches(
        &self,
        pod: &LocalPod,
        direction: Direction,
        rule: &PolicyRule,
        other: IpAddr,
        packet: &Packet,
    ) -> bool {
        let id = match self.world.get(&PolicyKey::Peer(other)) {
            Some(PolicyObject::Peer(peer)) => Some(peer.class),
            _ => None,
        };
        let class = id.and_then(|id| match self.world.get(&PolicyKey::Class(id)) {
            Some(PolicyObject::Class(class)) => Some(class),
            _ => None,
        });
        let by_group = match &rule.peers {
            None => true,
            Some(peers) => self.in_groups(peers, id, class),
        };
        let by_block = rule.peers.as_ref().is_some_and(|peers| {
            peers.blocks.iter().any(|block| {
                block.range.contains(other) && !block.except.iter().any(|e| e.contains(other))
            })
        });
        let Some(ports) = &rule.ports else {
            return by_group || by_block;
        };
        let Some((protocol, port)) = packet.port else {
            return false;
        };
        let mut ports = ports.iter();
        ports.any(|wanted| match wanted {
            PolicyPort::All(p) => *p == protocol && (by_group || by_block),
            PolicyPort::Range(p, first, last) => {
                *p == protocol && (*first..=*last).contains(&port) && (by_group || by_block)
            }
            PolicyPort::Named(p, name) => {
                let ports = match direction {
                    Direction::Ingress => &pod.ports[..],
                    Direction::Egress => class.map_or(&[][..], |class| &class.ports),
                };
                let meant = match direction {
                    Direction::Ingress => by_group || by_block,
                    Direction::Egress => by_group,
                };
                let has =
                    ports.iter().any(|at| at.name == *name && at.protocol == *p && at.port == port);
                *p == protocol && meant && has
            }
        })
    }

    fn in_groups(&self, peers: &Peers, id: Option<PeerId>, class: Option<&PeerClass>) -> bool {
        let Some(id) = id else { return false };
        let mut names = vec![id];
        names.extend(class.map(|class| class.parent));
        names.extend(class.map(|_| PeerId::ALL_PODS));
        self.world
            .values()
            .filter_map(|object| match object {
                PolicyObject::Group(group) if peers.groups.contains(&group.group) => Some(group),
                _ => None,
            })
            .any(|group| group.members.iter().any(|member| names.contains(member)))
    }
}
