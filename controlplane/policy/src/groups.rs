//! Groups that policies use, and their members.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use kplane_model::{GroupId, GroupPart, PeerId};

use crate::Selector;
use crate::classes::{Class, Classes};
use crate::group::{GroupSpec, Namespaces};
use crate::identity::namespace_id;
use crate::limits::Limits;
use crate::lookup::Selectors;
use crate::namespaces::NamespaceLabels;
use crate::pods::Pods;
use crate::texts::LabelSet;
use crate::uses::Uses;

#[derive(Debug)]
struct Group {
    spec: GroupSpec,
    /// Number of policies with it.
    users: usize,
    members: BTreeSet<PeerId>,
}

/// All groups.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    groups: HashMap<GroupId, Group>,
    /// Groups of classes, by the Pods that they select.
    by_pods: Selectors<Namespaces, GroupId>,
    /// Selectors of namespaces, and how many groups have them.
    selectors: Selectors<(), Arc<Selector>>,
    users: Uses<Arc<Selector>>,
    /// Parts that may have changed.
    pub(crate) changed: BTreeSet<(GroupId, u8)>,
    pub(crate) limits: Limits,
}

impl Groups {
    pub(crate) fn len(&self) -> usize {
        self.groups.len()
    }

    /// Counts a policy as user of a group.
    pub(crate) fn acquire(
        &mut self,
        id: GroupId,
        spec: GroupSpec,
        (pods, namespaces): (&Pods, &NamespaceLabels),
    ) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.users += 1;
            return;
        }
        if spec.has_classes() {
            self.by_pods.insert(&spec.namespaces, &spec.pods, &id);
        }
        if let Namespaces::Selected(selector) = &spec.namespaces
            && self.users.add(selector)
        {
            self.selectors.insert(&(), selector, selector);
        }
        let members = members(&spec, pods, namespaces);
        self.changed.extend(members.iter().map(|m| part(id, *m)));
        let users = 1;
        self.groups.insert(
            id,
            Group {
                spec,
                users,
                members,
            },
        );
    }

    /// Counts a user less.
    pub(crate) fn release(&mut self, id: GroupId) {
        if let Some(group) = self.groups.get_mut(&id)
            && group.users > 1
        {
            group.users -= 1;
            return;
        }
        let Some(Group { spec, members, .. }) = self.groups.remove(&id) else {
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
        self.changed.extend(members.iter().map(|m| part(id, *m)));
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
        let there = pods.classes(namespace, &all);
        let there = there.filter_map(|id| Some((id, classes.get(id)?)));
        let there: BTreeMap<_, _> = there.collect();
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
        let Some(of) = self.groups.get_mut(&group) else {
            return;
        };
        let differs = match is_member {
            true => of.members.insert(member),
            false => of.members.remove(&member),
        };
        if differs {
            self.changed.insert(part(group, member));
        }
    }

    /// Returns the object that agents get; `None` = the part is empty.
    pub(crate) fn object(&self, group: GroupId, part: u8) -> Option<GroupPart> {
        let (mut first, mut last) = ([0; 16], [u8::MAX; 16]);
        (first[0], last[0]) = (part, part);
        let members = &self.groups.get(&group)?.members;
        let members = members.range(PeerId(first)..=PeerId(last));
        let members: Vec<_> = members.take(self.limits.members).copied().collect();
        (!members.is_empty()).then_some(GroupPart {
            group,
            part,
            members,
        })
    }
}

/// Returns the part of a group that a member is in.
fn part(group: GroupId, member: PeerId) -> (GroupId, u8) {
    (group, member.0[0])
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
            let there = everywhere.filter(|(name, _)| namespaces.meet(&name.namespace, some));
            there.filter_map(|(_, pod)| pod.class).collect()
        }
        (Namespaces::Selected(some), true) => {
            let names = namespaces.selected(some);
            let classes = names.flat_map(|name| pods.classes(name, &spec.pods));
            classes.collect()
        }
    }
}
