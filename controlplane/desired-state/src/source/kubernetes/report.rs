//! The report of one reflector: written to [`Upstream`], where status, events and metrics read it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::SystemTime;

use kplane_model::{Issue, ObjectRef, Reason};
use tokio::sync::watch;
use tokio::time::Instant;

use super::transport::Unreadable;
use crate::k8s::{Kind, ObjectId};
use crate::kubernetes::{Asked, Failure};
use crate::source::upstream::{Trouble, Upstream};

/// Number of failures in a row after which a usually passing failure is reported.
const PASSING: u32 = 3;
/// Maximum number of unreadable objects that are reported.
const MAX_UNREADABLE: usize = 100;

/// The reporter for one kind.
#[derive(Debug)]
pub(super) struct Reporter {
    kind: Kind,
    upstream: Upstream,
    troubled: bool,
    unreadable: BTreeMap<(Arc<str>, Arc<str>), Issue>,
    /// Namespaces and names of objects of the first list that could never be read.
    never_read: BTreeSet<(Arc<str>, Arc<str>)>,
}

impl Reporter {
    pub(super) fn new(kind: Kind, upstream: Upstream) -> Self {
        upstream.begin(kind);
        Self {
            kind,
            upstream,
            troubled: false,
            unreadable: BTreeMap::new(),
            never_read: BTreeSet::new(),
        }
    }

    /// Returns a receiver that is notified of requests for a second list.
    pub(super) fn looks(&self) -> watch::Receiver<u64> {
        self.upstream.looks()
    }

    /// Returns the reason why unknown objects may exist, if there is one.
    pub(super) fn doubt(&self) -> Option<String> {
        let (namespace, name) = self.never_read.first()?;
        Some(format!(
            "{} {}s of the API server cannot be read, the first is {namespace}/{name}",
            self.never_read.len(),
            self.kind
        ))
    }

    /// Returns whether the last report had a problem.
    pub(super) fn is_troubled(&self) -> bool {
        self.troubled
    }

    /// Records a complete list that was believed; `first` if it is the first one.
    pub(super) fn listed(&mut self, unreadable: &[Unreadable], first: bool) {
        let names = unreadable.iter().map(|one| (one.namespace.clone(), one.name.clone()));
        if first {
            self.never_read = names.collect();
        } else if !self.never_read.is_empty() {
            let names: BTreeSet<_> = names.collect();
            self.never_read.retain(|name| names.contains(name));
        }
        self.unreadable.clear();
        for one in unreadable.iter().take(MAX_UNREADABLE) {
            self.keep(one.clone());
        }
        self.share_unreadable();
        self.upstream.update(self.kind, |state| state.counts.lists += 1);
        self.synced();
        self.current(Instant::now());
    }

    /// Records that the server does not have the resource, which is no problem, and nothing to keep up with.
    pub(super) fn absent(&mut self) {
        self.listed(&[], false);
        self.upstream.update(self.kind, |state| state.absent = true);
    }

    /// Records that nothing waits for a first list.
    pub(super) fn synced(&self) {
        self.upstream.update(self.kind, |state| state.synced = true);
    }

    /// Records that all changes up to now have arrived, and ends a problem.
    pub(super) fn current(&mut self, now: Instant) {
        self.upstream.update(self.kind, |state| {
            state.current_at = Some(now);
            state.absent = false;
            state.trouble = None;
        });
        self.troubled = false;
    }

    pub(super) fn event(&mut self, readable: Option<&ObjectId>) {
        self.upstream.update(self.kind, |state| state.counts.events += 1);
        let known = readable.map(|id| (id.namespace.clone(), id.name.clone()));
        if let Some(name) = &known {
            self.never_read.remove(name);
        }
        if known.is_some_and(|name| self.unreadable.remove(&name).is_some()) {
            self.share_unreadable();
        }
    }

    pub(super) fn replay(&mut self) {
        self.upstream.update(self.kind, |state| state.counts.replays += 1);
    }

    pub(super) fn unreadable(&mut self, unreadable: Unreadable) {
        if self.unreadable.len() < MAX_UNREADABLE {
            self.keep(unreadable);
            self.share_unreadable();
        }
    }

    fn keep(&mut self, unreadable: Unreadable) {
        let Unreadable {
            namespace,
            name,
            reason,
        } = unreadable;
        let object = ObjectRef::new(self.kind.as_str(), &namespace, &name);
        let reason = format!(
            "cannot be read ({reason}); until it can, what was last read of it stays in force"
        );
        let issue = Issue::error(Reason::Unreadable, object, reason);
        self.unreadable.insert((namespace, name), issue);
    }

    fn share_unreadable(&self) {
        let issues: Arc<Vec<_>> = Arc::new(self.unreadable.values().cloned().collect());
        self.upstream.update(self.kind, |state| state.unreadable = issues);
    }

    /// Counts a failure without reporting it.
    pub(super) fn failure(&self, failure: &Failure) {
        self.upstream.update(self.kind, |state| {
            *state.counts.failures.entry(failure.name()).or_default() += 1;
        });
    }

    /// Counts a failure, and reports it if it is worth that.
    pub(super) fn failed(&mut self, server: &str, asked: Asked, failure: &Failure, in_a_row: u32) {
        self.failure(failure);
        let passes = match failure {
            Failure::Broken(_)
            | Failure::Silent(_)
            | Failure::Gone
            | Failure::Busy { .. }
            | Failure::Server { .. } => true,
            Failure::Unreachable(_)
            | Failure::Certificate(_)
            | Failure::Credentials(_)
            | Failure::Unauthorized
            | Failure::Forbidden(_)
            | Failure::NotServed
            | Failure::Refused { .. }
            | Failure::Malformed(_) => false,
        };
        if !passes || in_a_row >= PASSING {
            self.trouble(server, failure.code(), failure.explain(asked));
        }
    }

    /// Reports a list that is not believed.
    pub(super) fn doubts(&mut self, server: &str, reason: String) {
        self.upstream.update(self.kind, |state| {
            *state.counts.failures.entry("doubtful_list").or_default() += 1;
        });
        self.trouble(server, Reason::ApiFailing, reason);
    }

    fn trouble(&mut self, server: &str, code: Reason, reason: String) {
        self.troubled = true;
        let issue = Issue::error(code, ObjectRef::new("API server", "", server), reason);
        self.upstream.update(self.kind, |state| {
            let since = state.trouble.as_ref().map(|trouble| trouble.since);
            state.trouble = Some(Trouble {
                since: since.unwrap_or_else(SystemTime::now),
                issue,
            });
        });
    }
}
