//! Stale conntrack entries: UDP flows that go on to an endpoint to which their Service no longer sends them
//! (behaviours F1 to F5).
//!
//! ```text
//! commit -> Tracker (what changed) -> Schedule (when to scan) -> Kernel (list, decide, delete)
//! ```
//!
//! A UDP client that keeps its source port keeps its conntrack entry, and with it the endpoint that was
//! chosen for its first packet. So after a commit, kplane asks the kernel for the entries that the change may
//! concern. It deletes the entries that do not lead to a serving endpoint, and the next packet is balanced
//! anew. Entries of TCP and SCTP stay (F5).
//!
//! **Invariants.** Nothing here runs before the commit, delays it or its report, or makes it fail: listing
//! and deleting have a thread of their own. A commit that concerns no UDP Service costs no system call. Every
//! change is scanned for twice: a packet that was in transit during the commit may have created its entry by
//! the old rules just after the first scan.

mod flows;
mod schedule;
mod totals;
mod tracker;

#[cfg(test)]
mod tests;

pub(crate) use flows::{Filter, open};
pub use totals::{BUCKETS, ConntrackCounts, ConntrackTotals, FailedScans, bucket_bound};
pub use tracker::{Tracker, Verdict, Work};

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kplane_model::Family;
use nix::time::{ClockId, clock_gettime};

use self::flows::{ConntrackSocket, ExamineError};
use self::schedule::{Budget, Job, Schedule};
use crate::backend::{Change, Failure};
use crate::chain;

/// A handle to the thread that deletes stale entries. After a drop, the thread finishes its current work and
/// ends.
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
    budget: Budget,
    stop: bool,
}

#[derive(Debug, Default)]
struct FamilyState {
    tracker: Tracker,
    schedule: Schedule,
    /// The error of the last scan. An error that lasts is logged once.
    error: Option<String>,
}

impl Cleaner {
    /// Starts the thread in the calling thread's network namespace. The thread counts its work in `counts`.
    ///
    /// # Errors
    /// The thread could not be started.
    pub fn start(counts: ConntrackCounts) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let theirs = shared.clone();
        let thread = std::thread::Builder::new()
            .name("conntrack".to_owned())
            .spawn(move || run(&theirs, &counts))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Records that the data path holds a change, except for `failures`. O(changed UDP ServicePorts).
    pub fn committed(&self, change: &Change<'_>, failures: &[Failure]) {
        let mut state = self.shared.lock();
        let family = &mut state.families[change.family as usize];
        let work = family.tracker.commit(change, failures);
        if !work.is_empty() {
            family.schedule.add(work);
            self.shared.wake.notify_one();
        }
    }
}

impl Cleaner {
    /// Has all flows of a family looked at: some may have begun while another program's change was in effect.
    pub fn doubt(&self, family: Family) {
        let work = Work {
            everything: true,
            ..Work::default()
        };
        self.shared.lock().families[family as usize].schedule.add(work);
        self.shared.wake.notify_one();
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed already.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Locks the state. The state is consistent after every step, so a panic of another thread does no harm.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next job. Returns `None` when the thread has to end.
    fn next(&self) -> Option<(Family, Job)> {
        let mut state = self.lock();
        loop {
            if state.stop {
                return None;
            }
            let now = Instant::now();
            let next_at = state.budget.next_at(now);
            for family in Family::ALL.into_iter().filter(|_| next_at <= now) {
                if let Some(job) = state.families[family as usize].schedule.take(now) {
                    return Some((family, job));
                }
            }
            let due = state.families.iter().filter_map(|f| f.schedule.due(now));
            let due = due.min().map(|due| due.max(next_at));
            state = match due {
                None => self.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(due) => {
                    let wait = due.saturating_duration_since(now);
                    let waited = self.wake.wait_timeout(state, wait);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

fn run(shared: &Shared, counts: &ConntrackCounts) {
    let mut kernel = ConntrackSocket::default();
    while let Some((family, job)) = shared.next() {
        let (started, processor) = (Instant::now(), processor_time());
        // The lock is taken for one entry at a time, so that a commit never waits for a list.
        let outcome = kernel.examine(family, job.work(), |flow| {
            let state = shared.lock();
            let tracker = &state.families[family as usize].tracker;
            tracker.verdict(flow, job.work())
        });
        let (took, (deleted, result)) = (started.elapsed(), &outcome);
        counts.count(
            family,
            *deleted,
            result.as_ref().err().map(|error| chain(error)),
            took,
        );
        let spent = processor_time()
            .zip(processor)
            .map_or(took, |(now, then)| now.saturating_sub(then));
        let mut state = shared.lock();
        state.budget.spend(Instant::now(), spent);
        state.families[family as usize].finish(family, job, &outcome, took);
    }
}

/// Returns the processor time that the calling thread has taken, also in the kernel; `None` if the kernel does not say.
fn processor_time() -> Option<Duration> {
    let taken = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID);
    taken.ok().map(Duration::from)
}

impl FamilyState {
    /// Records the outcome of a scan.
    fn finish(
        &mut self,
        family: Family,
        job: Job,
        (deleted, result): &(u64, Result<(), ExamineError>),
        took: Duration,
    ) {
        let now = Instant::now();
        match result {
            Ok(()) => {
                self.error = None;
                self.schedule.done(job, now);
                tracing::debug!(%family, deleted, ?took, "scanned for stale UDP flows");
            }
            Err(error) => {
                let wait = self.schedule.failed(job, now);
                let reason = chain(error);
                if self.error.as_ref() == Some(&reason) {
                    tracing::debug!(%family, error = reason, ?wait, "still cannot delete stale UDP \
                        flows");
                } else {
                    tracing::warn!(
                        %family,
                        error = reason,
                        ?wait,
                        "cannot delete stale UDP flows; trying again with pauses of up to 30 s. \
                         Clients that keep their source port may still reach removed endpoints"
                    );
                }
                self.error = Some(reason);
            }
        }
        if *deleted > 0 {
            tracing::info!(%family, deleted, ?took, "deleted stale UDP flows");
        }
    }
}
