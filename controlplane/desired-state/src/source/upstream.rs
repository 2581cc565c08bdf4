//! The state that a source reports about itself, by kind: for readiness, freshness, issues and
//! metrics. Also carries requests to the source for a second list.
//!
//! The source's tasks write it. The status API, events and metrics read it here, so the index has
//! no part in it. A source without such state (manifests) leaves it empty; then only its batches
//! count.
//!
//! `Hub::issues` joins these problems with those that the index found.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use kplane_model::Issue;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

use super::issue_log::IssueLog;
use crate::k8s::Kind;

/// The shared state of all kinds, and requests for second lists.
#[derive(Clone, Debug, Default)]
pub struct Upstream {
    kinds: Arc<Mutex<BTreeMap<Kind, KindState>>>,
    /// Problems of all kinds, each once, sorted.
    issues: watch::Sender<Arc<Vec<Issue>>>,
    /// Number of requests.
    looks: watch::Sender<u64>,
    /// Identity of the cluster, once it is known.
    cluster: Arc<OnceLock<String>>,
    /// The log of problems, those of the input as well.
    log: Arc<Mutex<IssueLog>>,
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
    /// The server does not have the resource.
    pub absent: bool,
    /// The current problem, and its start.
    pub trouble: Option<Trouble>,
    /// Objects that cannot be read, at most 100.
    pub unreadable: Arc<Vec<Issue>>,
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
            absent: false,
            trouble: None,
            unreadable: Arc::default(),
            counts: Counts::default(),
        };
        self.kinds.lock().insert(kind, state);
    }

    /// Changes the state of a kind that was added. If this changes the issues, their readers are
    /// woken, and new issues are logged.
    pub fn update(&self, kind: Kind, change: impl FnOnce(&mut KindState)) {
        let mut kinds = self.kinds.lock();
        let Some(state) = kinds.get_mut(&kind) else {
            return;
        };
        let before = (state.trouble.clone(), Arc::clone(&state.unreadable));
        change(state);
        if before.0 == state.trouble && before.1 == state.unreadable {
            return;
        }
        let now = Arc::new(issues_of(&kinds));
        if now == *self.issues.borrow() {
            return;
        }
        let before = self.issues.send_replace(Arc::clone(&now));
        drop(kinds);
        self.log_new(&before, &now);
        if now.is_empty() {
            info!("the API server works again");
        }
    }

    /// Returns the state of all kinds.
    pub fn kinds(&self) -> BTreeMap<Kind, KindState> {
        self.kinds.lock().clone()
    }

    /// Returns whether the server does not have a kind that the source asked for.
    pub fn is_absent(&self, kind: Kind) -> bool {
        self.kinds.lock().get(&kind).is_some_and(|state| state.absent)
    }

    /// Sets the identity of the cluster, which does not change while the process runs.
    pub fn set_cluster_id(&self, id: String) {
        let _ = self.cluster.set(id);
    }

    /// Returns the identity of the cluster; empty = not known.
    pub fn cluster_id(&self) -> &str {
        self.cluster.get().map_or("", String::as_str)
    }

    /// Returns the time since the stalest kind was known to be current; `None` for a source without
    /// kinds. What the server does not have cannot be stale, nor what NetworkPolicies need and was never read: agents know
    /// that, and Services do not wait for it.
    pub fn age(&self) -> Option<Duration> {
        let kinds = self.kinds.lock();
        let is_waited_for = |kind: &Kind| Kind::ALL.contains(kind);
        kinds
            .iter()
            .filter(|(kind, state)| {
                !state.absent && (state.current_at.is_some() || is_waited_for(kind))
            })
            .map(|(_, state)| state.current_at.unwrap_or(state.started).elapsed())
            .max()
    }

    /// Returns the problems of all kinds, each once, sorted.
    pub fn issues(&self) -> Arc<Vec<Issue>> {
        Arc::clone(&self.issues.borrow())
    }

    /// Returns a receiver that is notified when the issues change.
    pub fn issue_changes(&self) -> watch::Receiver<Arc<Vec<Issue>>> {
        self.issues.subscribe()
    }

    /// Asks the source for another list, because the index or an agent keeps objects that the last
    /// one lacked. Costs nothing while a list is in progress; the source limits how often it lists.
    pub fn look_again(&self) {
        self.looks.send_modify(|looks| *looks = looks.wrapping_add(1));
    }

    /// Returns a receiver that is notified of requests for a second list.
    pub fn looks(&self) -> watch::Receiver<u64> {
        self.looks.subscribe()
    }

    /// Logs the issues of `after` that are not in `before`, in a few lines; both sorted.
    pub fn log_new(&self, before: &[Issue], after: &[Issue]) {
        let mut log = self.log.lock();
        for (severity, line) in log.new_lines(before, after) {
            warn!(%severity, "{line}");
        }
    }
}

fn issues_of(kinds: &BTreeMap<Kind, KindState>) -> Vec<Issue> {
    let troubles = kinds.values().filter_map(|kind| kind.trouble.as_ref());
    let unreadable = kinds.values().flat_map(|kind| kind.unreadable.iter());
    let mut issues: Vec<_> =
        troubles.map(|trouble| &trouble.issue).chain(unreadable).cloned().collect();
    issues.sort();
    issues.dedup();
    issues
}

#[cfg(test)]
mod tests;
