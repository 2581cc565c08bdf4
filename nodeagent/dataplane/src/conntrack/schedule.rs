//! When to look for stale flows: soon after a commit and once again, never for more than a share of
//! the time, and with pauses while it fails. Pure; time is an argument.

use std::time::{Duration, Instant};

use super::Work;
use crate::backoff::Backoff;

/// From a first look to the second: a packet that was under way during the commit has arrived or
/// is lost by then, even if somebody queued it.
const SECOND_LOOK: Duration = Duration::from_secs(1);

/// After a look that took a time there is none for so many times as long: however many changes
/// there are, looking takes at most a tenth of a processor.
const REST_FACTOR: u32 = 9;

/// First and longest wait after a failed look.
const RETRY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(30));

/// The work that waits.
#[derive(Debug)]
pub(super) struct Schedule {
    /// Never looked at.
    fresh: Work,
    /// Looked at once, and when the second look is due.
    second: Option<(Instant, Work)>,
    /// Looked at once, for the second look after that.
    later: Work,
    /// Not before this.
    rest_until: Option<Instant>,
    backoff: Backoff,
}

/// One look.
#[derive(Debug)]
pub(super) struct Job {
    /// What of the work is looked at for the first time.
    fresh: Work,
    work: Work,
}

impl Job {
    pub(super) fn work(&self) -> &Work {
        &self.work
    }
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            fresh: Work::default(),
            second: None,
            later: Work::default(),
            rest_until: None,
            backoff: RETRY,
        }
    }
}

impl Schedule {
    pub(super) fn add(&mut self, work: Work) {
        self.fresh.merge(work);
    }

    /// When [`Schedule::take`] has something; may be past.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let work = match self.fresh.is_empty() {
            true => self.second.as_ref().map(|(at, _)| *at),
            false => Some(now),
        };
        work.map(|at| self.rest_until.map_or(at, |rest| rest.max(at)))
    }

    pub(super) fn take(&mut self, now: Instant) -> Option<Job> {
        if self.rest_until.is_some_and(|until| now < until) {
            return None;
        }
        self.rest_until = None;
        let fresh = std::mem::take(&mut self.fresh);
        let mut work = fresh.clone();
        if let Some((_, second)) = self.second.take_if(|(at, _)| *at <= now) {
            work.merge(second);
            self.begin_second(now);
        }
        (!work.is_empty()).then_some(Job { fresh, work })
    }

    pub(super) fn done(&mut self, job: Job, now: Instant, took: Duration) {
        self.backoff.reset();
        self.rest_until = Some(now + took * REST_FACTOR);
        self.later.merge(job.fresh);
        if self.second.is_none() {
            self.begin_second(now);
        }
    }

    /// Says after what time the job is tried again.
    pub(super) fn failed(&mut self, job: Job, now: Instant) -> Duration {
        let wait = self.backoff.half_jitter();
        self.rest_until = Some(now + wait);
        self.fresh.merge(job.work);
        wait
    }

    /// What comes later gets its second look together, after the full time.
    fn begin_second(&mut self, now: Instant) {
        let later = std::mem::take(&mut self.later);
        if !later.is_empty() {
            self.second = Some((now + SECOND_LOOK, later));
        }
    }
}
