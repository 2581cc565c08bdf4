//! Stale conntrack entries: UDP flows that go on to where their Service no longer sends them
//! (behaviours F1 to F5).
//!
//! ```text
//! commit -> Tracker (what changed) -> Schedule (when to look) -> Kernel (list, decide, delete)
//! ```
//!
//! A UDP client that keeps its source port keeps its entry, and with it the endpoint that was
//! chosen for its first packet. So after a commit the kernel is asked for the entries that the
//! change may concern, and those that lead elsewhere than to a serving endpoint are deleted: the
//! next packet is balanced anew. Entries of TCP and SCTP stay (F5).
//!
//! **Invariants.** Nothing here runs before the commit, delays it or its report, or makes it fail:
//! listing and deleting have a thread of their own. A commit that concerns no UDP Service costs no
//! system call. Every change is looked at twice, because a packet that was under way during the
//! commit may have made its entry by the old rules just after the first look.

mod kernel;
mod schedule;
mod totals;
mod tracker;

#[cfg(test)]
mod tests;

pub use totals::{BUCKETS, ConntrackTotals, bucket_bound};
pub use tracker::{Tracker, Verdict, Work};

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kplane_model::Family;

use self::kernel::{ExamineError, Kernel};
use self::schedule::{Job, Schedule};
use crate::backend::{Change, Failure};
use crate::chain;

/// Where totals go after every look.
type Publish = Box<dyn Fn([ConntrackTotals; 2]) + Send>;

/// A handle to the thread that deletes stale entries. Dropped = the thread ends after the work at
/// hand.
#[derive(Debug)]
pub struct Cleaner {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct State {
    families: [FamilyState; 2],
    stop: bool,
}

#[derive(Debug, Default)]
struct FamilyState {
    tracker: Tracker,
    schedule: Schedule,
    totals: ConntrackTotals,
    /// The error of the last look, said once while it lasts.
    error: Option<String>,
}

impl Cleaner {
    /// Starts the thread in the calling thread's network namespace. `publish` is called on it.
    ///
    /// # Errors
    /// That the thread could not be started.
    pub fn start(publish: impl Fn([ConntrackTotals; 2]) + Send + 'static) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let theirs = shared.clone();
        let publish: Publish = Box::new(publish);
        let thread = std::thread::Builder::new()
            .name("conntrack".to_owned())
            .spawn(move || run(&theirs, &publish))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// The data path holds a change now, except for `failures`. O(changed UDP ServicePorts).
    pub fn committed(&self, change: &Change<'_>, failures: &[Failure]) {
        let mut state = self.shared.lock();
        let family = &mut state.families[change.family as usize];
        let work = family.tracker.commit(change, failures);
        if !work.is_empty() {
            family.schedule.add(work);
            self.shared.wake.notify_one();
        }
    }

    /// Counts of each family since the start, IPv4 first.
    #[must_use]
    pub fn totals(&self) -> [ConntrackTotals; 2] {
        self.shared.lock().totals()
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed already.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// The state is whole after every step, so that a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next job; `None` when it is time to end.
    fn next(&self) -> Option<(Family, Job)> {
        let mut state = self.lock();
        loop {
            if state.stop {
                return None;
            }
            let now = Instant::now();
            for family in Family::ALL {
                if let Some(job) = state.families[family as usize].schedule.take(now) {
                    return Some((family, job));
                }
            }
            let due = state.families.iter().filter_map(|f| f.schedule.due(now));
            let due = due.min();
            state = match due {
                None => self
                    .wake
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(due) => {
                    let wait = due.saturating_duration_since(now);
                    let waited = self.wake.wait_timeout(state, wait);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

impl State {
    fn totals(&self) -> [ConntrackTotals; 2] {
        [&self.families[0], &self.families[1]].map(|family| family.totals.clone())
    }
}

fn run(shared: &Shared, publish: &Publish) {
    let mut kernel = Kernel::default();
    while let Some((family, job)) = shared.next() {
        let started = Instant::now();
        // The lock is taken for one entry at a time: a commit never waits for a list.
        let outcome = kernel.examine(family, job.work(), |flow| {
            let state = shared.lock();
            let tracker = &state.families[family as usize].tracker;
            tracker.verdict(flow, job.work())
        });
        let mut state = shared.lock();
        state.families[family as usize].finish(family, job, &outcome, started.elapsed());
        let totals = state.totals();
        drop(state);
        publish(totals);
    }
}

impl FamilyState {
    /// Takes note of how a look went.
    fn finish(
        &mut self,
        family: Family,
        job: Job,
        (deleted, result): &(u64, Result<(), ExamineError>),
        took: Duration,
    ) {
        self.totals.count(*deleted, result.is_err(), took);
        let now = Instant::now();
        match result {
            Ok(()) => {
                self.error = None;
                self.schedule.done(job, now, took);
                tracing::debug!(%family, deleted, ?took, "looked for stale UDP flows");
            }
            Err(error) => {
                let wait = self.schedule.failed(job, now);
                let reason = chain(error);
                if self.error.as_ref() == Some(&reason) {
                    tracing::debug!(%family, error = reason, ?wait, "stale UDP flows still stay");
                } else {
                    tracing::warn!(
                        %family,
                        error = reason,
                        ?wait,
                        "cannot delete stale UDP flows, tried again with pauses of up to 30 s: \
                         clients that keep their source port may go on to endpoints that are gone"
                    );
                }
                self.error = Some(reason);
            }
        }
        if *deleted > 0 {
            tracing::info!(%family, deleted, ?took, "stale UDP flows deleted");
        }
    }
}
