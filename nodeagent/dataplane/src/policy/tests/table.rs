//! A kernel of elements: it refuses what the real one refuses, and looks up as its chains do.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use kplane_model::Direction;

use super::super::content::Content;
use super::super::judge::Packet;
use crate::backend::nftables::{Contents as _, Data, Key, Ops, PolicySet, Set};

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Model(BTreeMap<(Set, Key), Option<Data>>);

impl Model {
    pub(super) fn of(content: &Content) -> Self {
        let elements = content.elements().into_iter();
        Self(elements.map(|e| ((e.set, e.key), e.data)).collect())
    }

    /// Each phase is a transaction.
    pub(super) fn change(&mut self, phases: &[Vec<Ops>]) {
        for phase in phases {
            for element in phase.iter().flat_map(|ops| &ops.delete) {
                let gone = self.0.remove(&(element.set, element.key));
                assert_eq!(gone, Some(element.data), "{element:?}");
            }
            for element in phase.iter().flat_map(|ops| &ops.add) {
                let there = self.0.insert((element.set, element.key), element.data);
                assert_eq!(there, None, "{element:?}");
            }
            self.check_ranges();
        }
    }

    fn check_ranges(&self) {
        let mut last: Option<(Set, Key)> = None;
        for (set, key) in self.0.keys() {
            let before = last.filter(|(other, _)| other == set).map(|(_, key)| key);
            let overlaps = match (before, *key) {
                (Some(Key::Span(_, last)), Key::Span(first, _)) => first <= last,
                (Some(Key::GrantPorts(a, b, c, _, last)), Key::GrantPorts(x, y, z, first, _)) => {
                    (a, b, c) == (x, y, z) && first <= last
                }
                _ => false,
            };
            assert!(!overlaps, "{last:?} {key:?}");
            last = Some((*set, *key));
        }
    }

    fn has(&self, set: PolicySet, key: Key) -> bool {
        self.0.contains_key(&(Set::Policy(set), key))
    }

    fn number(&self, set: PolicySet, key: Key) -> Option<u32> {
        match self.0.get(&(Set::Policy(set), key))? {
            Some(Data::Number(number)) => Some(*number),
            _ => None,
        }
    }

    fn find(&self, set: PolicySet, found: impl Fn(Key) -> bool) -> Option<u32> {
        let set = Set::Policy(set);
        let of = self
            .0
            .iter()
            .find(|((other, key), _)| *other == set && found(*key));
        of.map(|(_, data)| match data {
            Some(Data::Number(number)) => *number,
            _ => 0,
        })
    }

    fn is_unknown(&self, ip: IpAddr) -> bool {
        let covers = |key| matches!(key, Key::Range(range) if range.contains(ip));
        let in_range = self.find(PolicySet::LocalRanges, covers).is_some();
        in_range && !self.has(PolicySet::LocalPods, Key::Ip(ip))
    }

    /// Chain `new`, without the midst of TCP.
    pub(super) fn allows(&self, packet: &Packet) -> bool {
        let (source, destination) = (packet.source, packet.destination);
        if source == destination && self.has(PolicySet::Loops, Key::Loop(source)) {
            return true;
        }
        if self.is_unknown(source) || self.is_unknown(destination) {
            return false;
        }
        if self.has(PolicySet::Isolated(Direction::Egress), Key::Ip(source))
            && !self.check(Direction::Egress, (source, destination), packet)
        {
            return false;
        }
        !self.has(
            PolicySet::Isolated(Direction::Ingress),
            Key::Ip(destination),
        ) || self.check(Direction::Ingress, (destination, source), packet)
    }

    /// Chains `ingress-check` and `egress-check`: a look-up that finds nothing leaves the number as it is.
    fn check(&self, direction: Direction, (pod, other): (IpAddr, IpAddr), packet: &Packet) -> bool {
        let mut number = 0;
        if self.matches(direction, pod, number, packet) {
            return true;
        }
        for set in [
            PolicySet::Peers,
            PolicySet::Parents,
            PolicySet::Parents,
            PolicySet::Blocks,
        ] {
            let found = match set {
                PolicySet::Peers => self.number(set, Key::Ip(other)),
                PolicySet::Parents => self.number(set, Key::Number(number)),
                _ => self.find(
                    set,
                    |key| matches!(key, Key::Span(first, last) if first <= other && other <= last),
                ),
            };
            if let Some(found) = found {
                number = found;
                if self.matches(direction, pod, number, packet) {
                    return true;
                }
            }
        }
        false
    }

    fn matches(&self, direction: Direction, pod: IpAddr, number: u32, packet: &Packet) -> bool {
        let (protocol, port) = (packet.protocol, packet.port);
        let in_range = |key| {
            matches!(key, Key::GrantPorts(p, n, proto, first, last)
                if (p, n, proto) == (pod, number, protocol) && first <= port && port <= last)
        };
        self.has(PolicySet::All(direction), Key::Grant(pod, number))
            || self.has(
                PolicySet::Ports(direction),
                Key::GrantPort(pod, number, protocol, port),
            )
            || self.find(PolicySet::Ranges(direction), in_range).is_some()
    }
}

/// Returns the elements with what their numbers stand for, since each process gives its own numbers.
pub(super) fn described(content: &Content) -> BTreeSet<String> {
    let mut names = BTreeMap::from([(0, "anybody".to_owned())]);
    names.extend(
        content
            .numbers
            .all()
            .map(|(id, number)| (number, format!("{id:?}"))),
    );
    let blocks = content.blocks.all();
    names.extend(blocks.map(|(blocks, number)| (number, format!("{blocks:?}"))));
    let elements = content.held.all().map(|((set, key), value)| {
        let key = match key {
            Key::Number(number) => names[&number].clone(),
            Key::Grant(pod, number) => format!("{pod} {}", names[&number]),
            Key::GrantPort(pod, number, protocol, port) => {
                format!("{pod} {} {protocol} {port}", names[&number])
            }
            Key::GrantPorts(pod, number, protocol, first, last) => {
                format!("{pod} {} {protocol} {first} {last}", names[&number])
            }
            key => format!("{key:?}"),
        };
        let value = value.map(|number| names[&number].clone());
        format!("{set:?} {key} {value:?}")
    });
    elements.collect()
}
