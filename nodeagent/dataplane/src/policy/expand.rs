//! What a rule allows a Pod, as elements.

use std::net::IpAddr;

use kplane_model::{
    Direction, Family, LocalPod, NamedPort, PeerId, Policy, PolicyPort, PolicyRule, Protocol,
};

use super::held::Grant;
use super::numbers::Numbers;
use super::objects::{self, Objects};
use super::ported::PortName;

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
}

impl Terms<'_> {
    /// Passes on all that a policy allows a Pod. `ranges` has the numbers of the ranges of each rule, in the order of
    /// [`objects::rules`].
    pub(super) fn policy(
        &self,
        pod: &LocalPod,
        policy: &Policy,
        ranges: &[Vec<u32>],
        each: &mut impl FnMut(Grant),
    ) {
        for ((direction, rule), ranges) in objects::rules(policy).zip(ranges) {
            let Some(peers) = &rule.peers else {
                self.rule(pod, (direction, rule), Member::Everybody, each);
                continue;
            };
            for member in peers.groups.iter().flat_map(|id| self.objects.members(*id)) {
                self.rule(pod, (direction, rule), Member::Peer(member), each);
            }
            for number in ranges {
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
                        for (class, port) in self.bearers(member, &(*protocol, name.clone())) {
                            if let Some(number) = self.numbers.get(class) {
                                grant(number, Some((*protocol, port, port)));
                            }
                        }
                    }
                }
            }
        }
    }

    /// Returns the classes of a member that have a port of this name, with its number there. The ports of addresses outside
    /// have no names.
    pub(super) fn bearers(
        &self,
        member: Member,
        name: &PortName,
    ) -> impl Iterator<Item = (PeerId, u16)> {
        let member = match member {
            Member::Everybody => Some(None),
            Member::Peer(id) => Some(Some(id)),
            Member::Range(_) => None,
        };
        let ported = &self.objects.ported;
        member.into_iter().flat_map(move |member| ported.bearers(member, name))
    }
}

/// Returns a Pod's addresses of a family.
pub(super) fn addresses(pod: &LocalPod, family: Family) -> impl Iterator<Item = IpAddr> {
    pod.addresses
        .iter()
        .copied()
        .filter(move |address| Family::of(*address) == family)
}

/// Returns the numbers of the ports of a name.
pub(super) fn named(
    ports: &[NamedPort],
    protocol: Protocol,
    name: &str,
) -> impl Iterator<Item = u16> {
    ports
        .iter()
        .filter(move |port| port.protocol == protocol && &*port.name == name)
        .map(|port| port.port)
}
