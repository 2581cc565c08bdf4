//! Protects what the node serves across a restart. The agent writes a cache file of what it serves.
//! If it does not know what the kernel serves, it does not replace that by data that may lack most
//! Services.

use std::time::{Duration, Instant};

use kplane_model::Family;

use super::confirmation::Confirmation;
use super::now::Now;
use super::offline_start::OfflineStartSettings;
use super::pipeline::Pipeline;
use crate::cache::{Cache, CheckpointWriter};
use crate::desired::{CliffGuard, Confidence, Desired, Held, Position, SavedState};
use kplane_dataplane::policy::Tell;

/// Time from a change to the write that covers it and all later ones until then.
const SETTLE: Duration = Duration::from_secs(1);
/// Least time between two writes of everything, or an amount for each object if that is more. Handing over 10,000
/// objects takes half a millisecond, for which other changes have to wait, and writing them some 15 ms.
const INTERVAL: Duration = Duration::from_secs(5);
const INTERVAL_OF_ONE: Duration = Duration::from_millis(1);
/// Time after which a state without changes is written again, so that the file says until when control
/// planes confirmed it. After a power cut, that time may be this much too early.
const REFRESH: Duration = Duration::from_secs(3_600);

/// The engine's protection against absence.
#[derive(Clone, Debug, Default)]
pub struct CheckpointSettings {
    /// The limit on how much may go at once.
    pub guard: CliffGuard,
    /// The cache file; `None` = none.
    pub cache: Option<Cache>,
    /// How to serve from the cache file while no control plane answers; `None` = not at all.
    pub offline_start: Option<OfflineStartSettings>,
}

impl CheckpointSettings {
    /// Returns the desired state that remembers the cache file, and the keeper of that file.
    /// Waits for the disk, for some seconds at most.
    pub(super) fn begin(self) -> (Desired, Checkpoint, Option<(String, Tell)>) {
        let mut desired = Desired::new(self.guard);
        let mut checkpoint = Checkpoint {
            blind: true,
            ..Checkpoint::default()
        };
        let mut suspects = None;
        match self.cache.map(Cache::start) {
            None => {}
            Some(Ok((writer, left))) => {
                suspects = writer.notes().map(|tell| (left.suspects, tell));
                checkpoint.writer = Some(writer);
                checkpoint.blind = left.saved.is_none();
                if let Some(saved) = left.saved {
                    checkpoint.written = Some((saved.position, saved.confirmed_ms));
                    checkpoint.confirmation.set(saved.confirmed_ms);
                    desired.restore(saved);
                }
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "cannot start the thread that writes the cache file; after a restart this agent starts without it");
            }
        }
        (desired, checkpoint, suspects)
    }
}

#[derive(Debug, Default)]
pub(super) struct Checkpoint {
    writer: Option<CheckpointWriter>,
    /// The time of the next write.
    due: Option<Instant>,
    handed_over: Option<Instant>,
    /// The time at which to write a state without changes.
    refresh: Option<Instant>,
    confirmation: Confirmation,
    /// The position and the confirmation that the file contains.
    written: Option<(Position, u64)>,
    /// Whether the kernel has held a state of this process. The file has nothing that no kernel served.
    pub(super) served: bool,
    /// Whether nothing is known of what the node served before this process.
    blind: bool,
    /// The reason why the kernel is not touched.
    hands_off: Option<Held>,
    /// Whether the last log line on this said that something is held.
    reported: bool,
}

impl Checkpoint {
    /// Records that an update was taken; `first` if it is the first one.
    pub(super) fn taken(
        &mut self,
        first: bool,
        desired: &Desired,
        families: &mut [Pipeline],
        now: Now,
    ) {
        self.consider(first, desired, families, now);
        let held = self.held(desired);
        match (&held, self.reported) {
            (Some(held), false) => tell(held),
            (None, true) => tracing::info!(
                "this agent no longer holds Services that the source does not name: the source names them again or \
                 has deleted them, or an operator has approved their removal"
            ),
            _ => {}
        }
        self.reported = held.is_some();
    }

    /// Decides whether the kernel may be touched. It may not if the agent does not know what the
    /// kernel serves and the control plane's data may lack some of it.
    fn consider(&mut self, first: bool, desired: &Desired, families: &mut [Pipeline], now: Now) {
        let empty = Family::ALL.into_iter().all(|family| desired.counts(family).services == 0);
        let (confidence, doubt) = desired.confidence();
        let doubt = match confidence {
            Confidence::Confirmed => None,
            Confidence::Whole => empty.then_some("the source names no Service at all"),
            Confidence::Partial if doubt.is_empty() => Some("the source could not be read in full"),
            Confidence::Partial => Some(doubt),
        };
        let Some(doubt) = doubt else {
            self.hands_off = None;
            return;
        };
        let blind = first && self.blind;
        let mut families = families.iter_mut();
        if self.hands_off.is_some() || blind && families.any(Pipeline::has_services) {
            let since_ms = self.hands_off.as_ref().map_or(now.ms, |held| held.since_ms);
            self.hands_off = Some(Held {
                reason: doubt.to_owned(),
                since_ms,
                ..Held::default()
            });
        }
    }

    /// Returns whether the kernel must not be touched.
    pub(super) fn hands_off(&self) -> bool {
        self.hands_off.is_some()
    }

    /// Returns when a control plane last confirmed the state.
    pub(super) fn confirmation(&self) -> &Confirmation {
        &self.confirmation
    }

    /// Returns what is served although the control plane does not send it like this.
    pub(super) fn held(&self, desired: &Desired) -> Option<Held> {
        self.hands_off.clone().or_else(|| desired.held())
    }

    /// Records that the served state has changed; `released` if something is not held any more.
    pub(super) fn changed(&mut self, released: bool, now: Instant) {
        if self.writer.is_none() || self.hands_off() {
            return;
        }
        // The next start must not undo an approved removal.
        let soon = if released { now } else { now + SETTLE };
        let due = match self.handed_over {
            Some(at) if !released => soon.max(at),
            _ => soon,
        };
        self.due = Some(self.due.map_or(due, |before| before.min(due)));
    }

    pub(super) fn due(&self) -> Option<Instant> {
        let times = [self.due, self.refresh].into_iter().flatten();
        if self.served { times.min() } else { None }
    }

    pub(super) fn is_due(&self, now: Now) -> bool {
        self.due().is_some_and(|at| at <= now.instant)
    }

    /// Hands the served state to the keeper, if the file does not have it.
    pub(super) fn hand_over(&mut self, desired: &Desired, now: Instant) {
        self.refresh = Some(now + REFRESH);
        let saved = self.unwritten(desired);
        if let (Some(writer), Some(saved)) = (&self.writer, saved) {
            let objects = u32::try_from(saved.objects.len()).unwrap_or(u32::MAX);
            self.handed_over = Some(now + INTERVAL.max(INTERVAL_OF_ONE * objects));
            writer.take(saved);
        }
    }

    /// Writes what is not written yet, at the end of the engine.
    pub(super) fn close(&mut self, desired: &Desired) {
        let last = self.unwritten(desired);
        if let Some(writer) = self.writer.take() {
            writer.close(last);
        }
    }

    /// Returns the served state, if it, its position or its confirmation is newer than the file; `None` also
    /// if nothing is in effect, or the kernel has held nothing yet.
    fn unwritten(&mut self, desired: &Desired) -> Option<SavedState> {
        let confirmed_ms = self.confirmation.get();
        let written = Some((desired.position()?, confirmed_ms));
        let changed = self.due.take().is_some();
        let news = changed || written != self.written;
        if !news || !self.served || self.hands_off() {
            return None;
        }
        self.written = written;
        desired.saved_state(confirmed_ms)
    }
}

fn tell(held: &Held) {
    if held.is_untouched() {
        tracing::warn!(
            reason = held.reason,
            "leaving the kernel as it is: it has Services that this agent does not know, and the source may lack \
             them. Fix the source, or run `kpctl approve`"
        );
    } else {
        tracing::warn!(
            services = held.services,
            without_endpoints = held.without_endpoints,
            examples = held.examples.join(", "),
            reason = held.reason,
            "keeping Services that the source does not name, or names without endpoints. Fix the source, or run \
             `kpctl approve`"
        );
    }
}
