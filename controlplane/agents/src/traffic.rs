//! Counts of what the control plane sends to agents and writes to the API server.
//!
//! A stream counts its messages in numbers of its own and adds them here now and then, so that thousands of streams that
//! send one change do not compete for a counter.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of messages after which a stream adds its counts. It also adds them with each heartbeat, and when it ends.
const FLUSH_AFTER: u64 = 64;

/// A kind of message to agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// A part of a snapshot, up to its end.
    Snapshot,
    /// A part of another update.
    Update,
    /// A sign of life.
    Heartbeat,
    /// Greetings, questions and farewells.
    Other,
}

impl Sent {
    const ALL: [Self; 4] = [Self::Snapshot, Self::Update, Self::Heartbeat, Self::Other];

    /// Returns the name in metrics.
    fn name(self) -> &'static str {
        match self {
            Self::Snapshot => "snapshot",
            Self::Update => "update",
            Self::Heartbeat => "heartbeat",
            Self::Other => "other",
        }
    }
}

/// Messages and bytes of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Volume {
    /// Number of messages.
    pub messages: u64,
    /// Their size in bytes.
    pub bytes: u64,
}

/// What all streams have sent to agents.
#[derive(Debug, Default)]
pub struct Traffic([(AtomicU64, AtomicU64); Sent::ALL.len()]);

impl Traffic {
    /// Returns the volumes by the names of their kinds in metrics.
    pub fn volumes(&self) -> [(&'static str, Volume); Sent::ALL.len()] {
        Sent::ALL.map(|kind| {
            let (messages, bytes) = &self.0[kind as usize];
            let volume = Volume {
                messages: messages.load(Ordering::Relaxed),
                bytes: bytes.load(Ordering::Relaxed),
            };
            (kind.name(), volume)
        })
    }
}

/// The counts of one stream that are not in the total yet.
#[derive(Debug)]
pub(crate) struct Tally {
    total: Arc<Traffic>,
    pending: [Volume; Sent::ALL.len()],
    messages: u64,
}

impl Tally {
    /// Creates the counts of a stream.
    pub(crate) fn new(total: Arc<Traffic>) -> Self {
        Self {
            total,
            pending: Default::default(),
            messages: 0,
        }
    }

    /// Counts a message of so many bytes.
    pub(crate) fn add(&mut self, kind: Sent, bytes: usize) {
        self.pending[kind as usize].messages += 1;
        self.messages += 1;
        self.add_bytes(kind, bytes);
        if kind == Sent::Heartbeat || self.messages >= FLUSH_AFTER {
            self.flush();
        }
    }

    /// Counts the rest of the message that was counted last.
    pub(crate) fn add_bytes(&mut self, kind: Sent, bytes: usize) {
        self.pending[kind as usize].bytes += u64::try_from(bytes).unwrap_or_default();
    }

    fn flush(&mut self) {
        let pending = std::mem::take(&mut self.pending);
        for (volume, (messages, bytes)) in pending.iter().zip(&self.total.0) {
            if volume.bytes > 0 {
                messages.fetch_add(volume.messages, Ordering::Relaxed);
                bytes.fetch_add(volume.bytes, Ordering::Relaxed);
            }
        }
        self.messages = 0;
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        self.flush();
    }
}

/// Counts of Kubernetes events by their fate.
#[derive(Debug, Default)]
pub struct EventCounts([AtomicU64; Fate::ALL.len()]);

/// The fate of a Kubernetes event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// The API server has it.
    Written,
    /// The API server refuses it.
    Refused,
    /// The API server did not take it within two minutes.
    Failed,
    /// There were too many events.
    Dropped,
}

impl Fate {
    const ALL: [Self; 4] = [Self::Written, Self::Refused, Self::Failed, Self::Dropped];

    /// Returns the name in metrics.
    fn name(self) -> &'static str {
        match self {
            Self::Written => "written",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Dropped => "dropped",
        }
    }
}

impl EventCounts {
    /// Counts events.
    pub(crate) fn add(&self, fate: Fate, events: u64) {
        self.0[fate as usize].fetch_add(events, Ordering::Relaxed);
    }

    /// Returns the counts by the names of the fates in metrics.
    pub fn all(&self) -> [(&'static str, u64); Fate::ALL.len()] {
        Fate::ALL.map(|fate| (fate.name(), self.0[fate as usize].load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(of: &Traffic, name: &str) -> Volume {
        of.volumes().into_iter().find(|(kind, _)| *kind == name).unwrap().1
    }

    #[test]
    fn a_stream_adds_its_counts_with_heartbeats_and_at_its_end() {
        let total = Arc::new(Traffic::default());
        let mut tally = Tally::new(Arc::clone(&total));
        tally.add(Sent::Snapshot, 100);
        tally.add_bytes(Sent::Snapshot, 20);
        assert_eq!(volume(&total, "snapshot"), Volume::default());
        tally.add(Sent::Heartbeat, 5);
        let snapshot = Volume {
            messages: 1,
            bytes: 120,
        };
        assert_eq!(volume(&total, "snapshot"), snapshot);
        tally.add(Sent::Update, 7);
        assert_eq!(volume(&total, "update").messages, 0);
        drop(tally);
        assert_eq!(volume(&total, "update").bytes, 7);
        assert_eq!(volume(&total, "snapshot"), snapshot);
    }

    #[test]
    fn a_busy_stream_adds_its_counts_without_heartbeats() {
        let total = Arc::new(Traffic::default());
        let mut tally = Tally::new(Arc::clone(&total));
        (0..FLUSH_AFTER + 1).for_each(|_| tally.add(Sent::Update, 1));
        assert_eq!(volume(&total, "update").messages, FLUSH_AFTER);
    }
}
