//! Decides which control plane a relay takes its state from: none that shows an older state than the relay has published,
//! and none that has lost touch with its source while another one has not. Pure.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::freshness::Freshness;
use crate::k8s::Kind;
use crate::peers::Target;
use crate::source::relayed::Heard;

/// Time without touch to the source's origin after which a relay looks for another control plane. Agents leave the relay
/// two seconds later.
pub(super) const CUT_OFF: Duration = Duration::from_secs(11);
/// Shortest time between two attempts to find one that is not cut off.
const STAY: Duration = Duration::from_secs(30);
/// Difference of two ages that means nothing.
const TOLERANCE: Duration = Duration::from_secs(2);
/// Shortest time for which all control planes must show an older state before the relay takes it, as for agents: the API
/// server itself went back then.
pub(super) const INSISTENCE: Duration = Duration::from_secs(60);
/// Times that each of them must have shown it.
const ANSWERS: u32 = 2;

/// A control plane shows an older state: it lacks a change of this kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Older(pub(super) Kind);

/// A control plane has lost touch with its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it lost touch with its source {0:?} ago")]
pub(super) struct CutOff(Duration);

/// The reason why a state is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Declined {
    Older(Older),
    CutOff(CutOff),
}

impl From<Declined> for super::Lost {
    fn from(declined: Declined) -> Self {
        match declined {
            Declined::Older(older) => older.into(),
            Declined::CutOff(cut_off) => cut_off.into(),
        }
    }
}

/// What a relay has taken so far.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// The newest changes that are published.
    newest: Freshness,
    /// Time at which the origin of what is published was current.
    current_at: Option<Instant>,
    /// Control planes that have shown an older state since the relay last took one, and how often.
    older: BTreeMap<SocketAddr, u32>,
    older_since: Option<Instant>,
    /// Time at which the relay last left a control plane because that was cut off.
    left_at: Option<Instant>,
}

impl Memory {
    /// Checks whether the relay takes a state, and remembers it if so. `alone`: there is no other control plane.
    pub(super) fn admit(
        &mut self,
        of: &Target,
        heard: &Heard,
        alone: bool,
        now: Instant,
    ) -> Result<(), Declined> {
        let age = now.saturating_duration_since(heard.current_at);
        let in_touch = age < CUT_OFF;
        if let Some(kind) = heard.freshness.lacks(&self.newest) {
            self.older_since.get_or_insert(now);
            *self.older.entry(of.address).or_default() += u32::from(in_touch);
            if !self.is_older_believed(now) {
                return Err(Declined::Older(Older(kind)));
            }
            self.newest = Freshness::default();
        } else if !in_touch && !alone {
            let is_newer = |ours: Instant| ours > heard.current_at + TOLERANCE;
            let may_leave = |left: Instant| now.saturating_duration_since(left) >= STAY;
            if self.current_at.is_some_and(is_newer) || self.left_at.is_none_or(may_leave) {
                self.left_at = Some(now);
                return Err(Declined::CutOff(CutOff(age)));
            }
        }
        (self.older, self.older_since) = (BTreeMap::new(), None);
        self.newest.join(&heard.freshness);
        self.current_at = Some(heard.current_at);
        Ok(())
    }

    /// Returns whether the relay takes an older state: all control planes that answer insist on it.
    fn is_older_believed(&self, now: Instant) -> bool {
        let since = self.older_since;
        since.is_some_and(|since| now - since >= INSISTENCE)
            && self.older.values().all(|answers| *answers >= ANSWERS)
    }
}
