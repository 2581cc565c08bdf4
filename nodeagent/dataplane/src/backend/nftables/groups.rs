//! The groups of session affinity in a table. This module is pure, like `table.rs`.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kplane_model::{EndpointAddr, ServiceKey, TrafficPolicy};

use super::affinity::Group;
use super::affinity_id::{AffinityId, Scope};
use super::frontend::{Ops, Sticky};
use super::structure::GroupOp;
use crate::plan::{Frontend, ServicePlan};

/// A table's groups.
#[derive(Clone, Debug, Default)]
pub(super) struct Groups(HashMap<AffinityId, HeldGroup>);

/// A group with the endpoints that it may remember.
#[derive(Clone, Debug, PartialEq, Eq)]
struct HeldGroup {
    group: Group,
    /// The endpoints, sorted; `None` for a group that was found in the kernel and that no ServicePort has
    /// claimed yet.
    endpoints: Option<Vec<EndpointAddr>>,
}

/// A change of groups that has not been accepted yet; `None` = removed.
#[derive(Debug, Default)]
pub(super) struct StagedGroups(HashMap<AffinityId, Option<HeldGroup>>);

/// The operations of a change of groups.
#[derive(Debug, Default)]
pub(super) struct GroupChange {
    /// Operations before elements lead to the groups; one ServicePort each.
    pub(super) before: Vec<Ops>,
    /// Operations after no element leads to the groups any more; one ServicePort each.
    pub(super) after: Vec<Ops>,
    /// Groups that may remember endpoints which they must no longer remember.
    pub(super) stale: Vec<AffinityId>,
}

impl Groups {
    pub(super) fn adopt(&mut self, groups: &[Group]) {
        let found = groups.iter().map(|group| {
            let endpoints = None;
            let group = *group;
            (group.id, HeldGroup { group, endpoints })
        });
        self.0.extend(found);
    }

    pub(super) fn all(&self) -> BTreeSet<Group> {
        self.0.values().map(|held| held.group).collect()
    }

    /// Returns the endpoints that a group may remember, sorted; `None` while they are not known.
    pub(super) fn endpoints(&self, id: AffinityId) -> Option<&[EndpointAddr]> {
        self.0.get(&id)?.endpoints.as_deref()
    }

    /// Works out the operations of a change.
    pub(super) fn change(&self, staged: &StagedGroups) -> GroupChange {
        let mut change = GroupChange::default();
        // The two groups of a ServicePort lead to each other, so their operations go together.
        let mut before: BTreeMap<u64, Ops> = BTreeMap::new();
        let mut after: BTreeMap<u64, Ops> = BTreeMap::new();
        let push = |list: &mut BTreeMap<u64, Ops>, id: AffinityId, op| {
            list.entry(id.pair()).or_default().groups.push(op);
        };
        for (id, next) in &staged.0 {
            match (self.0.get(id), next) {
                (None, Some(next)) => push(&mut before, *id, GroupOp::Make(next.group)),
                (Some(held), None) => push(&mut after, *id, GroupOp::Drop(held.group)),
                (Some(held), Some(next)) => {
                    if held.group != next.group {
                        push(&mut before, *id, GroupOp::Rewrite(next.group));
                    }
                    if held.may_lose_to(next) {
                        change.stale.push(*id);
                    }
                }
                (None, None) => {}
            }
        }
        change.before = before.into_values().collect();
        change.after = after.into_values().collect();
        change
    }

    pub(super) fn accept(&mut self, staged: StagedGroups) {
        for (id, held) in staged.0 {
            match held {
                Some(held) => self.0.insert(id, held),
                None => self.0.remove(&id),
            };
        }
    }

    /// Releases all groups. ServicePorts may claim them again.
    pub(super) fn release_all(&self, staged: &mut StagedGroups) {
        staged.0.extend(self.0.keys().map(|id| (*id, None)));
    }

    /// Releases the groups of a ServicePort. The ServicePort may claim them again.
    pub(super) fn release(&self, key: &ServiceKey, staged: &mut StagedGroups) {
        for scope in [Scope::Cluster, Scope::Local] {
            let id = AffinityId::new(key, scope);
            if self.0.contains_key(&id) {
                staged.0.insert(id, None);
            }
        }
    }
}

impl HeldGroup {
    /// Returns whether clients may be remembered with endpoints that `after` does not have.
    fn may_lose_to(&self, after: &Self) -> bool {
        let Some(before) = &self.endpoints else {
            return true;
        };
        let stays = |e: &EndpointAddr| after.endpoints.iter().any(|a| a.binary_search(e).is_ok());
        !before.iter().all(stays)
    }
}

impl StagedGroups {
    /// Claims the groups that a ServicePort needs.
    pub(super) fn claim(&mut self, plan: &ServicePlan) {
        let Some(timeout_s) = plan.affinity_timeout_s else {
            return;
        };
        let inside = plan.frontends.iter().find_map(|f| f.inside.as_ref());
        let of_policy =
            |policy| plan.frontends.iter().find(|f| f.policy == policy).map(|f| &f.endpoints);
        let cluster = of_policy(TrafficPolicy::Cluster).or(inside);
        let local = of_policy(TrafficPolicy::Local);
        for (scope, ours, others) in [
            (Scope::Cluster, cluster, local),
            (Scope::Local, local, cluster),
        ] {
            let Some(endpoints) = ours else {
                continue;
            };
            let may = |e: &EndpointAddr| others.is_some_and(|o| o.binary_search(e).is_ok());
            let group = Group {
                id: AffinityId::new(&plan.key, scope),
                protocol: plan.key.protocol,
                timeout_s,
                inside_apart: scope == Scope::Local && inside.is_some(),
                shared: others.is_some() && endpoints.iter().all(may),
            };
            let endpoints = Some(endpoints.clone());
            self.0.insert(group.id, Some(HeldGroup { group, endpoints }));
        }
    }
}

/// Returns the groups to which one place of a ServicePort leads.
pub(super) fn sticky(plan: &ServicePlan, frontend: &Frontend) -> Option<Sticky> {
    plan.affinity_timeout_s?;
    let cluster = || AffinityId::new(&plan.key, Scope::Cluster);
    Some(Sticky {
        group: match frontend.policy {
            TrafficPolicy::Cluster => cluster(),
            TrafficPolicy::Local => AffinityId::new(&plan.key, Scope::Local),
        },
        inside: frontend.inside.as_ref().map(|_| cluster()),
    })
}
