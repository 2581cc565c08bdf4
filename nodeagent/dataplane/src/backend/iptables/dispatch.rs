//! The lists in which a packet finds its ServicePort: flat as kube-proxy writes them, or as trees.
//!
//! A tree divides the frontends of a list by the leading bits of address, protocol and port. The chains depend
//! only on the content of the list, not on its history:
//!
//! * up to [`LEAF`] frontends are one chain with a rule for each;
//! * more frontends are divided where they first differ, by up to four bits. Each part with more than [`LEAF`]
//!   frontends is divided again. Parts without a frontend have no rule.
//!
//! The name of a chain is made of the bits that lead to it, so a new place changes only one leaf. Every rule
//! has all conditions of its place. The tree only shortens the way to the rule; it decides nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use kplane_model::Family;

use super::name::{ChainName, TableName};
use super::prefix::{Point, Prefix, Space};
use super::rule::{Comment, Counter, Match, Rule, Sense, Target};
use super::settings::RuleSettings;
use super::structure::Layout;
use crate::plan::FrontendAddr;

/// Most frontends in one chain of a tree.
pub(super) const LEAF: usize = 16;
/// Most bits by which frontends are divided at once: at most 16 parts.
const STRIDE: u8 = 4;

/// A list that all ServicePorts share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum List {
    /// nat: jumps to the ServicePort's chains, by address.
    Services,
    /// nat: jumps to the ServicePort's chains, by node port.
    NodePorts,
    /// filter: ClusterIPs without an endpoint.
    UnservedInternal,
    /// filter: external addresses without an endpoint.
    UnservedExternal,
    /// filter: node ports without an endpoint.
    UnservedNodePorts,
    /// filter: addresses of load balancers that only some sources may use.
    Firewall,
    /// filter: ports of health checks.
    Health,
}

impl List {
    pub(super) const ALL: [Self; 7] = [
        Self::Services,
        Self::NodePorts,
        Self::UnservedInternal,
        Self::UnservedExternal,
        Self::UnservedNodePorts,
        Self::Firewall,
        Self::Health,
    ];

    pub(super) fn table(self) -> TableName {
        match self {
            Self::Services | Self::NodePorts => TableName::Nat,
            _ => TableName::Filter,
        }
    }

    /// Returns the chain that holds the list, or the root of its tree.
    pub(super) fn chain(self) -> ChainName {
        match self {
            Self::Services | Self::UnservedInternal => ChainName::SERVICES,
            Self::NodePorts | Self::Health => ChainName::NODEPORTS,
            Self::UnservedExternal | Self::UnservedNodePorts => ChainName::EXTERNAL_SERVICES,
            Self::Firewall => ChainName::PROXY_FIREWALL,
        }
    }

    /// Returns the letter that distinguishes the trees of a table.
    fn tag(self) -> char {
        match self {
            Self::Services => 'S',
            Self::NodePorts => 'N',
            Self::UnservedInternal => 'U',
            Self::UnservedExternal => 'E',
            Self::UnservedNodePorts => 'P',
            Self::Firewall => 'F',
            Self::Health => 'H',
        }
    }

    /// Returns whether a frontend may be in the list.
    pub(super) fn holds(self, at: FrontendAddr) -> bool {
        let is_address = matches!(at, FrontendAddr::Address { .. });
        self != Self::Health && self.addresses() == is_address
    }

    fn addresses(self) -> bool {
        !matches!(
            self,
            Self::NodePorts | Self::UnservedNodePorts | Self::Health
        )
    }
}

/// The rules for packets to one place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DispatchRule {
    target: Target,
    comment: Option<Comment>,
}

impl DispatchRule {
    pub(super) fn new(target: Target, comment: Option<Comment>) -> Self {
        Self { target, comment }
    }
}

/// Changes of a list, by place; `None` removes the place.
pub(super) type Overlay = BTreeMap<Point, Option<DispatchRule>>;

/// One list with its content and layout.
#[derive(Clone, Debug)]
pub(super) struct Dispatch {
    list: List,
    space: Space,
    layout: Layout,
    entries: BTreeMap<Point, DispatchRule>,
    /// Whether node ports on the loopback address are counted (C8).
    counted: bool,
}

/// The chains that a change of a list affects.
#[derive(Debug, Default)]
pub(super) struct ChangedChains {
    /// Chains of the tree with their rules, and the number of bits that lead to each.
    pub(super) put: BTreeMap<ChainName, (u8, Vec<Rule>)>,
    /// Chains of the tree to delete.
    pub(super) gone: BTreeSet<ChainName>,
}

/// A list together with changes.
#[derive(Clone, Copy)]
struct View<'a> {
    base: &'a BTreeMap<Point, DispatchRule>,
    over: &'a Overlay,
}

/// The form in which a part of a list is written.
enum Shape<'a> {
    /// No rules.
    Empty,
    /// A rule for each place.
    Leaf(Vec<(Point, &'a DispatchRule)>),
    /// A jump for each part of `top`, the prefix that all frontends share.
    Inner { top: Prefix, parts: Vec<Prefix> },
}

impl Dispatch {
    pub(super) fn new(list: List, settings: &RuleSettings) -> Self {
        let family = settings.family;
        let localhost = settings.localhost_nodeports && family == Family::V4;
        Self {
            list,
            space: Space {
                family,
                addresses: list.addresses(),
            },
            layout: settings.layout,
            entries: BTreeMap::new(),
            counted: settings.counters && localhost && list == List::NodePorts,
        }
    }

    pub(super) fn list(&self) -> List {
        self.list
    }

    /// Returns the entry of a frontend.
    pub(super) fn get(&self, point: Point) -> Option<&DispatchRule> {
        self.entries.get(&point)
    }

    /// Returns the change that empties the list.
    pub(super) fn all_gone(&self) -> Overlay {
        self.entries.keys().map(|point| (*point, None)).collect()
    }

    /// Returns the number of frontends.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn accept(&mut self, over: Overlay) {
        for (point, entry) in over {
            match entry {
                Some(entry) => self.entries.insert(point, entry),
                None => self.entries.remove(&point),
            };
        }
    }

    /// Returns the rules of the list with changes, or those of the root of its tree.
    pub(super) fn root(&self, over: &Overlay) -> Vec<Rule> {
        let base = &self.entries;
        self.rules(&self.shape(View { base, over }, Space::root()))
    }

    /// Returns the effect on the tree's chains if one set of changes replaces another.
    pub(super) fn change(&self, before: &Overlay, after: &Overlay) -> ChangedChains {
        let view = |over| View {
            base: &self.entries,
            over,
        };
        let (old, new) = (view(before), view(after));
        let mut touched: BTreeSet<Point> = before.keys().chain(after.keys()).copied().collect();
        touched.retain(|point| old.get(*point) != new.get(*point));
        let mut diff = Diff {
            dispatch: self,
            old,
            new,
            touched: &touched,
            changed: ChangedChains::default(),
        };
        let root = Space::root();
        diff.walk(root, root);
        let mut changed = diff.changed;
        // The root is in a chain with other rules.
        changed.gone.remove(&self.list.chain());
        changed.gone.retain(|name| !changed.put.contains_key(name));
        changed
    }

    /// Returns the most rules of the list that a packet passes on the way to its place.
    pub(super) fn longest_way(&self) -> usize {
        let over = Overlay::new();
        let base = &self.entries;
        self.longest(View { base, over: &over }, Space::root())
    }

    fn longest(&self, view: View<'_>, slot: Prefix) -> usize {
        match self.shape(view, slot) {
            Shape::Empty => 0,
            Shape::Leaf(entries) => entries.len(),
            Shape::Inner { parts, .. } => (1..)
                .zip(parts)
                .map(|(jumps, part)| jumps + self.longest(view, part))
                .max()
                .unwrap_or(0),
        }
    }

    fn name(&self, slot: Prefix) -> ChainName {
        match slot.len {
            0 => self.list.chain(),
            _ => ChainName::dispatch(self.list.tag(), &self.space.text(slot)),
        }
    }

    fn shape<'a>(&self, view: View<'a>, slot: Prefix) -> Shape<'a> {
        let most = match self.layout {
            Layout::Compat => usize::MAX,
            Layout::Tree => LEAF,
        };
        let range = self.space.range(slot);
        let entries: Vec<_> = view.range(range.clone()).take(most.saturating_add(1)).collect();
        let Some((first, _)) = entries.first() else {
            return Shape::Empty;
        };
        if entries.len() <= most {
            return Shape::Leaf(entries);
        }
        let last = view.last(range).unwrap_or(*first);
        let common = self.space.common(*first, last);
        let top = self.space.prefix(*first, common.len - common.len % STRIDE);
        let mut parts = Vec::new();
        self.divide(view, top, top.len + STRIDE, &mut parts);
        Shape::Inner { top, parts }
    }

    /// Divides a prefix with too many frontends for a leaf, until its parts are leaves or have `end` bits.
    fn divide(&self, view: View<'_>, prefix: Prefix, end: u8, parts: &mut Vec<Prefix>) {
        for half in self.space.halves(prefix) {
            let range = self.space.range(half);
            let leaf = match view.range(range).take(LEAF + 1).count() {
                0 => continue,
                count => count <= LEAF && self.space.can_match(half),
            };
            if leaf || half.len == end {
                parts.push(half);
            } else {
                self.divide(view, half, end, parts);
            }
        }
    }

    fn rules(&self, shape: &Shape<'_>) -> Vec<Rule> {
        match shape {
            Shape::Empty => Vec::new(),
            Shape::Leaf(entries) => entries
                .iter()
                .flat_map(|(point, entry)| self.entry_rules(*point, entry))
                .collect(),
            Shape::Inner { parts, .. } => {
                let jump = |part: &Prefix| self.space.limit(Rule::jump(self.name(*part)), *part);
                parts.iter().map(jump).collect()
            }
        }
    }

    fn entry_rules(&self, point: Point, entry: &DispatchRule) -> Vec<Rule> {
        let place = self.space.single(point);
        let rule = Rule::new(entry.target).comment(entry.comment.clone());
        let rule = match self.list {
            List::UnservedNodePorts => rule.when(Match::DestinationLocal),
            _ => rule,
        };
        let rule = self.space.limit(rule, place);
        if !self.counted {
            return vec![rule];
        }
        let counted = rule.clone().destination(Sense::Is, super::layout::localhost());
        vec![counted.when(Match::Count(Counter::LocalhostAccepted)), rule]
    }
}

/// A comparison of two states of a list.
struct Diff<'a> {
    dispatch: &'a Dispatch,
    old: View<'a>,
    new: View<'a>,
    /// Places that differ.
    touched: &'a BTreeSet<Point>,
    changed: ChangedChains,
}

impl Diff<'_> {
    /// Writes the part `to` of the new state, which replaces the part `from` of the old state. Both are the
    /// same, except where one state needs one division more than the other.
    fn walk(&mut self, from: Prefix, to: Prefix) {
        let (old, new) = (
            self.dispatch.shape(self.old, from),
            self.dispatch.shape(self.new, to),
        );
        let (
            Shape::Inner { top, parts },
            Shape::Inner {
                top: new_top,
                parts: new_parts,
            },
        ) = (&old, &new)
        else {
            self.remove(from);
            self.add(to);
            return;
        };
        let space = self.dispatch.space;
        let leading_to = |parts: &[Prefix], to: Prefix| {
            parts.iter().copied().find(|part| space.covers(*part, to))
        };
        if top == new_top {
            self.replace(from, to, &new);
            let both: BTreeSet<Prefix> = parts.iter().chain(new_parts).copied().collect();
            for part in both {
                match (parts.contains(&part), new_parts.contains(&part)) {
                    (true, true) if self.is_touched(part) => self.walk(part, part),
                    (true, true) => {}
                    (true, false) => self.remove(part),
                    (false, _) => self.add(part),
                }
            }
        } else if space.covers(*new_top, *top) {
            // The new state has a division above that of the old state.
            self.replace(from, to, &new);
            let same = leading_to(new_parts, *top);
            let others = new_parts.iter().filter(|part| Some(**part) != same);
            others.for_each(|part| self.add(*part));
            match same {
                Some(part) => self.walk(from, part),
                None => self.remove(from),
            }
        } else if space.covers(*top, *new_top) {
            let same = leading_to(parts, *new_top);
            let others = parts.iter().filter(|part| Some(**part) != same);
            others.for_each(|part| self.remove(*part));
            self.changed.gone.insert(self.dispatch.name(from));
            match same {
                Some(part) => self.walk(part, to),
                None => self.add(to),
            }
        } else {
            self.remove(from);
            self.add(to);
        }
    }

    fn is_touched(&self, part: Prefix) -> bool {
        let range = self.dispatch.space.range(part);
        self.touched.range(range).next().is_some()
    }

    /// Replaces one chain by another, or by itself with new rules.
    fn replace(&mut self, from: Prefix, to: Prefix, shape: &Shape<'_>) {
        self.changed.gone.insert(self.dispatch.name(from));
        self.put(to, shape);
    }

    fn put(&mut self, slot: Prefix, shape: &Shape<'_>) {
        if slot.len > 0 {
            let rules = self.dispatch.rules(shape);
            let name = self.dispatch.name(slot);
            self.changed.put.insert(name, (slot.len, rules));
        }
    }

    /// Removes the chains of the old state below a prefix.
    fn remove(&mut self, slot: Prefix) {
        let shape = self.dispatch.shape(self.old, slot);
        if !matches!(shape, Shape::Empty) {
            self.changed.gone.insert(self.dispatch.name(slot));
        }
        if let Shape::Inner { parts, .. } = shape {
            parts.into_iter().for_each(|part| self.remove(part));
        }
    }

    /// Adds the chains of the new state below a prefix.
    fn add(&mut self, slot: Prefix) {
        let shape = self.dispatch.shape(self.new, slot);
        if !matches!(shape, Shape::Empty) {
            self.put(slot, &shape);
        }
        if let Shape::Inner { parts, .. } = shape {
            parts.into_iter().for_each(|part| self.add(part));
        }
    }
}

impl<'a> View<'a> {
    fn get(self, point: Point) -> Option<&'a DispatchRule> {
        match self.over.get(&point) {
            Some(entry) => entry.as_ref(),
            None => self.base.get(&point),
        }
    }

    /// Returns the frontends of a range, in order.
    fn range(
        self,
        range: RangeInclusive<Point>,
    ) -> impl Iterator<Item = (Point, &'a DispatchRule)> {
        let mut base = self.base.range(range.clone()).peekable();
        let mut over = self.over.range(range).peekable();
        std::iter::from_fn(move || {
            loop {
                let first = match (base.peek(), over.peek()) {
                    (None, None) => return None,
                    (Some((point, _)), None) | (None, Some((point, _))) => **point,
                    (Some((a, _)), Some((b, _))) => **a.min(b),
                };
                let base = base.next_if(|(point, _)| **point == first);
                let over = over.next_if(|(point, _)| **point == first);
                let entry = match (over, base) {
                    (Some((_, entry)), _) => entry.as_ref(),
                    (None, base) => base.map(|(_, entry)| entry),
                };
                if let Some(entry) = entry {
                    return Some((first, entry));
                }
            }
        })
    }

    /// Returns the last place of a range.
    fn last(self, range: RangeInclusive<Point>) -> Option<Point> {
        let kept = |(point, _): &(&Point, &DispatchRule)| !self.over.contains_key(*point);
        let base = self.base.range(range.clone()).rev().find(kept);
        let over = self.over.range(range).rev().find(|(_, entry)| entry.is_some());
        base.map(|(point, _)| *point).max(over.map(|(point, _)| *point))
    }
}
