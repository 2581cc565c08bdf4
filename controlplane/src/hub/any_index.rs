//! The owner of the names behind the store: the index, or the mirror of a relay.

use std::collections::BTreeSet;
use std::time::{Instant, SystemTime};

use kplane_model::{Issue, NodeName, ServiceName};

use crate::admission::Admission;
use crate::freshness::Freshness;
use crate::index::{
    Causes, CliffGuard, Held, Index, Outcome, Page, Picture, Selection, ServiceDetail, Totals,
};
use crate::k8s::{ObjectId, Uid};
use crate::mirror::{Mirror, Reflection};
use crate::publish::{Publication, Relayed, Staged, Store};
use crate::source::{Batch, relayed};
use crate::trust::Trust;

/// The index of a control plane that reads objects itself, or the mirror of a relay.
pub(super) enum AnyIndex {
    Own(Box<Index>),
    Mirror(Box<Mirror>),
}

/// Changes to publish.
pub(super) enum Change {
    Computed(Publication),
    Relayed(Relayed),
}

/// The result of a step.
pub(super) struct Step {
    pub(super) change: Option<Change>,
    /// The causes of the change; a mirror knows none.
    pub(super) causes: Causes,
    pub(super) issues_changed: bool,
    pub(super) held_changed: bool,
    pub(super) held_more: bool,
}

impl From<Outcome> for Step {
    fn from(outcome: Outcome) -> Self {
        Self {
            change: outcome.publication.map(Change::Computed),
            causes: outcome.causes,
            issues_changed: outcome.issues_changed,
            held_changed: outcome.held_changed,
            held_more: outcome.held_more,
        }
    }
}

impl From<Reflection> for Step {
    fn from(reflection: Reflection) -> Self {
        Self {
            change: reflection.publication.map(Change::Relayed),
            causes: Causes::default(),
            issues_changed: reflection.issues_changed,
            held_changed: reflection.held_changed,
            held_more: reflection.held_more,
        }
    }
}

impl Change {
    /// Returns the Services that may have changed, also where nodes have nothing to do about it.
    pub(super) fn touched(&self) -> BTreeSet<ServiceName> {
        let names: BTreeSet<&ServiceName> = match self {
            Self::Computed(of) => of.services.iter().map(|(key, _)| &key.service).collect(),
            Self::Relayed(of) => of.ports.keys().map(|key| &key.service).collect(),
        };
        names.into_iter().cloned().collect()
    }

    /// Returns the time at which the first of the changes was observed.
    pub(super) fn observed_at(&self) -> SystemTime {
        match self {
            Self::Computed(publication) => publication.observed_at,
            Self::Relayed(relayed) => relayed.observed_at,
        }
    }

    /// Publishes the change.
    pub(super) fn stage(self, store: &Store, freshness: &Freshness) -> Staged {
        match self {
            Self::Computed(publication) => store.stage(publication, freshness),
            Self::Relayed(relayed) => store.stage_relayed(relayed, freshness),
        }
    }
}

impl AnyIndex {
    /// Returns the one that fits a source.
    pub(super) fn new(
        source: &str,
        admission: Admission,
        guard: CliffGuard,
        started_at: SystemTime,
    ) -> Self {
        match source {
            relayed::NAME => Self::Mirror(Box::new(Mirror::new(guard))),
            _ => {
                let index = Index::new(admission).guarded(guard);
                Self::Own(Box::new(index.started_at(started_at)))
            }
        }
    }

    pub(super) fn apply(&mut self, batch: Batch) -> Step {
        match self {
            Self::Own(index) => index.apply(batch).into(),
            Self::Mirror(mirror) => mirror.apply(batch).into(),
        }
    }

    pub(super) fn approve(&mut self, at: SystemTime) -> (Option<Held>, Step) {
        match self {
            Self::Own(index) => {
                let (held, outcome) = index.approve(at);
                (held, outcome.into())
            }
            Self::Mirror(mirror) => {
                let (held, reflection) = mirror.approve(at);
                (held, reflection.into())
            }
        }
    }

    /// Returns the time at which the origin was current; that of the latest batch is now.
    pub(super) fn current_at(&self) -> Instant {
        match self {
            Self::Own(_) => Instant::now(),
            Self::Mirror(mirror) => mirror.current_at(),
        }
    }

    /// Returns the versions of the source that the followed control plane reported; `None` if there is none.
    pub(super) fn relayed_freshness(&self) -> Option<&Freshness> {
        match self {
            Self::Own(_) => None,
            Self::Mirror(mirror) => Some(mirror.freshness()),
        }
    }

    pub(super) fn is_synced(&self) -> bool {
        match self {
            Self::Own(index) => index.is_synced(),
            Self::Mirror(mirror) => mirror.is_synced(),
        }
    }

    pub(super) fn totals(&self) -> Totals {
        match self {
            Self::Own(index) => index.totals(),
            Self::Mirror(mirror) => mirror.totals(),
        }
    }

    pub(super) fn issues(&self) -> Vec<Issue> {
        match self {
            Self::Own(index) => index.issues(),
            Self::Mirror(mirror) => mirror.issues(),
        }
    }

    pub(super) fn held(&self) -> Option<Held> {
        match self {
            Self::Own(index) => index.held(),
            Self::Mirror(mirror) => mirror.held(),
        }
    }

    /// Returns whether an approval would change anything.
    pub(super) fn needs_approval(&self) -> bool {
        match self {
            Self::Own(index) => index.needs_approval(),
            Self::Mirror(mirror) => mirror.needs_approval(),
        }
    }

    /// Returns the part of the picture that an approval names.
    pub(super) fn picture(&self) -> Picture {
        match self {
            Self::Own(index) => index.picture(),
            Self::Mirror(mirror) => mirror.picture(),
        }
    }

    pub(super) fn trust(&self) -> Trust {
        match self {
            Self::Own(index) => index.trust(),
            Self::Mirror(mirror) => mirror.trust(),
        }
    }

    pub(super) fn ports(&self, store: &Store, selection: &Selection) -> Page {
        match self {
            Self::Own(index) => index.ports(selection),
            Self::Mirror(mirror) => mirror.ports(store, selection),
        }
    }

    pub(super) fn detail(
        &self,
        store: &Store,
        name: &ServiceName,
        upstream: &[Issue],
    ) -> Option<ServiceDetail> {
        match self {
            Self::Own(index) => index.detail(name, upstream),
            Self::Mirror(mirror) => mirror.detail(store, name),
        }
    }

    /// Returns a copy of the index; a relay has none.
    pub(super) fn copy(&self) -> Option<Box<Index>> {
        match self {
            Self::Own(index) => Some(index.clone()),
            Self::Mirror(_) => None,
        }
    }

    /// Returns the UID of an object; a relay knows none.
    pub(super) fn uid(&self, id: &ObjectId) -> Option<Uid> {
        match self {
            Self::Own(index) => index.uid(id),
            Self::Mirror(_) => None,
        }
    }

    /// Returns the UID of a Node; a relay knows none.
    pub(super) fn node_uid(&self, node: &NodeName) -> Option<Uid> {
        match self {
            Self::Own(index) => index.node_uid(node),
            Self::Mirror(_) => None,
        }
    }
}
