//! What policies say about a packet, straight from the objects.

use std::net::IpAddr;

use kplane_model::{
    Direction, LocalPod, PeerClass, PeerId, Peers, PolicyKey, PolicyObject, PolicyPort, PolicyRule,
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
        let is_known = |ip| self.pods(ip).next().is_some();
        if source == destination && is_known(source) {
            return true;
        }
        let is_here = |ip| ranges().iter().any(|range| range.contains(ip));
        if [source, destination]
            .into_iter()
            .any(|ip| is_here(ip) && !is_known(ip))
        {
            return false;
        }
        self.side(Direction::Egress, source, destination, packet)
            && self.side(Direction::Ingress, destination, source, packet)
    }

    fn side(&self, direction: Direction, at: IpAddr, other: IpAddr, packet: &Packet) -> bool {
        let mut isolated = false;
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
        !isolated
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
        let (protocol, port) = (packet.protocol, packet.port);
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
                let mut ports = ports.iter();
                let has = ports.any(|at| at.name == *name && at.protocol == *p && at.port == port);
                *p == protocol && meant && has
            }
        })
    }

    fn in_groups(&self, peers: &Peers, id: Option<PeerId>, class: Option<&PeerClass>) -> bool {
        let Some(id) = id else { return false };
        let mut names = vec![id];
        names.extend(class.map(|class| class.parent));
        names.extend(class.map(|_| PeerId::ALL_PODS));
        let mut groups = self.world.values().filter_map(|object| match object {
            PolicyObject::Group(group) if peers.groups.contains(&group.group) => Some(group),
            _ => None,
        });
        groups.any(|group| group.members.iter().any(|member| names.contains(member)))
    }
}
