//! What ClusterNetworkPolicies mean for a node's Pods, as elements.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{
    DecisionRow, Direction, Family, PeerId, PodName, PortActions, Protocol, Tier, TierAction,
    TierSpan,
};

use super::blocks::Range;
use super::content::Content;
use super::expand::addresses;
use super::held::{ElementChange, ElementId};
use super::judge::Packet;
use crate::backend::nftables::{ACCEPT, DENY, Key, PASS, PolicySet};

impl Content {
    pub(super) fn set_cluster_policy(&mut self, name: &Arc<str>, there: bool) {
        if there {
            self.tiers.policies.insert(Arc::clone(name))
        } else {
            self.tiers.policies.remove(name)
        };
    }

    pub(super) fn set_span(&mut self, (first, last): (IpAddr, IpAddr), new: Option<&TierSpan>) {
        if Family::of(first) != self.family {
            return;
        }
        match new {
            Some(span) => self.tiers.spans.insert((first, last), span.tier),
            None => self.tiers.spans.remove(&(first, last)),
        };
        self.tiers.are_spans_stale = true;
    }

    pub(super) fn set_tier_of(&mut self, address: IpAddr, tier: Option<PeerId>) {
        match tier {
            Some(tier) => self.tiers.peers.insert(address, tier),
            None => self.tiers.peers.remove(&address),
        };
        let number = tier.map(|tier| self.numbers.give(tier));
        self.set_member((PolicySet::TierPeers, Key::Ip(address)), number);
    }

    fn set_member(&mut self, place: ElementId, number: Option<u32>) {
        if let Some(before) = self.held.get(place).flatten() {
            let members = self.tiers.members.entry(before).or_default();
            *members -= 1;
            if *members == 0 {
                self.tiers.members.remove(&before);
            }
        }
        if let Some(number) = number {
            *self.tiers.members.entry(number).or_default() += 1;
        }
        self.held.set(place, number);
    }

    /// Puts changed spans into the table.
    pub(super) fn renew_spans(&mut self) {
        if !std::mem::take(&mut self.tiers.are_spans_stale) {
            return;
        }
        let mut ranges: Vec<Range> = Vec::with_capacity(self.tiers.spans.len());
        for ((first, last), tier) in &self.tiers.spans {
            // The kernel takes no ranges that overlap. Control planes send none.
            if ranges.last().is_none_or(|before| before.last < *first) {
                let (first, last, number) = (*first, *last, self.numbers.give(*tier));
                ranges.push(Range {
                    first,
                    last,
                    number,
                });
            }
        }
        let place = |range: &Range| (PolicySet::TierBlocks, Key::Span(range.first, range.last));
        let before = std::mem::replace(&mut self.tiers.ranges, ranges.clone());
        for range in &before {
            self.set_member(place(range), None);
        }
        for range in &ranges {
            self.set_member(place(range), Some(range.number));
        }
    }

    pub(super) fn set_decisions(&mut self, subject: PeerId, part: u8, new: Option<&[DecisionRow]>) {
        let pods = self.tiers.pods_of.get(&subject).cloned().unwrap_or_default();
        for pod in &pods {
            self.state(pod, false);
        }
        let parts = self.tiers.decisions.entry(subject).or_default();
        let old = match new {
            Some(new) => parts.insert(part, new.to_vec()),
            None => parts.remove(&part),
        };
        if parts.is_empty() {
            self.tiers.decisions.remove(&subject);
        }
        for pod in &pods {
            self.decide(pod, old.as_deref().unwrap_or_default(), false);
            self.decide(pod, new.unwrap_or_default(), true);
            self.state(pod, true);
        }
        self.failures = None;
    }

    /// Records whose decisions are for a Pod.
    pub(super) fn set_subject(&mut self, name: &PodName, subject: Option<PeerId>, there: bool) {
        let Some(subject) = subject else { return };
        let pods = self.tiers.pods_of.entry(subject).or_default();
        if there {
            pods.insert(name.clone())
        } else {
            pods.remove(name)
        };
        if pods.is_empty() {
            self.tiers.pods_of.remove(&subject);
        }
    }

    /// Adds what tiers mean for a Pod, or takes it back.
    pub(super) fn tier(&mut self, name: &PodName, there: bool) {
        self.state(name, there);
        let subject = self.objects.pods.get(name).and_then(|pod| pod.tier);
        let Some((subject, parts)) =
            subject.and_then(|subject| self.tiers.decisions.remove_entry(&subject))
        else {
            return;
        };
        for rows in parts.values() {
            self.decide(name, rows, there);
        }
        self.tiers.decisions.insert(subject, parts);
    }

    /// Adds that a Pod is known, or takes that back. One whose decisions are missing is not known: it is cut off.
    fn state(&mut self, name: &PodName, there: bool) {
        let Some(pod) = self.objects.pods.get(name) else {
            return;
        };
        let is_known = self.tiers.knows(pod.tier);
        let is_cut_off = pod.tier.is_some() && (!is_known || self.cut_off.contains(name));
        for address in addresses(pod, self.family) {
            self.elsewhere.touch(address);
            if is_known {
                self.held.count((PolicySet::LocalPods, Key::Ip(address)), None, there);
            }
            for direction in Direction::ALL.into_iter().filter(|_| is_cut_off) {
                self.held.subject(PolicySet::Isolated(direction), direction, address, there);
            }
        }
    }

    /// Adds what is decided for a Pod, or takes it back.
    fn decide(&mut self, name: &PodName, rows: &[DecisionRow], there: bool) {
        let Some(pod) = self.objects.pods.get(name) else {
            return;
        };
        let is_cut_off = self.cut_off.contains(name);
        let addresses: Vec<IpAddr> = addresses(pod, self.family).collect();
        let mut count = 0;
        for row in rows {
            count += (row.peers.len() * addresses.len()) as u64;
            if is_cut_off {
                continue;
            }
            let number = self.tiers.row(&row.actions, || self.numbers.fresh());
            for address in &addresses {
                let gate = PolicySet::Tiered(row.direction);
                self.held.subject(gate, row.direction, *address, there);
                for peer in &row.peers {
                    let set = PolicySet::Decisions(row.direction, row.tier);
                    let key = Key::Grant(*address, self.numbers.give(*peer));
                    self.lead((set, key), number, there);
                }
            }
        }
        if let Some(weight) = self.weights.get_mut(name) {
            if there { *weight += count } else { *weight -= count }
        }
    }

    /// Has a place lead to a row, or takes that back. Where Pods disagree, everything is denied.
    fn lead(&mut self, place: ElementId, row: u32, there: bool) {
        let reasons = self.tiers.reasons.entry(place).or_default();
        let were = reasons.len();
        match (reasons.iter().position(|(of, _)| *of == row), there) {
            (Some(at), true) => reasons[at].1 += 1,
            (None, true) => reasons.push((row, 1)),
            (Some(at), false) if reasons[at].1 > 1 => reasons[at].1 -= 1,
            (Some(at), false) => drop(reasons.swap_remove(at)),
            (None, false) => {}
        }
        let (are, only) = (reasons.len(), reasons.first().map(|(row, _)| *row));
        if are == 0 {
            self.tiers.reasons.remove(&place);
        }
        if are == were {
            return;
        }
        self.tiers.count(row, are > were);
        let mut after = only;
        if are.max(were) > 1 {
            let deny = self.tiers.row(&PortActions::DENY, || self.numbers.fresh());
            if (are > 1) != (were > 1) {
                self.tiers.count(deny, are > 1);
            }
            after = if are > 1 { Some(deny) } else { only };
        }
        self.held.set(place, after);
    }

    /// Adds the rows that places lead to, and removes others.
    pub(super) fn renew_rows(&mut self) {
        for row in std::mem::take(&mut self.tiers.touched) {
            let Some(actions) = self.tiers.actions.get(&row) else {
                continue;
            };
            let is_used = self.tiers.users.contains_key(&row);
            let value = |action| is_used.then(|| number(action));
            self.held.set((PolicySet::RowAll, Key::Number(row)), value(actions.rest));
            for (protocol, first, last, action) in &actions.ranges {
                let key = Key::Row(row, *protocol, *first, *last);
                self.held.set((PolicySet::RowPorts, key), value(*action));
            }
        }
    }

    /// Returns what a tier decides about a packet between a Pod and another end.
    pub(super) fn action(
        &self,
        (direction, tier): (Direction, Tier),
        (pod, other): (IpAddr, IpAddr),
        packet: &Packet,
    ) -> TierAction {
        let peer = self.held.number(PolicySet::TierPeers, Key::Ip(other));
        let number = peer.or_else(|| self.tiers.find(other)).unwrap_or(0);
        let row = self.held.number(
            PolicySet::Decisions(direction, tier),
            Key::Grant(pod, number),
        );
        let actions = row.and_then(|row| self.tiers.actions.get(&row));
        actions.map_or(TierAction::Pass, |of| {
            packet.port.map_or(of.rest, |(protocol, port)| of.action(protocol, port))
        })
    }

    /// Returns which decisions of a change must be there before addresses get other numbers: those about numbers that
    /// nothing has yet, and those that are stricter than before. So what both states deny stays denied.
    pub(super) fn is_early(&self, changes: &[ElementChange]) -> impl Fn(&ElementChange) -> bool {
        let mut members: HashMap<u32, (usize, usize)> = HashMap::new();
        let mut fresh = HashSet::new();
        for change in changes {
            match change.place {
                (PolicySet::TierPeers | PolicySet::TierBlocks, _) => {
                    if let Some(number) = change.before.flatten() {
                        members.entry(number).or_default().0 += 1;
                    }
                    if let Some(number) = change.after.flatten() {
                        members.entry(number).or_default().1 += 1;
                    }
                }
                (PolicySet::Tiered(direction), Key::Ip(ip)) if change.before.is_none() => {
                    fresh.insert((direction, ip));
                }
                _ => {}
            }
        }
        move |change| {
            let (PolicySet::Decisions(direction, _), Key::Grant(pod, number)) = change.place else {
                return false;
            };
            let now = self.tiers.members.get(&number).copied().unwrap_or_default();
            let (went, came) = members.get(&number).copied().unwrap_or_default();
            if fresh.contains(&(direction, pod)) || now + went == came {
                return true;
            }
            let is_stricter = || {
                let pass = PortActions::PASS;
                let [before, after] =
                    [change.before, change.after].map(|row| match row.flatten() {
                        None => Some(&pass),
                        Some(row) => self.tiers.actions.get(&row),
                    });
                before.zip(after).is_some_and(|(before, after)| !is_looser(after, before))
            };
            now > 0 && is_stricter()
        }
    }
}

/// Returns whether some actions allow more than others somewhere, and nowhere less.
fn is_looser(these: &PortActions, those: &PortActions) -> bool {
    let ranges = || these.ranges.iter().chain(&those.ranges);
    let begins = ranges().map(|(protocol, first, ..)| (*protocol, *first));
    let behind =
        ranges().filter_map(|(protocol, _, last, _)| Some((*protocol, last.checked_add(1)?)));
    let mut borders = begins.chain(behind).chain(Protocol::ALL.map(|protocol| (protocol, 0)));
    these.rest >= those.rest
        && borders.all(|(p, port)| these.action(p, port) >= those.action(p, port))
}

fn number(action: TierAction) -> u32 {
    match action {
        TierAction::Accept => ACCEPT,
        TierAction::Deny => DENY,
        TierAction::Pass => PASS,
    }
}

#[cfg(test)]
impl Content {
    /// Returns whether a decision becomes stricter for some ports and less strict for others.
    pub(super) fn is_mixed(&self, changes: &[ElementChange]) -> bool {
        changes
            .iter()
            .filter(|change| matches!(change.place.0, PolicySet::Decisions(..)))
            .map(|change| {
                [change.before, change.after].map(|row| match row.flatten() {
                    None => PortActions::PASS,
                    Some(row) => self.tiers.actions[&row].clone(),
                })
            })
            .any(|[before, after]| !is_looser(&after, &before) && !is_looser(&before, &after))
    }
}
