//! One step of the index: applies a batch, and decides which deletions are held back.
//!
//! The deletions of a batch are collected first and judged as a whole. If they are a cliff, none of them takes
//! effect until the objects are back, a later list agrees, or the operator approves ([`super::CliffGuard`]). New
//! and changed objects of the same batch take effect at once.

use std::collections::BTreeSet;
use std::time::SystemTime;

use kplane_model::{Issue, Reason, ServiceName};

use super::guard::Loss;
use super::holding::{Held, Holding, Said, service_name};
use super::{Index, Outcome, SliceEntry};
use crate::k8s::{Kind, ObjectId};
use crate::source::{Batch, Event, Located};
use crate::trust::Trust;

/// A batch in progress.
#[derive(Debug, Default)]
struct Step {
    /// Agents were served before this batch.
    live: bool,
    /// Objects that the source no longer names.
    unnamed: BTreeSet<ObjectId>,
    /// Objects that the source named as deleted; used only if such deletions are guarded as well.
    gone: BTreeSet<ObjectId>,
    issues_changed: bool,
    held_changed: bool,
    held_more: bool,
}

impl Index {
    /// Applies a batch.
    pub fn apply(&mut self, batch: Batch) -> Outcome {
        let at = batch.observed_at;
        let mut step = Step {
            live: self.is_synced(),
            ..Step::default()
        };
        self.pending.observed_at.get_or_insert(at);
        for event in batch.events {
            self.take_in(event, at, &mut step);
        }
        self.judge(&mut step, at);
        self.finish(step)
    }

    /// Removes everything that is held, because the operator has confirmed the source's picture. Returns what was
    /// held.
    pub fn approve(&mut self, at: SystemTime) -> (Option<Held>, Outcome) {
        let held = self.held();
        let mut step = Step::default();
        self.pending.observed_at.get_or_insert(at);
        self.completeness.approve();
        if let Some(holding) = self.holding.take() {
            step.held_changed = true;
            for id in holding.objects() {
                step.issues_changed |= self.delete_object(id);
            }
        }
        (held, self.finish(step))
    }

    /// Returns a summary of the objects that are served although the source no longer names them.
    pub fn held(&self) -> Option<Held> {
        let holding = self.holding.as_ref()?;
        let slices = holding.objects().filter_map(|id| self.slices.get(id));
        let services: BTreeSet<&ServiceName> = slices.map(|slice| &slice.service).collect();
        let named: Vec<_> = services
            .into_iter()
            .filter(|name| {
                let entry = self.services.get(*name);
                entry.is_some_and(|entry| !entry.held) && !self.has_other_endpoints(name, &[])
            })
            .cloned()
            .collect();
        Some(holding.describe(named.into_iter()))
    }

    /// Returns the trust in the picture.
    pub fn trust(&self) -> Trust {
        self.completeness.trust()
    }

    fn take_in(&mut self, event: Event, at: SystemTime, step: &mut Step) {
        match event {
            Event::Init(kind) => self.resync.begin(kind),
            Event::InitApply(located) => self.is_there(*located, None, step),
            Event::InitDone(kind) => step.unnamed.extend(self.resync.finish(kind)),
            Event::Apply(located) => {
                let changed_at = self.is_synced().then_some(at);
                self.is_there(*located, changed_at, step);
            }
            Event::Delete(id) => {
                self.resync.gone(&id);
                step.unnamed.remove(&id);
                if step.live && self.guard.guards_names() {
                    step.gone.insert(id);
                } else {
                    self.let_go(&id, step);
                }
            }
            Event::Vanished(ids) => {
                ids.iter().for_each(|id| self.resync.gone(id));
                step.unnamed.extend(ids);
            }
            Event::Looked(kind) => self.listed_again(kind, step),
            Event::Issues(issues) => {
                step.issues_changed |= issues != self.source_issues;
                self.source_issues = issues;
            }
            Event::Doubts(doubts) => self.completeness.doubt(doubts),
            Event::ApiServer(address_claims) => {
                let users = self.address_claims.replace_api_server(address_claims);
                self.pending.services.extend(users);
            }
            Event::Version(..) | Event::Alive => {}
        }
    }

    fn is_there(&mut self, located: Located, changed_at: Option<SystemTime>, step: &mut Step) {
        let id = located.object.id();
        self.resync.seen(id.clone());
        step.unnamed.remove(&id);
        step.gone.remove(&id);
        let holding = self.holding.as_mut();
        step.held_changed |= holding.is_some_and(|holding| holding.remove(&id));
        step.issues_changed |= self.apply_object(located, changed_at);
        if self.holding.is_some() && id.kind == Kind::EndpointSlice {
            self.replace_held_slices(&id, step);
        }
    }

    /// Releases the held slices of a Service when another slice of it has endpoints.
    fn replace_held_slices(&mut self, id: &ObjectId, step: &mut Step) {
        let Some(slice) = self.slices.get(id).filter(|slice| slice.has_endpoints()) else {
            return;
        };
        let slices = self.slices_of.get(&slice.service).into_iter().flatten();
        let held: Vec<_> = slices.filter(|id| self.holds(id)).cloned().collect();
        held.iter().for_each(|id| self.let_go(id, step));
    }

    /// Handles a later list that agrees: held objects that it did not name either are gone.
    fn listed_again(&mut self, kind: Kind, step: &mut Step) {
        self.completeness.listed_again(kind);
        let mut agreed =
            self.holding.as_ref().map_or_else(Vec::new, |holding| holding.unnamed(kind));
        agreed.extend(step.unnamed.extract_if(.., |id| id.kind == kind));
        agreed.iter().for_each(|id| self.let_go(id, step));
    }

    /// Decides which deletions of a batch take effect.
    fn judge(&mut self, step: &mut Step, at: SystemTime) {
        let unnamed = std::mem::take(&mut step.unnamed);
        let guards = step.live && !unnamed.is_empty() && self.guard.guards_absence();
        let cliff = guards.then(|| self.guard.cliff(self.loss(&unnamed))).flatten();
        let reason = cliff.map(|cliff| format!("they are missing from the source, and {cliff}"));
        self.decide(unnamed, Said::Nothing, reason.as_deref(), at, step);

        let gone = std::mem::take(&mut step.gone);
        if gone.is_empty() {
            return;
        }
        let recent = self.recent.with(self.loss(&gone), at);
        let cliff = self.guard.cliff(recent.loss());
        if cliff.is_none() {
            self.recent = recent;
        }
        let reason = cliff.map(|cliff| format!("{cliff} within a minute, by deletions"));
        self.decide(gone, Said::Gone, reason.as_deref(), at, step);
    }

    /// Holds objects if there is a reason, or removes them without one. Slices stay with a Service that is held.
    fn decide(
        &mut self,
        ids: BTreeSet<ObjectId>,
        said: Said,
        reason: Option<&str>,
        at: SystemTime,
        step: &mut Step,
    ) {
        if let Some(reason) = reason {
            let holding = self.holding.get_or_insert_with(|| Holding::new(at));
            holding.explain(reason);
        }
        for id in ids {
            if (reason.is_some() || self.belongs_to_held(&id)) && self.serves(&id) {
                self.hold(id, said, at, step);
            } else {
                self.let_go(&id, step);
            }
        }
        self.holding.take_if(|holding| holding.is_empty());
    }

    fn hold(&mut self, id: ObjectId, said: Said, at: SystemTime, step: &mut Step) {
        if id.kind == Kind::Service {
            let name = service_name(&id);
            if let Some(entry) = self.services.get_mut(&name) {
                // Other Services that are named and claim its places get them.
                entry.held = true;
                self.pending.services.insert(name);
            }
        }
        step.held_changed = true;
        step.held_more |= said == Said::Nothing;
        let holding = self.holding.get_or_insert_with(|| Holding::new(at));
        holding.add(id, said);
    }

    fn let_go(&mut self, id: &ObjectId, step: &mut Step) {
        if let Some(holding) = &mut self.holding {
            step.held_changed |= holding.remove(id);
        }
        step.issues_changed |= self.delete_object(id);
    }

    /// Returns whether an object has any effect.
    fn serves(&self, id: &ObjectId) -> bool {
        match id.kind {
            Kind::Service => self.services.contains_key(&service_name(id)),
            Kind::EndpointSlice => self.slices.contains_key(id),
            Kind::Node | Kind::ServiceCidr => true,
            Kind::NetworkPolicy | Kind::Namespace | Kind::Pod | Kind::ClusterNetworkPolicy => {
                self.policies.is_some()
            }
        }
    }

    fn holds(&self, id: &ObjectId) -> bool {
        self.holding.as_ref().is_some_and(|holding| holding.contains(id))
    }

    fn belongs_to_held(&self, id: &ObjectId) -> bool {
        let slice = if self.holding.is_some() { self.slices.get(id) } else { None };
        let service = slice.and_then(|slice| self.services.get(&slice.service));
        service.is_some_and(|service| service.held)
    }

    /// Returns the loss if these objects went. The work is proportional to their number.
    fn loss(&self, ids: &BTreeSet<ObjectId>) -> Loss {
        let services = ids.iter().filter(|id| id.kind == Kind::Service);
        let is_served = |name: &ServiceName| {
            let entry = self.services.get(name);
            entry.is_some_and(|entry| !entry.published.is_empty())
        };
        let services: BTreeSet<_> = services.map(service_name).filter(is_served).collect();
        let slices = ids.iter().filter_map(|id| self.slices.get(id));
        let theirs: BTreeSet<&ServiceName> = slices.map(|slice| &slice.service).collect();
        let leaving: Vec<_> = ids.iter().collect();
        let emptied = theirs.into_iter().filter(|name| {
            let entry = self.services.get(*name);
            entry.is_some_and(|entry| entry.has_endpoints() && !entry.held)
                && !services.contains(*name)
                && !self.has_other_endpoints(name, &leaving)
        });
        let held = self.holding.as_ref().map_or(0, Holding::services);
        let of_kind = |kind| ids.iter().filter(|id| id.kind == kind && self.serves(id)).count();
        let all = |kind| self.resync.count(kind) + of_kind(kind);
        Loss {
            services: services.len(),
            // The counts are those before the step: new objects do not make up for deleted ones.
            of_services: self.totals.services.saturating_sub(held),
            emptied: emptied.count(),
            of_served: self.with_endpoints.saturating_sub(held),
            nodes: of_kind(Kind::Node),
            of_nodes: self.nodes.len(),
            policies: of_kind(Kind::NetworkPolicy) + of_kind(Kind::ClusterNetworkPolicy),
            of_policies: all(Kind::NetworkPolicy) + all(Kind::ClusterNetworkPolicy),
            namespaces: of_kind(Kind::Namespace),
            of_namespaces: all(Kind::Namespace),
            pods: of_kind(Kind::Pod),
            of_pods: all(Kind::Pod),
        }
    }

    /// Returns whether a Service has endpoints in named slices other than these; `without` is sorted.
    fn has_other_endpoints(&self, service: &ServiceName, without: &[&ObjectId]) -> bool {
        self.slices_of
            .get(service)
            .into_iter()
            .flatten()
            .filter(|id| without.binary_search(id).is_err() && !self.holds(id))
            .any(|id| self.slices.get(id).is_some_and(SliceEntry::has_endpoints))
    }

    /// Publishes what a change other than a batch leads to.
    pub(super) fn publish_pending(&mut self) -> Outcome {
        self.finish(Step::default())
    }

    fn finish(&mut self, mut step: Step) -> Outcome {
        self.holding.take_if(|holding| holding.is_empty());
        let publication = if self.is_synced() {
            self.take_publication(&mut step.issues_changed)
        } else {
            None
        };
        Outcome {
            causes: std::mem::take(&mut self.pending.causes),
            publication,
            issues_changed: step.issues_changed || step.held_changed,
            held_changed: step.held_changed,
            held_more: step.held_more,
        }
    }

    /// Returns the issue that reports held objects.
    pub(super) fn holding_issue(&self) -> Option<Issue> {
        let held = self.held()?;
        Some(Issue::of_source(Reason::Held, held.to_string()))
    }
}
