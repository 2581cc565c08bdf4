//! Schedule of the scans: soon after a commit and once again (for connections without a reply, once again only; for those to
//! dead nodes, the first time only), with pauses after failures; and the processor time that scans may take. This module is
//! pure; time is an argument.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::Work;
use crate::backoff::Backoff;

/// Time from the first scan to the second. After this time, a packet that was in transit during the commit
/// has arrived or is lost, even if another program queued it.
const SECOND_LOOK: Duration = Duration::from_secs(1);

/// Each second of processor time is paid for with this many seconds: scans take a tenth of a processor on average.
const PRICE: u32 = 10;

/// Longest quiet time that is saved for later: after it, a burst of scans may take a second of processor time.
const SAVED: Duration = Duration::from_secs(10);

/// Longest time without a scan while there is work. Stale flows are worse than a busy processor, so this holds even if
/// the scans cost more than their share.
const MAX_REST: Duration = Duration::from_millis(200);

/// First and longest wait after a failed scan.
const RETRY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(30));

/// The processor time that scans of both families have taken, and may take.
///
/// Time on the clock does not count: a busy machine makes scans longer, and no reason to wait with the next one.
#[derive(Debug, Default)]
pub(super) struct Budget {
    /// Time at which all scans are paid for; `None` before the first one.
    paid_at: Option<Instant>,
}

impl Budget {
    /// Returns the earliest time of the next scan.
    pub(super) fn next_at(&self, now: Instant) -> Instant {
        self.paid_at.map_or(now, |paid_at| paid_at.max(now))
    }

    /// Records a scan that ended now.
    pub(super) fn spend(&mut self, now: Instant, processor: Duration) {
        let saved = now.checked_sub(SAVED).unwrap_or(now);
        let paid_at = self.paid_at.unwrap_or(saved).max(saved) + processor * PRICE;
        self.paid_at = Some(paid_at.min(now + MAX_REST));
    }
}

/// The waiting work.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    /// Work that was never scanned for.
    fresh: Work,
    /// Work that was scanned for once, and the time of its second scan.
    second: Option<(Instant, Work)>,
    /// Work that was scanned for once, and waits for the second scan after the one in `second`.
    later: Work,
    /// Time before which a failed scan is not repeated.
    rest_until: Option<Instant>,
    /// `None` = the last scan did not fail.
    backoff: Option<Backoff>,
}

/// One scan.
#[derive(Debug, Default)]
pub(super) struct Job {
    /// The part of the work that is scanned for the first time.
    fresh: Work,
    pub(super) work: Work,
}

impl Schedule {
    /// Adds work, and returns whether there is any. Connections without a reply have the second scan only, unless another
    /// Pod has the address now.
    pub(super) fn add(&mut self, mut work: Work, now: Instant) -> bool {
        let is_work = !work.is_empty();
        let came: HashSet<IpAddr> = std::mem::take(&mut work.came);
        self.later.merge(work.split_half_open());
        self.fresh.merge(work);
        let waiting = self.second.iter().map(|(_, second)| second).chain([&self.later]);
        for returned in waiting.map(|of| of.returned(&came)).collect::<Vec<_>>() {
            self.fresh.merge(returned);
        }
        if self.second.is_none() {
            self.begin_second(now);
        }
        is_work || !self.fresh.is_empty()
    }

    /// Returns when [`Schedule::take`] returns work; the time may be past.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let work = if self.fresh.is_empty() {
            self.second.as_ref().map(|(at, _)| *at)
        } else {
            Some(now)
        };
        work.map(|at| self.rest_until.map_or(at, |rest| rest.max(at)))
    }

    /// Takes the work that is due, if any is.
    pub(super) fn take(&mut self, now: Instant) -> Job {
        if self.rest_until.is_some_and(|until| now < until) {
            return Job::default();
        }
        self.rest_until = None;
        let fresh = std::mem::take(&mut self.fresh);
        let mut work = fresh.clone();
        if let Some((_, second)) = self.second.take_if(|(at, _)| *at <= now) {
            work.merge(second);
            self.begin_second(now);
        }
        Job { fresh, work }
    }

    pub(super) fn done(&mut self, mut job: Job, now: Instant) {
        self.backoff = None;
        // Who answers from now on is not dead.
        job.fresh.dead.clear();
        self.later.merge(job.fresh);
        if self.second.is_none() {
            self.begin_second(now);
        }
    }

    /// Records a failed job. Returns the time after which the job is repeated.
    pub(super) fn failed(&mut self, job: Job, now: Instant) -> Duration {
        let wait = self.backoff.get_or_insert(RETRY).half_jitter();
        self.rest_until = Some(now + wait);
        self.fresh.merge(job.work);
        wait
    }

    /// Starts the wait for the second scan of all work in `later`, together and for the full time.
    fn begin_second(&mut self, now: Instant) {
        let later = std::mem::take(&mut self.later);
        if !later.is_empty() {
            self.second = Some((now + SECOND_LOOK, later));
        }
    }
}
