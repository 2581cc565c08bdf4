//! The groups of session affinity that a table holds. Pure, like `table.rs`.

use std::collections::{BTreeSet, HashMap};

use kplane_model::{EndpointAddr, ServiceKey, TrafficPolicy};

use super::affinity::{AffinityId, Group, Scope};
use super::frontend::{Ops, Sticky};
use super::structure::GroupOp;
use crate::plan::{Frontend, ServicePlan};

/// What a table holds, by group.
#[derive(Clone, Debug, Default)]
pub(super) struct Groups(HashMap<AffinityId, Held>);

/// What a group is and which endpoints it may remember.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Held {
    group: Group,
    /// Sorted; `None` for a group that was found in the kernel and nobody has claimed yet.
    endpoints: Option<Vec<EndpointAddr>>,
}

/// A change of groups that has not been accepted yet: `None` = gone.
#[derive(Debug, Default)]
pub(super) struct StagedGroups(HashMap<AffinityId, Option<Held>>);

/// What a change of groups does.
#[derive(Debug, Default)]
pub(super) struct GroupChange {
    /// Before elements lead to them; one group each.
    pub(super) before: Vec<Ops>,
    /// When no element leads to them any more; one group each.
    pub(super) after: Vec<Ops>,
    /// Groups that may remember endpoints which they must not remember.
    pub(super) stale: Vec<AffinityId>,
}

impl Groups {
    pub(super) fn adopt(&mut self, groups: &[Group]) {
        let found = groups.iter().map(|group| {
            let endpoints = None;
            let group = *group;
            (group.id, Held { group, endpoints })
        });
        self.0.extend(found);
    }

    pub(super) fn all(&self) -> BTreeSet<Group> {
        self.0.values().map(|held| held.group).collect()
    }

    /// The endpoints that a group may remember, sorted; `None` while that is not known.
    pub(super) fn endpoints(&self, id: AffinityId) -> Option<&[EndpointAddr]> {
        self.0.get(&id)?.endpoints.as_deref()
    }

    /// Works out what is to be done.
    pub(super) fn change(&self, staged: &StagedGroups) -> GroupChange {
        let mut change = GroupChange::default();
        let (mut make, mut rewrite, mut drop) = (Vec::new(), Vec::new(), Vec::new());
        for (id, after) in &staged.0 {
            match (self.0.get(id), after) {
                (None, Some(after)) => make.push(after.group),
                (Some(before), None) => drop.push(before.group),
                (Some(before), Some(after)) => {
                    if before.group != after.group {
                        rewrite.push(after.group);
                    }
                    if before.may_lose_to(after) {
                        change.stale.push(*id);
                    }
                }
                (None, None) => {}
            }
        }
        // A Local group leads to the other one of its ServicePort.
        make.sort_unstable_by_key(|group| (group.scope, group.id));
        drop.sort_unstable_by_key(|group| (std::cmp::Reverse(group.scope), group.id));
        let make = make.into_iter().map(GroupOp::Make);
        let rewrite = rewrite.into_iter().map(GroupOp::Rewrite);
        change.before = make.chain(rewrite).map(Ops::group).collect();
        change.after = drop
            .into_iter()
            .map(GroupOp::Drop)
            .map(Ops::group)
            .collect();
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

    /// Gives up all groups, until they are claimed again.
    pub(super) fn release_all(&self, staged: &mut StagedGroups) {
        staged.0.extend(self.0.keys().map(|id| (*id, None)));
    }

    /// Gives up the groups of a ServicePort, until they are claimed again.
    pub(super) fn release(&self, key: &ServiceKey, staged: &mut StagedGroups) {
        for scope in [Scope::Cluster, Scope::Local] {
            let id = AffinityId::new(key, scope);
            if self.0.contains_key(&id) {
                staged.0.insert(id, None);
            }
        }
    }
}

impl Held {
    /// Whether clients may be remembered with endpoints that `after` does not have.
    fn may_lose_to(&self, after: &Self) -> bool {
        let Some(before) = &self.endpoints else {
            return true;
        };
        let stays = |e: &EndpointAddr| after.endpoints.iter().any(|a| a.binary_search(e).is_ok());
        !before.iter().all(stays)
    }
}

impl StagedGroups {
    /// Takes the groups that a ServicePort needs.
    pub(super) fn claim(&mut self, plan: &ServicePlan) {
        let Some(timeout_s) = plan.affinity_timeout_s else {
            return;
        };
        let inside = plan.frontends.iter().find_map(|f| f.inside.as_ref());
        let of_policy = |policy| {
            let mut frontends = plan.frontends.iter();
            frontends.find(|f| f.policy == policy).map(|f| &f.endpoints)
        };
        let cluster = of_policy(TrafficPolicy::Cluster).or(inside);
        let mut take = |scope, endpoints: Option<&Vec<EndpointAddr>>, inside| {
            if let Some(endpoints) = endpoints {
                let group = Group {
                    id: AffinityId::new(&plan.key, scope),
                    protocol: plan.key.protocol,
                    timeout_s,
                    scope,
                    inside,
                };
                let endpoints = Some(endpoints.clone());
                self.0.insert(group.id, Some(Held { group, endpoints }));
            }
        };
        take(Scope::Cluster, cluster, None);
        let inside = inside.map(|_| AffinityId::new(&plan.key, Scope::Cluster));
        take(Scope::Local, of_policy(TrafficPolicy::Local), inside);
    }
}

/// The groups that one place of a ServicePort leads to.
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
