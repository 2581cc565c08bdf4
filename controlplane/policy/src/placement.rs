//! Which nodes get which policies and groups: a policy goes to the nodes of Pods that it selects, and a group to the nodes
//! of policies that name it. What nobody has is not worked out.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem::take;
use std::sync::Arc;

use kplane_model::{NodeName, PolicyKey, PolicyName, PolicyObject};

use crate::audience::{Audience, Moves, Was};
use crate::rules::Entry;
use crate::{Policies, PolicyChanges};

/// A Pod's node, and the policies that the node enforces for the Pod.
pub(crate) type Placed = (NodeName, Arc<[PolicyName]>);

/// The nodes of each policy. A node has one reason for each Pod.
#[derive(Debug, Default)]
pub(crate) struct Placement {
    policies: HashMap<PolicyName, Audience>,
    touched: BTreeSet<PolicyName>,
}

impl Placement {
    /// Counts the policies of a changed Pod.
    pub(crate) fn move_pod(&mut self, before: Option<&Placed>, now: Option<&Placed>) {
        for (placed, there) in [(now, true), (before, false)] {
            let Some((node, policies)) = placed else {
                continue;
            };
            for policy in policies.iter() {
                let audience = self.policies.entry(policy.clone()).or_default();
                if there {
                    audience.add(node);
                } else {
                    audience.remove(node);
                }
                self.touched.insert(policy.clone());
            }
        }
    }

    /// Returns how a policy's nodes changed; `None` = it has and had none.
    fn take(&mut self, policy: &PolicyName) -> Option<Moves> {
        let audience = self.policies.get_mut(policy)?;
        let moves = audience.take();
        if audience.is_empty() {
            self.policies.remove(policy);
        }
        Some(moves)
    }
}

impl Policies {
    /// Publishes policies and groups to their nodes. `changed` are policies that are not what they were, with that.
    pub(crate) fn take_reach(
        &mut self,
        mut changed: BTreeMap<PolicyName, Option<Arc<Entry>>>,
        changes: &mut PolicyChanges,
    ) {
        for name in take(&mut self.placement.touched) {
            let now = self.policies.get(&name).cloned();
            changed.entry(name).or_insert(now);
        }
        for (name, before) in changed {
            if let Some(moves) = self.placement.take(&name) {
                let now = self.policies.get(&name).cloned();
                self.move_groups(&moves, before.as_deref(), now.as_deref());
                let [before, now] = [before, now].map(|entry| Some(entry?.object()));
                let was = Was::of(before.as_ref(), now.as_ref());
                let now = (was, now.map(PolicyObject::Policy));
                moves.publish(changes, PolicyKey::Policy(name), now);
            }
        }
        self.groups.publish(changes);
    }

    /// Counts what a policy's nodes need of groups.
    fn move_groups(&mut self, moves: &Moves, before: Option<&Entry>, now: Option<&Entry>) {
        let stayed = if before == now { &[][..] } else { &moves.stayed };
        let groups = |entry: Option<&Entry>, of: [&[NodeName]; 2]| match of {
            [[], []] => BTreeMap::new(),
            _ => entry.map(Entry::groups).unwrap_or_default(),
        };
        let come = [&moves.came, stayed];
        for (id, spec) in groups(now, come) {
            let those = (&self.pods, &self.namespaces);
            let group = self.groups.get_or_make(id, spec, those);
            come.into_iter().flatten().for_each(|node| group.add(node));
        }
        let go = [&moves.left, stayed];
        for id in groups(before, go).into_keys() {
            let nodes = go.into_iter().flatten();
            nodes.for_each(|node| self.groups.release(id, node));
        }
    }
}
