//! Groups that nodes have, and their members.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem::take;
use std::sync::Arc;

use kplane_model::{GroupId, GroupPart, NodeName, PeerId, PolicyKey, PolicyObject};

use crate::audience::{Audience, Was};
use crate::classes::{Class, Classes};
use crate::group::{GroupSpec, Namespaces};
use crate::identity::namespace_id;
use crate::limits::Limits;
use crate::lookup::Selectors;
use crate::namespaces::NamespaceLabels;
use crate::parts::Parts;
use crate::pods::Pods;
use crate::published::{Sum, sum_of_members};
use crate::texts::LabelSet;
use crate::uses::Uses;
use crate::{PolicyChanges, Selector};

/// A group that some node has.
#[derive(Debug)]
pub(crate) struct Group {
    spec: GroupSpec,
    members: BTreeSet<PeerId>,
    parts: Parts,
    /// The nodes. One has a reason for each policy.
    nodes: Audience,
    /// Parts that may have changed.
    changed: BTreeSet<u8>,
    /// Digests of published parts.
    published: BTreeMap<u8, Sum>,
}

impl Group {
    /// Adds a reason of a node.
    pub(crate) fn add(&mut self, node: &NodeName) {
        self.nodes.add(node);
    }

    /// Returns the members of a part.
    fn part(&self, part: u8, limits: Limits) -> Vec<PeerId> {
        if usize::from(part) >= self.parts.count() {
            return Vec::new();
        }
        let (first, last) = self.parts.range(part);
        self.members.range(first..=last).take(limits.members).copied().collect()
    }

    /// Adds all parts that are, or were published.
    fn touch_all(&self, parts: &mut BTreeSet<u8>) {
        parts.extend(self.published.keys());
        parts.extend(self.members.iter().map(|member| self.parts.part(member)));
    }

    /// Adds or removes a member.
    fn set(&mut self, member: PeerId, is_member: bool) -> bool {
        let differs = if is_member {
            self.members.insert(member)
        } else {
            self.members.remove(&member)
        };
        let parts = Parts::of(self.members.len());
        if self.parts == parts {
            self.changed.insert(parts.part(&member));
        } else {
            self.parts = parts;
            let mut changed = take(&mut self.changed);
            self.touch_all(&mut changed);
            self.changed = changed;
        }
        differs
    }

    /// Publishes the parts that changed, or all if other nodes have them now.
    fn publish(&mut self, id: GroupId, limits: Limits, changes: &mut PolicyChanges) {
        let moves = self.nodes.take();
        let mut parts = take(&mut self.changed);
        if moves.differ() {
            self.touch_all(&mut parts);
        }
        for part in parts {
            let members = self.part(part, limits);
            let is_there = !members.is_empty() && !self.nodes.is_empty();
            let sum = is_there.then(|| sum_of_members(&members));
            let before = match sum {
                Some(sum) => self.published.insert(part, sum),
                None => self.published.remove(&part),
            };
            let was = Was::of(before.as_ref(), sum.as_ref());
            let object = GroupPart {
                group: id,
                part,
                members,
            };
            let object = is_there.then_some(PolicyObject::Group(object));
            moves.publish(changes, PolicyKey::Group(id, part), (was, object));
        }
    }
}

/// All groups that nodes have.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    groups: HashMap<GroupId, Group>,
    /// Groups of classes, by the Pods that they select.
    by_pods: Selectors<Namespaces, GroupId>,
    /// Selectors of namespaces, and how many groups have them.
    selectors: Selectors<(), Arc<Selector>>,
    users: Uses<Arc<Selector>>,
    /// Groups whose members or nodes may have changed.
    touched: BTreeSet<GroupId>,
    pub(crate) limits: Limits,
}

impl Groups {
    pub(crate) fn len(&self) -> usize {
        self.groups.len()
    }

    /// Returns a group, for which a node may have a reason now. It goes when no node has one.
    pub(crate) fn get_or_make(
        &mut self,
        id: GroupId,
        spec: GroupSpec,
        (pods, namespaces): (&Pods, &NamespaceLabels),
    ) -> &mut Group {
        self.touched.insert(id);
        self.groups.entry(id).or_insert_with(|| {
            if spec.has_classes() {
                self.by_pods.insert(&spec.namespaces, &spec.pods, &id);
            }
            if let Namespaces::Selected(selector) = &spec.namespaces
                && self.users.add(selector)
            {
                self.selectors.insert(&(), selector, selector);
            }
            let members = members(&spec, pods, namespaces);
            Group {
                parts: Parts::of(members.len()),
                members,
                spec,
                nodes: Audience::default(),
                changed: BTreeSet::new(),
                published: BTreeMap::new(),
            }
        })
    }

    /// Takes a reason of a node for a group back.
    pub(crate) fn release(&mut self, id: GroupId, node: &NodeName) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.nodes.remove(node);
            self.touched.insert(id);
        }
    }

    /// Publishes what changed, and forgets groups that no node has.
    pub(crate) fn publish(&mut self, changes: &mut PolicyChanges) {
        for id in take(&mut self.touched) {
            let Some(group) = self.groups.get_mut(&id) else {
                continue;
            };
            group.publish(id, self.limits, changes);
            if group.nodes.is_empty() {
                self.forget(id);
            }
        }
    }

    fn forget(&mut self, id: GroupId) {
        let Some(Group { spec, .. }) = self.groups.remove(&id) else {
            return;
        };
        if spec.has_classes() {
            self.by_pods.remove(&spec.namespaces, &spec.pods, &id);
        }
        if let Namespaces::Selected(selector) = &spec.namespaces
            && self.users.remove(selector)
        {
            self.selectors.remove(&(), selector, selector);
        }
    }

    /// Puts a class into the groups that select it, or takes it out of them: into those that select its namespace now, and
    /// those that did so before, which [`Groups::set_namespace`] knows.
    pub(crate) fn set_class(
        &mut self,
        id: PeerId,
        class: &Class,
        is_member: bool,
        namespaces: &NamespaceLabels,
    ) {
        let mut groups = self.with_pods(&Namespaces::Own(Arc::clone(&class.namespace)), class);
        for labels in namespaces.versions(&class.namespace) {
            for selector in self.selecting(labels) {
                groups.extend(self.with_pods(&Namespaces::Selected(selector), class));
            }
        }
        for group in groups {
            self.set(group, id, is_member);
        }
    }

    /// Updates the groups that select a namespace now and did not before, or the other way round.
    pub(crate) fn set_namespace(
        &mut self,
        namespace: &Arc<str>,
        before: Option<&LabelSet>,
        (pods, classes): (&Pods, &Classes),
        now: Option<&LabelSet>,
    ) {
        let (before, now) = (self.selecting(before), self.selecting(now));
        if before == now {
            return;
        }
        let all = Selector::default();
        let there: BTreeMap<_, _> = pods
            .classes(namespace, &all)
            .filter_map(|id| Some((id, classes.get(id)?)))
            .collect();
        for selector in before.symmetric_difference(&now) {
            let is_member = now.contains(selector);
            let selected = Namespaces::Selected(Arc::clone(selector));
            for (id, class) in &there {
                for group in self.with_pods(&selected, class) {
                    self.set(group, *id, is_member);
                }
            }
            let whole = GroupSpec {
                namespaces: selected,
                pods: Selector::default(),
            };
            self.set(whole.id(), namespace_id(namespace), is_member);
        }
    }

    /// Returns the selectors that select a namespace with these labels; `None` = it does not exist.
    fn selecting(&self, labels: Option<&LabelSet>) -> BTreeSet<Arc<Selector>> {
        let Some(labels) = labels else {
            let everything = Arc::new(Selector::default());
            let is_used = self.users.has(&everything);
            return is_used.then_some(everything).into_iter().collect();
        };
        let candidates = self.selectors.candidates(&(), labels);
        candidates.filter(|s| labels.meet(s)).cloned().collect()
    }

    /// Returns the groups with these namespaces whose selectors select the Pods of a class.
    fn with_pods(&self, namespaces: &Namespaces, class: &Class) -> Vec<GroupId> {
        let candidates = self.by_pods.candidates(namespaces, &class.labels);
        let selects = |id: &&GroupId| {
            let group = self.groups.get(id);
            group.is_some_and(|group| class.labels.meet(&group.spec.pods))
        };
        candidates.filter(selects).copied().collect()
    }

    fn set(&mut self, group: GroupId, member: PeerId, is_member: bool) {
        if let Some(of) = self.groups.get_mut(&group)
            && of.set(member, is_member)
        {
            self.touched.insert(group);
        }
    }
}

/// Returns a group's members (NP6).
fn members(spec: &GroupSpec, pods: &Pods, namespaces: &NamespaceLabels) -> BTreeSet<PeerId> {
    match (&spec.namespaces, spec.has_classes()) {
        (Namespaces::Own(own), false) => BTreeSet::from([namespace_id(own)]),
        (Namespaces::Own(own), true) => pods.classes(own, &spec.pods).collect(),
        (Namespaces::Selected(all), false) if all.is_everything() => {
            BTreeSet::from([PeerId::ALL_PODS])
        }
        (Namespaces::Selected(some), false) => {
            let names = namespaces.selected(some);
            names.map(|name| namespace_id(name)).collect()
        }
        // By the selector that names values, if only one does.
        (Namespaces::Selected(some), true)
            if some.is_everything() || some.pivot().is_none() && spec.pods.pivot().is_some() =>
        {
            let everywhere = pods.selected_anywhere(&spec.pods);
            everywhere
                .filter(|(name, _)| namespaces.meet(&name.namespace, some))
                .filter_map(|(_, pod)| pod.class)
                .collect()
        }
        (Namespaces::Selected(some), true) => {
            let names = namespaces.selected(some);
            names.flat_map(|name| pods.classes(name, &spec.pods)).collect()
        }
    }
}
