//! What must not be lost by a start: what the node serves is written down, and a kernel of which
//! nothing is known is not touched for a picture that may lack most of it.

use std::time::{Duration, Instant};

use kplane_model::Family;

use super::core::Now;
use crate::cache::{Cache, Keeper, Picture};
use crate::desired::{CliffGuard, Confidence, Desired, Held};
use kplane_dataplane::backend::Backend;

/// A change is written down so long after it, with all that come meanwhile.
const SETTLE: Duration = Duration::from_secs(1);
/// From one time that everything is written down to the next, and more of it for each object: 10,000
/// are handed over in half a millisecond, which a change of the moment has to wait.
const INTERVAL: Duration = Duration::from_secs(5);
const INTERVAL_OF_ONE: Duration = Duration::from_micros(100);

/// How an engine deals with absence.
#[derive(Clone, Debug, Default)]
pub struct Recall {
    /// How much may go at once.
    pub guard: CliffGuard,
    /// Where what is served is written down; `None` = nowhere.
    pub cache: Option<Cache>,
}

impl Recall {
    /// The desired state with what is remembered, and whoever writes it down from now on. Waits for
    /// the disk, some seconds at most.
    pub(super) fn begin(self) -> (Desired, Keeping) {
        let mut desired = Desired::new(self.guard);
        let mut keeping = Keeping {
            blind: true,
            ..Keeping::default()
        };
        match self.cache.map(Cache::start) {
            None => {}
            Some(Ok((keeper, memory))) => {
                keeping.keeper = Some(keeper);
                keeping.blind = memory.is_none();
                desired.remember(memory.unwrap_or_default());
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "what this node serves is not written down: no thread for it");
            }
        }
        (desired, keeping)
    }
}

#[derive(Debug, Default)]
pub(super) struct Keeping {
    keeper: Option<Keeper>,
    /// When to hand over what is served.
    due: Option<Instant>,
    handed_over: Option<Instant>,
    /// Nothing is known of what the node served before this process.
    blind: bool,
    /// Why the kernel is not touched.
    hands_off: Option<Held>,
    /// Something was held when that was last told.
    told: bool,
}

impl Keeping {
    /// An update was taken, the first one if `first`.
    pub(super) fn taken(
        &mut self,
        first: bool,
        desired: &Desired,
        backend: &mut dyn Backend,
        now: Now,
    ) {
        self.consider(first, desired, backend, now);
        let held = self.held(desired);
        match (&held, self.told) {
            (Some(held), false) => tell(held),
            (None, true) => tracing::info!(
                "nothing is kept any more that the source does not name: it is named again, gone by \
                 name, or its absence is believed"
            ),
            _ => {}
        }
        self.told = held.is_some();
    }

    /// Whether the kernel may be touched: it may not if nobody knows what it serves and the picture
    /// may lack it.
    fn consider(&mut self, first: bool, desired: &Desired, backend: &mut dyn Backend, now: Now) {
        let empty = Family::ALL
            .into_iter()
            .all(|family| desired.counts(family).services == 0);
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
        let mut families = Family::ALL.into_iter();
        if self.hands_off.is_some() || blind && families.any(|f| backend.has_services(f)) {
            let since_ms = self.hands_off.as_ref().map_or(now.ms, |held| held.since_ms);
            self.hands_off = Some(Held {
                reason: doubt.to_owned(),
                since_ms,
                ..Held::default()
            });
        }
    }

    /// The kernel is not to be touched.
    pub(super) fn hands_off(&self) -> bool {
        self.hands_off.is_some()
    }

    /// What is served although the control plane does not say it.
    pub(super) fn held(&self, desired: &Desired) -> Option<Held> {
        self.hands_off.clone().or_else(|| desired.held())
    }

    /// What is served has changed; something is not held any more if `released`.
    pub(super) fn changed(&mut self, released: bool, now: Instant) {
        if self.keeper.is_none() || self.hands_off() {
            return;
        }
        // What was approved must not come back with the next start.
        let soon = if released { now } else { now + SETTLE };
        let due = soon.max(self.handed_over.filter(|_| !released).unwrap_or(soon));
        self.due = Some(self.due.map_or(due, |before| before.min(due)));
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    pub(super) fn is_due(&self, now: Now) -> bool {
        self.due.is_some_and(|at| at <= now.instant)
    }

    /// Hands what is served to whoever writes it down.
    pub(super) fn hand_over(&mut self, desired: &Desired, now: Instant) {
        self.due = None;
        if let (Some(keeper), Some(picture)) = (&self.keeper, picture(desired)) {
            let objects = u32::try_from(picture.objects.len()).unwrap_or(u32::MAX);
            self.handed_over = Some(now + INTERVAL.max(INTERVAL_OF_ONE * objects));
            keeper.take(picture);
        }
    }

    /// The engine ends: what is not written down yet is.
    pub(super) fn close(&mut self, desired: &Desired) {
        let last = self.due.take().and_then(|_| picture(desired));
        if let Some(keeper) = self.keeper.take() {
            keeper.close(last);
        }
    }
}

/// `None` before the first snapshot.
fn picture(desired: &Desired) -> Option<Picture> {
    Some(Picture {
        position: desired.position()?,
        digest: desired.digest(),
        objects: desired.memory().collect(),
    })
}

fn tell(held: &Held) {
    if held.is_untouched() {
        tracing::warn!(
            reason = held.reason,
            "the kernel is left as it is: it has Services of which this agent knows nothing, and the \
             source may lack them. Fix the source, or agree with `kpctl approve`"
        );
    } else {
        tracing::warn!(
            services = held.services,
            without_endpoints = held.without_endpoints,
            examples = held.examples.join(", "),
            reason = held.reason,
            "Services are kept that the source does not name, or names without endpoints. Fix the \
             source, or agree with `kpctl approve`"
        );
    }
}
