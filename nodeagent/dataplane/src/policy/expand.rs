//! What a rule allows a Pod, as elements.

use std::net::IpAddr;

use kplane_model::{
    Direction, Family, LocalPod, NamedPort, PeerId, Policy, PolicyPort, PolicyRule, Protocol,
};

use super::blocks::Blocks;
use super::held::Grant;
use super::numbers::Numbers;
use super::objects::{self, Objects};

/// One of the other ends that a rule names.
#[derive(Clone, Copy, Debug)]
pub(super) enum Member {
    Everybody,
    /// A class, a namespace, or all Pods.
    Peer(PeerId),
    /// The number of a range of addresses.
    Range(u32),
}

/// What rules refer to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms<'a> {
    pub(super) family: Family,
    pub(super) objects: &'a Objects,
    pub(super) numbers: &'a Numbers,
    pub(super) blocks: &'a Blocks,
}

impl Terms<'_> {
    /// Passes on all that a policy allows a Pod.
    pub(super) fn policy(&self, pod: &LocalPod, policy: &Policy, each: &mut impl FnMut(Grant)) {
        for (direction, rule) in objects::rules(policy) {
            let Some(peers) = &rule.peers else {
                self.rule(pod, (direction, rule), Member::Everybody, each);
                continue;
            };
            for member in peers.groups.iter().flat_map(|id| self.objects.members(*id)) {
                self.rule(pod, (direction, rule), Member::Peer(member), each);
            }
            for number in peers
                .blocks
                .iter()
                .flat_map(|block| self.blocks.numbers(block))
            {
                self.rule(pod, (direction, rule), Member::Range(*number), each);
            }
        }
    }

    /// Passes on what a rule allows a Pod with one of the other ends.
    pub(super) fn rule(
        &self,
        pod: &LocalPod,
        (direction, rule): (Direction, &PolicyRule),
        member: Member,
        each: &mut impl FnMut(Grant),
    ) {
        let number = match member {
            Member::Everybody => Some(0),
            Member::Peer(id) => self.numbers.get(id),
            Member::Range(number) => Some(number),
        };
        let Some(number) = number else { return };
        for address in addresses(pod, self.family) {
            let mut grant = |number, ports| {
                each(Grant {
                    direction,
                    pod: address,
                    number,
                    ports,
                });
            };
            let Some(ports) = &rule.ports else {
                grant(number, None);
                continue;
            };
            for port in ports {
                match (port, direction) {
                    (PolicyPort::All(protocol), _) => grant(number, Some((*protocol, 0, u16::MAX))),
                    (PolicyPort::Range(protocol, first, last), _) => {
                        grant(number, Some((*protocol, *first, *last)));
                    }
                    (PolicyPort::Named(protocol, name), Direction::Ingress) => {
                        for port in named(&pod.ports, *protocol, name) {
                            grant(number, Some((*protocol, port, port)));
                        }
                    }
                    (PolicyPort::Named(protocol, name), Direction::Egress) => {
                        self.named_peers(member, *protocol, name, &mut grant);
                    }
                }
            }
        }
    }

    /// Passes on the classes of other ends that have a port of this name, since the number of the port differs.
    fn named_peers(
        &self,
        member: Member,
        protocol: Protocol,
        name: &str,
        grant: &mut impl FnMut(u32, Option<(Protocol, u16, u16)>),
    ) {
        for (class, ported) in &self.objects.ported {
            let is_meant = match member {
                Member::Everybody => true,
                Member::Peer(id) => id == *class || id == ported.parent || id == PeerId::ALL_PODS,
                // The ports of addresses outside have no names.
                Member::Range(_) => false,
            };
            let Some(number) = self.numbers.get(*class).filter(|_| is_meant) else {
                continue;
            };
            for port in named(&ported.ports, protocol, name) {
                grant(number, Some((protocol, port, port)));
            }
        }
    }
}

/// Returns a Pod's addresses of a family.
pub(super) fn addresses(pod: &LocalPod, family: Family) -> impl Iterator<Item = IpAddr> {
    let addresses = pod.addresses.iter().copied();
    addresses.filter(move |address| Family::of(*address) == family)
}

fn named(ports: &[NamedPort], protocol: Protocol, name: &str) -> impl Iterator<Item = u16> {
    let ports = ports.iter();
    let named = ports.filter(move |port| port.protocol == protocol && &*port.name == name);
    named.map(|port| port.port)
}
