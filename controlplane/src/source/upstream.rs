//! What a source says of its own state, kind by kind: for readiness, freshness and metrics. And the
//! one thing that it is asked: to look again.
//!
//! Written by the source's tasks, read by the status API. A source that has no such state
//! (manifests) leaves it empty; what its batches say is all there is then.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use kplane_model::Issue;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::k8s::Kind;

/// The state of all kinds, shared; and requests for a second look at them.
#[derive(Clone, Debug, Default)]
pub struct Upstream {
    kinds: Arc<Mutex<BTreeMap<Kind, KindState>>>,
    /// Number of requests.
    looks: watch::Sender<u64>,
}

/// The state of one kind.
#[derive(Clone, Debug)]
pub struct KindState {
    /// When the source began with it.
    pub started: Instant,
    /// Proof that nothing newer was missed up to this moment.
    pub current_at: Option<Instant>,
    /// A complete list was delivered once.
    pub synced: bool,
    /// What is wrong at the moment, and since when.
    pub trouble: Option<Trouble>,
    /// Objects that cannot be read, at most 100.
    pub unreadable: Vec<Issue>,
    /// Totals since the start.
    pub counts: Counts,
}

/// What is wrong with a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// Since when, without a break.
    pub since: SystemTime,
    /// For people.
    pub issue: Issue,
}

/// Totals since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Complete lists that were accepted.
    pub lists: u64,
    /// Changes from watches.
    pub events: u64,
    /// Events that were known already.
    pub replays: u64,
    /// Failures by their names.
    pub failures: BTreeMap<&'static str, u64>,
}

impl Upstream {
    /// Begins with a kind.
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

    /// Changes the state of a kind that was begun with.
    pub fn update(&self, kind: Kind, change: impl FnOnce(&mut KindState)) {
        if let Some(state) = self.lock().get_mut(&kind) {
            change(state);
        }
    }

    /// The state of all kinds.
    #[must_use]
    pub fn kinds(&self) -> BTreeMap<Kind, KindState> {
        self.lock().clone()
    }

    /// Time since the stalest kind was known to be current; `None` for a source without kinds.
    #[must_use]
    pub fn age(&self) -> Option<Duration> {
        let kinds = self.lock();
        let ages = kinds.values();
        ages.map(|kind| kind.current_at.unwrap_or(kind.started).elapsed())
            .max()
    }

    /// The problems of all kinds, each once, sorted.
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

    /// Somebody keeps what the last look did not show: asks the source for another one. Costs nothing
    /// while one is under way; how often there is one, the source decides.
    pub fn look_again(&self) {
        self.looks
            .send_modify(|looks| *looks = looks.wrapping_add(1));
    }

    /// Wakes up when a second look is wanted.
    #[must_use]
    pub fn looks(&self) -> watch::Receiver<u64> {
        self.looks.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Kind, KindState>> {
        // Single fields are written at a time, so a panic elsewhere leaves them usable.
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
