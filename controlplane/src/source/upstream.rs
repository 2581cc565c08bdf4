//! The state that a source reports about itself, by kind: for readiness, freshness and metrics.
//! Also carries requests to the source for a second list.
//!
//! The source's tasks write it, the status API reads it. A source without such state (manifests)
//! leaves it empty; then only its batches count.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use kplane_model::Issue;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::k8s::Kind;

/// The shared state of all kinds, and requests for second lists.
#[derive(Clone, Debug, Default)]
pub struct Upstream {
    kinds: Arc<Mutex<BTreeMap<Kind, KindState>>>,
    /// Number of requests.
    looks: watch::Sender<u64>,
}

/// The state of one kind.
#[derive(Clone, Debug)]
pub struct KindState {
    /// Time at which the source began with the kind.
    pub started: Instant,
    /// Time up to which the source has provably missed nothing.
    pub current_at: Option<Instant>,
    /// A complete list was delivered once.
    pub synced: bool,
    /// The current problem, and its start.
    pub trouble: Option<Trouble>,
    /// Objects that cannot be read, at most 100.
    pub unreadable: Vec<Issue>,
    /// Totals since the start.
    pub counts: Counts,
}

/// A problem with a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// Start of the problem, without a break.
    pub since: SystemTime,
    /// The problem as a human-readable issue.
    pub issue: Issue,
}

/// Totals since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Complete lists that were accepted.
    pub lists: u64,
    /// Changes from watches.
    pub events: u64,
    /// Events that were already known.
    pub replays: u64,
    /// Failures by their names.
    pub failures: BTreeMap<&'static str, u64>,
}

impl Upstream {
    /// Adds a kind.
    pub fn begin(&self, kind: Kind) {
        let state = KindState {
            started: Instant::now(),
            current_at: None,
            synced: false,
            trouble: None,
            unreadable: Vec::new(),
            counts: Counts::default(),
        };
        self.lock().insert(kind, state);
    }

    /// Changes the state of a kind that was added.
    pub fn update(&self, kind: Kind, change: impl FnOnce(&mut KindState)) {
        if let Some(state) = self.lock().get_mut(&kind) {
            change(state);
        }
    }

    /// Returns the state of all kinds.
    #[must_use]
    pub fn kinds(&self) -> BTreeMap<Kind, KindState> {
        self.lock().clone()
    }

    /// Returns the time since the stalest kind was known to be current; `None` for a source without
    /// kinds.
    #[must_use]
    pub fn age(&self) -> Option<Duration> {
        let kinds = self.lock();
        let ages = kinds.values();
        ages.map(|kind| kind.current_at.unwrap_or(kind.started).elapsed())
            .max()
    }

    /// Returns the problems of all kinds, each once, sorted.
    #[must_use]
    pub fn issues(&self) -> Vec<Issue> {
        let kinds = self.lock();
        let troubles = kinds.values().filter_map(|kind| kind.trouble.as_ref());
        let unreadable = kinds.values().flat_map(|kind| &kind.unreadable);
        let issues = troubles.map(|trouble| &trouble.issue).chain(unreadable);
        let mut issues: Vec<_> = issues.cloned().collect();
        issues.sort();
        issues.dedup();
        issues
    }

    /// Asks the source for another list, because the index or an agent keeps objects that the last
    /// one lacked. Costs nothing while a list is in progress; the source limits how often it lists.
    pub fn look_again(&self) {
        self.looks
            .send_modify(|looks| *looks = looks.wrapping_add(1));
    }

    /// Returns a receiver that is notified of requests for a second list.
    #[must_use]
    pub fn looks(&self) -> watch::Receiver<u64> {
        self.looks.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Kind, KindState>> {
        // Single fields are written at a time, so a panic elsewhere leaves them usable.
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
