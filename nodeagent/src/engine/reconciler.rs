//! The way of one table to the kernel, the same for all tables of both families. Time is an argument.
//!
//! ```text
//! behind --complete change--> in the kernel --read back, in slices--> verified
//!   ^ ^------error, later------'  |   ^ '-----change--------------------'
//!   '----------drift--------------+---------------------------------------'
//! ```
//!
//! Each table does what it has waited for longest ([`Reconciler::next`]).

use std::time::{Duration, Instant};

use kplane_dataplane::backend::{ApplyError, Verification};
use kplane_dataplane::backoff::Backoff;
use kplane_dataplane::chain;
use kplane_model::{Family, chance};

use super::now::Now;
use super::progress::{Excused, FamilyProgress};
use crate::desired::Position;
use crate::report::{LastingError, Repairs};

/// First and longest wait before a failed table is tried again.
const RETRY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(30));

/// First and longest wait before a repair of another program's change. The first repair happens at once. If
/// the program keeps undoing repairs, later ones wait.
const REPAIR: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));

/// Time from a repair to a read of everything, which finds changes that the kernel did not report.
const AFTER_REPAIR: Duration = Duration::from_secs(1);

/// Time without changes before a table is read back, since reading competes with writing.
const QUIET: Duration = Duration::from_secs(30);

/// Least time between two complete reads: each costs the kernel a walk over everything.
const VERIFY_INTERVAL: Duration = Duration::from_secs(60);

/// Most time between two complete reads, whatever happens. It catches changes that the kernel did not report.
const VERIFY_LATEST: Duration = Duration::from_secs(300);

/// What a table is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TableOf {
    /// Services: what the kernel holds serves, even if it is not the latest.
    Services,
    /// NetworkPolicies: what is in doubt may be open, so repairs never wait, and a table that cannot be read is written
    /// anew.
    Policies,
}

/// What a table waits for. The order decides between things that are due at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TableTask {
    /// Repair another program's change.
    Repair,
    /// Try again after a failure.
    Retry,
    /// Send the next part of a change.
    GoOn,
    /// Read the table back, or the next slice of it.
    ReadBack,
}

/// How far one table of one family is, what went wrong, and what is due when.
#[derive(Debug)]
pub(super) struct Reconciler {
    pub(super) family: Family,
    rules: TableOf,
    /// Whether the kernel's state is not known, so that only a complete change will do.
    pub(super) behind: bool,
    held: Option<Position>,
    verified: Option<Position>,
    excused: Excused,
    pub(super) error: Option<LastingError>,
    backoff: Backoff,
    retry_at: Option<Instant>,
    go_on_at: Option<Instant>,
    verify_at: Option<Instant>,
    /// The time when the kernel was last read back.
    read_at: Option<Instant>,
    /// The time when the kernel was last read back and equal, milliseconds since 1970; 0 = never.
    pub(super) verified_at_ms: u64,
    repair_at: Option<Instant>,
    repair_backoff: Backoff,
    /// Another program's change that the next complete change repairs.
    drift: Option<String>,
    pub(super) repairs: Repairs,
}

impl Reconciler {
    pub(super) fn new(family: Family, rules: TableOf) -> Self {
        Self {
            family,
            rules,
            behind: true,
            held: None,
            verified: None,
            excused: Excused::default(),
            error: None,
            backoff: RETRY,
            retry_at: None,
            go_on_at: None,
            verify_at: None,
            read_at: None,
            verified_at_ms: 0,
            repair_at: None,
            repair_backoff: REPAIR,
            drift: None,
            repairs: Repairs::default(),
        }
    }

    /// Returns what has to be done first, and when.
    pub(super) fn next(&self) -> Option<(Instant, TableTask)> {
        // What a read finds is compared with all of a change.
        let verify_at = if self.go_on_at.is_none() { self.verify_at } else { None };
        let tasks = [
            (self.repair_at, TableTask::Repair),
            (self.retry_at, TableTask::Retry),
            (self.go_on_at, TableTask::GoOn),
            (verify_at, TableTask::ReadBack),
        ];
        tasks.into_iter().filter_map(|(at, task)| Some((at?, task))).min()
    }

    /// Returns whether the pause after a failure is not over.
    pub(super) fn is_waiting(&self, now: Now) -> bool {
        self.retry_at.is_some_and(|at| now.instant < at)
    }

    /// Records that the kernel has a part of a change. Nothing waits for a retry then: the change is one.
    pub(super) fn begun(&mut self, now: Now) {
        self.retry_at = None;
        self.go_on_at = Some(now.instant);
    }

    /// Records that a change waits for the end of another one, which the kernel has now.
    pub(super) fn follow_up(&mut self, now: Now) {
        self.retry_at = Some(now.instant);
    }

    /// Records that the kernel has all of a change. `probe_interval`: see
    /// [`Side::probe_interval`](kplane_dataplane::backend::Side::probe_interval).
    pub(super) fn settled(&mut self, probe_interval: Option<Duration>, now: Now) {
        let complete = std::mem::take(&mut self.behind);
        self.error = None;
        self.retry_at = None;
        self.go_on_at = None;
        if let Some(what) = self.drift.take() {
            self.repairs.add(what, now.ms);
        }
        let is_due = self.verify_at.is_some_and(|at| at <= now.instant);
        if complete {
            self.verify_at = Some(now.instant);
        } else if let Some(interval) = probe_interval {
            self.verify_at.get_or_insert(now.instant + interval);
        } else if !is_due {
            let quiet = now.instant + QUIET;
            self.verify_at = Some(match self.read_at {
                None => quiet,
                Some(read) => quiet.clamp(read + VERIFY_INTERVAL, read + VERIFY_LATEST),
            });
        }
    }

    /// Records that the kernel holds a position. `changed`: not only because nothing of this table differs in it.
    pub(super) fn hold(&mut self, position: Position, changed: bool) {
        // A comparison at the last position holds for this one as well.
        if !changed && self.verified.is_some() && self.verified == self.held {
            self.verified = Some(position);
        }
        self.held = Some(position);
        // The agent may come back to that epoch, when the kernel holds something else.
        self.verified.take_if(|verified| verified.epoch != position.epoch);
    }

    /// Records that nothing has to be done for a position, whatever the kernel holds. Only a complete change will do later.
    pub(super) fn leave(&mut self, position: Position) {
        (self.error, self.retry_at) = (None, None);
        self.hold(position, false);
    }

    /// Records that the kernel may lack something of a position that it held.
    pub(super) fn retract(&mut self, position: Position) {
        self.excused.retract(position);
        let held = self.held.take_if(|held| *held == position);
        // What was read back of an earlier position is not what the kernel holds now.
        self.verified.take_if(|verified| held.is_some() || *verified == position);
    }

    /// Records that the kernel refuses a position, and whether that needs the family.
    pub(super) fn refused(&mut self, position: Position, is_needed: bool) {
        self.excused.refused(position, is_needed);
    }

    /// Records that the kernel could not be programmed.
    pub(super) fn fail(&mut self, error: &ApplyError, now: Now) {
        self.give_up(chain(&*error.source), now);
    }

    fn give_up(&mut self, reason: String, now: Now) {
        let wait = self.backoff.half_jitter();
        let (family, rules) = (self.family, self.rules);
        if self.error.as_ref().is_some_and(|old| old.reason == reason) {
            tracing::debug!(%family, ?rules, error = reason, ?wait, "still cannot program the kernel");
        } else {
            tracing::warn!(
                %family,
                ?rules,
                error = reason,
                ?wait,
                "cannot program the kernel, which keeps what it held; other tables go on. The agent tries again \
                 with pauses of up to 30 s"
            );
        }
        self.lose(reason, now);
        self.retry_at = Some(now.instant + wait);
    }

    /// Records that only a complete change will do, and why.
    fn lose(&mut self, reason: String, now: Now) {
        self.behind = true;
        self.go_on_at = None;
        self.verify_at = None;
        now.stand(&mut self.error, reason);
    }

    /// Schedules a repair after another program changed the table: at once, unless the program keeps changing what
    /// Services need. Returns whether that is news.
    pub(super) fn drifted(&mut self, now: Now) -> bool {
        // The kernel's state is not known anyway, and everything is about to be applied.
        if self.behind || self.repair_at.is_some() {
            return false;
        }
        self.repair_at = Some(now.instant + self.pause(|it| &mut it.repair_backoff));
        true
    }

    /// Returns how long a repair waits.
    fn pause(&mut self, backoff: impl FnOnce(&mut Self) -> &mut Backoff) -> Duration {
        if self.rules == TableOf::Policies {
            return Duration::ZERO;
        }
        let backoff = backoff(self);
        let is_fresh = backoff.is_fresh();
        let wait = backoff.half_jitter();
        if is_fresh { Duration::ZERO } else { wait }
    }

    /// Records the outcome of a repair, or of a read.
    pub(super) fn read_back(
        &mut self,
        task: TableTask,
        outcome: Result<Verification, ApplyError>,
        probe_interval: Option<Duration>,
        now: Now,
    ) {
        if task == TableTask::Repair {
            self.repair_at = None;
        } else if !matches!(outcome, Ok(Verification::Unfinished)) {
            self.read_at = Some(now.instant);
            let next = next_read(outcome.is_err());
            self.verify_at = Some(now.instant + probe_interval.unwrap_or(next));
        }
        match outcome {
            Ok(Verification::Equal) if task == TableTask::Repair => {}
            Ok(Verification::Equal) => self.equal(now),
            Ok(Verification::Unfinished) => self.verify_at = Some(now.instant),
            Ok(Verification::Repaired(what)) => self.repaired(what, now),
            Ok(Verification::Outdated(what)) => {
                tracing::info!(family = %self.family, what, "planning everything anew");
                self.verify_at = None;
                self.behind = true;
                self.retry_at = Some(now.instant);
            }
            Ok(Verification::Drifted(what)) => self.drift(what, now),
            Err(error) => self.unreadable(task, &error, now),
        }
    }

    fn equal(&mut self, now: Now) {
        self.verified = self.held;
        self.verified_at_ms = now.ms;
        self.error = None;
        self.backoff.reset();
        self.repair_backoff.reset();
    }

    /// Records that another program's change was repaired.
    pub(super) fn repaired(&mut self, what: String, now: Now) {
        tracing::warn!(
            family = %self.family,
            rules = ?self.rules,
            what,
            "another program had changed kplane's rules; the agent has repaired them. Does another program flush or \
             edit rules on this node?"
        );
        self.repairs.add(what, now.ms);
        self.error = None;
        let at = now.instant + AFTER_REPAIR;
        self.verify_at = Some(self.verify_at.map_or(at, |before| before.min(at)));
    }

    fn drift(&mut self, what: String, now: Now) {
        tracing::warn!(
            family = %self.family,
            rules = ?self.rules,
            what,
            "another program changed kplane's rules; the agent repairs them. Does another program flush or edit rules \
             on this node?"
        );
        self.forget_position();
        self.lose(format!("changed by another program: {what}"), now);
        self.drift = Some(what);
        self.retry_at = Some(now.instant + self.pause(|it| &mut it.backoff));
    }

    fn unreadable(&mut self, task: TableTask, error: &ApplyError, now: Now) {
        let reason = format!("cannot read the kernel back: {}", chain(&*error.source));
        if task == TableTask::Repair || self.rules == TableOf::Policies {
            // What another program changed is not known any more, so everything is applied anew.
            self.forget_position();
            return self.give_up(reason, now);
        }
        tracing::warn!(family = %self.family, reason, "the agent tries again later");
        now.stand(&mut self.error, reason);
    }

    fn forget_position(&mut self) {
        (self.held, self.verified) = (None, None);
    }

    /// Returns the position that the kernel holds; `None` while known changes of other programs are not
    /// repaired.
    pub(super) fn held(&self) -> Option<Position> {
        if self.repair_at.is_none() { self.held } else { None }
    }

    pub(super) fn progress(&self) -> FamilyProgress {
        FamilyProgress {
            held: self.held(),
            excused: self.excused,
        }
    }

    /// Returns how far what was read back is.
    pub(super) fn read_progress(&self) -> FamilyProgress {
        FamilyProgress {
            held: if self.repair_at.is_none() { self.verified } else { None },
            excused: self.excused,
        }
    }
}

/// Returns the time to the next check of everything. It is spread, so that nodes that started together do not
/// check together for ever.
fn next_read(failed: bool) -> Duration {
    if failed {
        VERIFY_INTERVAL
    } else {
        chance::between(VERIFY_LATEST * 4 / 5, VERIFY_LATEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn after(now: Now, wait: Duration) -> Now {
        Now {
            instant: now.instant + wait,
            ..now
        }
    }

    /// Returns a table that the kernel holds and that was read back, and the time.
    fn settled(rules: TableOf) -> (Reconciler, Now) {
        let (mut table, now) = (Reconciler::new(Family::V4, rules), Now::real());
        table.settled(None, now);
        assert_eq!(table.next(), Some((now.instant, TableTask::ReadBack)));
        table.read_back(TableTask::ReadBack, Ok(Verification::Equal), None, now);
        (table, now)
    }

    #[test]
    fn repairs_of_what_restricts_do_not_pause() {
        let (mut table, now) = settled(TableOf::Policies);
        for _ in 0..10 {
            assert!(table.drifted(now));
            assert_eq!(table.next(), Some((now.instant, TableTask::Repair)));
            let repaired = Ok(Verification::Repaired("the table is gone".into()));
            table.read_back(TableTask::Repair, repaired, None, now);
        }
        let drifted = Ok(Verification::Drifted("the chains differ".into()));
        table.read_back(TableTask::ReadBack, drifted, None, now);
        assert_eq!(table.next(), Some((now.instant, TableTask::Retry)));
        assert_eq!(table.repairs.count, 10);
    }

    /// A read waits for the end of a change that never stops, but not for ever.
    #[test]
    fn any_table_is_read_back_once_in_a_few_minutes() {
        for rules in [TableOf::Services, TableOf::Policies] {
            let (mut table, start) = settled(rules);
            let mut now = start;
            while table.next().is_some_and(|(at, _)| at > now.instant) {
                now = after(now, SECOND);
                table.settled(None, now);
            }
            let waited = now.instant - start.instant;
            assert!(waited > QUIET * 8 && waited <= VERIFY_LATEST, "{waited:?}");
        }
    }

    /// The next part comes before another try, which would wait for the end of the change.
    #[test]
    fn a_retry_goes_on_in_parts() {
        let (mut table, now) = settled(TableOf::Policies);
        table.follow_up(now);
        table.begun(after(now, SECOND));
        let next = (now.instant + SECOND, TableTask::GoOn);
        assert_eq!(table.next(), Some(next));
    }

    #[test]
    fn slices_follow_each_other_unless_something_waits_for_longer() {
        let (mut table, now) = settled(TableOf::Services);
        let read_at = table.read_at;
        let now = after(now, VERIFY_LATEST);
        table.read_back(TableTask::ReadBack, Ok(Verification::Unfinished), None, now);
        assert_eq!(table.next(), Some((now.instant, TableTask::ReadBack)));
        assert_eq!(table.read_at, read_at);
        table.drifted(now);
        assert_eq!(table.next(), Some((now.instant, TableTask::Repair)));
    }

    #[test]
    fn what_is_in_doubt_does_not_count_as_held_while_it_restricts() {
        let position = Position {
            epoch: 1,
            revision: 1,
        };
        for rules in [TableOf::Services, TableOf::Policies] {
            let (mut table, now) = settled(rules);
            table.hold(position, true);
            let error = ApplyError {
                family: Family::V4,
                source: "interrupted".into(),
            };
            table.read_back(TableTask::ReadBack, Err(error), None, now);
            let services = rules == TableOf::Services;
            assert_eq!(table.held().is_some(), services);
            assert_eq!(table.behind, !services);
        }
    }
}
