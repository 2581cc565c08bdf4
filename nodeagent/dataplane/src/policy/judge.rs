//! What the kernel does with the first packet of a connection: the same look-ups as its chains.

use std::net::IpAddr;

use kplane_model::{Direction, Protocol, Tier, TierAction};

use super::content::Content;
use crate::backend::nftables::{Key, PolicySet};
use crate::conntrack::AnyFlow;

/// A packet as it is forwarded: behind destination NAT, before source NAT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    /// The protocol and the destination's port; `None` = a protocol without ports, of which only rules for all ports
    /// speak.
    pub(super) port: Option<(Protocol, u16)>,
}

impl From<&AnyFlow> for Packet {
    fn from(flow: &AnyFlow) -> Self {
        Self {
            source: flow.source,
            destination: flow.destination,
            port: flow.port,
        }
    }
}

impl Content {
    /// Returns whether policies let a packet pass.
    pub(super) fn allows(&self, packet: &Packet) -> bool {
        let (source, destination) = (packet.source, packet.destination);
        let has = |set, ip| self.held.has(set, Key::Ip(ip));
        if source == destination && self.held.has(PolicySet::Loops, Key::Loop(source)) {
            return true;
        }
        let mut ends = [source, destination].into_iter();
        if ends.any(|ip| self.is_in_range(ip) && !has(PolicySet::LocalPods, ip)) {
            return false;
        }
        self.passes(Direction::Egress, source, destination, packet)
            && self.passes(Direction::Ingress, destination, source, packet)
    }

    /// Returns whether a Pod's policies for a direction let a packet pass.
    fn passes(&self, direction: Direction, pod: IpAddr, other: IpAddr, packet: &Packet) -> bool {
        let has = |set| self.held.has(set, Key::Ip(pod));
        let decides = has(PolicySet::Tiered(direction));
        let action = |tier| {
            if decides {
                self.action((direction, tier), (pod, other), packet)
            } else {
                TierAction::Pass
            }
        };
        match action(Tier::Admin) {
            TierAction::Accept => true,
            TierAction::Deny => false,
            TierAction::Pass if has(PolicySet::Isolated(direction)) => {
                self.matches(direction, pod, other, packet)
            }
            TierAction::Pass => action(Tier::Baseline) != TierAction::Deny,
        }
    }

    /// Returns whether something allows a packet between a Pod and another end.
    fn matches(&self, direction: Direction, pod: IpAddr, other: IpAddr, packet: &Packet) -> bool {
        let parent = |number: Option<u32>| {
            let key = number.map(Key::Number);
            key.and_then(|key| self.held.number(PolicySet::Parents, key))
        };
        let class = self.held.number(PolicySet::Peers, Key::Ip(other));
        let namespace = parent(class);
        let numbers = [Some(0), class, namespace, parent(namespace)];
        // From the innermost range outwards.
        let ranges = std::iter::successors(self.blocks.find(other), |range| parent(Some(*range)));
        let on_port = |number, (protocol, port)| {
            let key = Key::GrantPort(pod, number, protocol, port);
            self.held.has(PolicySet::Ports(direction), key)
                || self.held.in_range((direction, pod, number, protocol), port)
        };
        numbers.into_iter().flatten().chain(ranges).any(|number| {
            self.held.has(PolicySet::All(direction), Key::Grant(pod, number))
                || packet.port.is_some_and(|port| on_port(number, port))
        })
    }
}
