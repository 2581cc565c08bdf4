//! A kernel of elements: it refuses what the real one refuses, and looks up as its chains do.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use kplane_model::{Direction, Tier};

use super::super::content::Content;
use super::super::judge::Packet;
use crate::backend::nftables::{
    ACCEPT, Contents as _, DENY, Data, Element, Key, Ops, PolicySet, Set,
};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Model(BTreeMap<(Set, Key), Option<Data>>);

impl Model {
    pub(super) fn of(content: &Content) -> Self {
        let elements = content.elements().into_iter();
        Self(elements.map(|e| ((e.set, e.key), e.data)).collect())
    }

    /// Each phase is a transaction.
    pub(super) fn change(&mut self, phases: &[Vec<Ops>]) {
        for phase in phases {
            self.step(phase);
        }
    }

    /// A transaction.
    pub(super) fn step(&mut self, phase: &[Ops]) {
        self.delete(phase.iter().flat_map(|ops| &ops.delete));
        self.add(phase.iter().flat_map(|ops| &ops.add));
    }

    pub(super) fn delete<'a>(&mut self, elements: impl IntoIterator<Item = &'a Element>) {
        for element in elements {
            let gone = self.0.remove(&(element.set, element.key));
            assert_eq!(gone, Some(element.data), "{element:?}");
        }
    }

    pub(super) fn add<'a>(&mut self, elements: impl IntoIterator<Item = &'a Element>) {
        for element in elements {
            let there = self.0.insert((element.set, element.key), element.data);
            assert_eq!(there, None, "{element:?}");
        }
        self.check_ranges();
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
                (Some(Key::Row(a, b, _, last)), Key::Row(x, y, first, _)) => {
                    (a, b) == (x, y) && first <= last
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
        let of = self.0.iter().find(|((other, key), _)| *other == set && found(*key));
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
        self.side(Direction::Egress, (source, destination), packet)
            && self.side(Direction::Ingress, (destination, source), packet)
    }

    /// Chains `egress-tiers` and `ingress-tiers`, and what comes instead of them.
    fn side(&self, direction: Direction, ends: (IpAddr, IpAddr), packet: &Packet) -> bool {
        let is_tiered = self.has(PolicySet::Tiered(direction), Key::Ip(ends.0));
        let tier = |tier| is_tiered.then(|| self.tier((direction, tier), ends, packet));
        if let Some(is_accepted) = tier(Tier::Admin).flatten() {
            return is_accepted;
        }
        if self.has(PolicySet::Isolated(direction), Key::Ip(ends.0)) {
            return self.check(direction, ends, packet);
        }
        tier(Tier::Baseline).flatten().unwrap_or(true)
    }

    /// Chains `egress-admin`, `egress-row` and `egress-action`, and their like; `None` = they return.
    fn tier(
        &self,
        (direction, tier): (Direction, Tier),
        (pod, other): (IpAddr, IpAddr),
        packet: &Packet,
    ) -> Option<bool> {
        let covers = |key| matches!(key, Key::Span(first, last) if first <= other && other <= last);
        let mut number = self.find(PolicySet::TierBlocks, covers).unwrap_or(0);
        number = self.number(PolicySet::TierPeers, Key::Ip(other)).unwrap_or(number);
        let decisions = PolicySet::Decisions(direction, tier);
        let row = self.number(decisions, Key::Grant(pod, number))?;
        let has_port = |key| {
            matches!((key, packet.port), (Key::Row(of, proto, first, last), Some((protocol, port)))
                if (of, proto) == (row, protocol) && first <= port && port <= last)
        };
        let by_port = self.find(PolicySet::RowPorts, has_port);
        let action = by_port.or_else(|| self.number(PolicySet::RowAll, Key::Number(row)));
        match action {
            Some(ACCEPT) => Some(true),
            Some(DENY) => Some(false),
            _ => None,
        }
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
        let outwards = |of: &u32| self.number(PolicySet::Parents, Key::Number(*of));
        std::iter::successors(Some(number), outwards)
            .skip(1)
            .any(|number| self.matches(direction, pod, number, packet))
    }

    fn matches(&self, direction: Direction, pod: IpAddr, number: u32, packet: &Packet) -> bool {
        if self.has(PolicySet::All(direction), Key::Grant(pod, number)) {
            return true;
        }
        let Some((protocol, port)) = packet.port else {
            return false;
        };
        let in_range = |key| {
            matches!(key, Key::GrantPorts(p, n, proto, first, last)
                if (p, n, proto) == (pod, number, protocol) && first <= port && port <= last)
        };
        self.has(
            PolicySet::Ports(direction),
            Key::GrantPort(pod, number, protocol, port),
        ) || self.find(PolicySet::Ranges(direction), in_range).is_some()
    }
}

/// Returns the elements with what their numbers stand for, since each process gives its own numbers.
pub(super) fn described(content: &Content) -> BTreeSet<String> {
    let mut names = BTreeMap::from([(0, "anybody".to_owned())]);
    names.extend(content.numbers.all().map(|(id, number)| (number, format!("{id:?}"))));
    let blocks = content.blocks.all();
    names.extend(blocks.map(|(blocks, number)| (number, format!("{blocks:?}"))));
    let rows = content.tiers.rows();
    names.extend(rows.map(|(actions, number)| (number, format!("{actions:?}"))));
    content
        .held
        .all()
        .map(|((set, key), value)| {
            let key = match key {
                Key::Number(number) => names[&number].clone(),
                Key::Grant(pod, number) => format!("{pod} {}", names[&number]),
                Key::GrantPort(pod, number, protocol, port) => {
                    format!("{pod} {} {protocol} {port}", names[&number])
                }
                Key::GrantPorts(pod, number, protocol, first, last) => {
                    format!("{pod} {} {protocol} {first} {last}", names[&number])
                }
                Key::Row(number, protocol, first, last) => {
                    format!("{} {protocol} {first} {last}", names[&number])
                }
                key => format!("{key:?}"),
            };
            let value = value.map(|number| match set {
                PolicySet::RowAll | PolicySet::RowPorts => number.to_string(),
                _ => names[&number].clone(),
            });
            format!("{set:?} {key} {value:?}")
        })
        .collect()
}
