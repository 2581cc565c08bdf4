//! Updates: pieces of the stream put together, and why one is refused.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use kplane_model::{Digest, Family};
use kplane_proto::v1 as pb;
use prost::Message;

use super::Confidence;

/// Most bytes of objects that one update may have: 1,000,000 Services of 200 bytes, and a bound
/// on what a mad control plane makes an agent hold.
const MAX_UPDATE_BYTES: usize = 200_000_000;

/// Triggers of one update that are taken: what a control plane sends at most, and a bound on what a
/// mad one makes an agent hold.
const MAX_TRIGGERS: usize = 256;

/// Bytes of [`Update::doubt`] that are taken: it goes into reports and logs.
const MAX_DOUBT: usize = 200;

/// A point in the control plane's history. Revisions of different epochs do not compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Random for each start of a control plane.
    pub epoch: u64,
    /// Counts up within the epoch.
    pub revision: u64,
}

/// A complete update: all pieces up to the one that ends it.
#[derive(Debug)]
pub struct Update {
    /// It names everything that the control plane knows: what it does not name is gone, as far as
    /// that is believed.
    pub snapshot: bool,
    /// How far that is.
    pub confidence: Confidence,
    /// Why the control plane's picture is not whole, for people; empty otherwise.
    pub doubt: String,
    /// In the order in which they came.
    pub changes: Vec<Change>,
    /// The position after it.
    pub position: Position,
    /// Of all objects after it.
    pub digest: Digest,
    /// When the control plane learnt of the first change, milliseconds since 1970; 0 = not known.
    pub changed_at_ms: u64,
    /// What led to the changes, as far as their time is known.
    pub triggers: Vec<Trigger>,
    /// When the last piece arrived.
    pub arrived: Instant,
    /// The same, milliseconds since 1970.
    pub arrived_at_ms: u64,
}

/// A change in the cluster that led to an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trigger {
    /// Names it to the control plane of the update's epoch.
    pub id: u64,
    /// The family whose kernel state it changes.
    pub family: Family,
    /// When it happened, milliseconds since 1970.
    pub at_ms: u64,
}

/// One change as it came.
#[derive(Clone, Debug)]
pub enum Change {
    /// An encoded `Object` that is new or changed.
    Object(Bytes),
    /// The name of an object that is gone.
    Gone(pb::ObjectKey),
}

/// Why an update is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The control plane's view is older than what this node already has.
    #[error(
        "revision {} is older than revision {} of the same epoch, which this node already has: \
         the control plane has gone back",
        got.revision, held.revision
    )]
    Older {
        /// What the node has.
        held: Position,
        /// What it was offered.
        got: Position,
    },
    /// A difference to something that the node does not have.
    #[error("revision {} is a difference, but no snapshot came before it", position.revision)]
    NoSnapshot {
        /// What it was offered.
        position: Position,
    },
    /// What the node would have is not what the control plane says it should have.
    #[error(
        "digest at revision {} is {computed} here and {expected} at the control plane: \
         something was lost on the way, a snapshot is needed",
        position.revision
    )]
    Digest {
        /// The update's.
        position: Position,
        /// Computed here.
        computed: Digest,
        /// As the control plane says.
        expected: Digest,
    },
    /// The end of an update is not as the protocol says.
    #[error("an update ends with a digest of {len} bytes instead of 16")]
    Malformed {
        /// Length of the digest.
        len: usize,
    },
    /// More than an agent is willing to hold.
    #[error("an update has more than {MAX_UPDATE_BYTES} bytes")]
    TooLarge,
}

/// What a refusal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Connect again and ask for a complete snapshot.
    Snapshot,
    /// Connect again, to another replica where there is one, and go on from here.
    Reconnect,
}

impl Refusal {
    /// What to do about it.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::NoSnapshot { .. } | Self::Digest { .. } => Remedy::Snapshot,
            Self::Older { .. } | Self::Malformed { .. } | Self::TooLarge => Remedy::Reconnect,
        }
    }
}

/// Collects the pieces of one update. What is in here counts for nothing until its end arrives.
#[derive(Debug)]
pub struct Collector {
    epoch: u64,
    snapshot: bool,
    changes: Vec<Change>,
    bytes: usize,
}

impl Collector {
    /// For a stream of this epoch.
    #[must_use]
    pub fn new(epoch: u64) -> Self {
        Self {
            epoch,
            snapshot: false,
            changes: Vec::new(),
            bytes: 0,
        }
    }

    /// Takes a piece; returns the update that it completes.
    ///
    /// # Errors
    /// [`Refusal::Malformed`] and [`Refusal::TooLarge`]; the stream is of no use then.
    pub fn push(&mut self, piece: pb::Update) -> Result<Option<Update>, Refusal> {
        if piece.snapshot {
            *self = Self::new(self.epoch);
            self.snapshot = true;
        }
        self.bytes += piece.encoded_len();
        if self.bytes > MAX_UPDATE_BYTES {
            return Err(Refusal::TooLarge);
        }
        // Deletions first: a piece that has both of one name means the object.
        self.changes
            .extend(piece.deleted.into_iter().map(Change::Gone));
        self.changes
            .extend(piece.objects.into_iter().map(Change::Object));
        let Some(end) = piece.end else {
            return Ok(None);
        };
        let digest = <[u8; 16]>::try_from(&end.digest[..]).map_err(|_| Refusal::Malformed {
            len: end.digest.len(),
        })?;
        let collected = std::mem::replace(self, Self::new(self.epoch));
        Ok(Some(Update {
            snapshot: collected.snapshot,
            confidence: end.confidence().into(),
            doubt: end.doubt[..end.doubt.floor_char_boundary(MAX_DOUBT)].to_owned(),
            changes: collected.changes,
            position: Position {
                epoch: collected.epoch,
                revision: end.revision,
            },
            digest: Digest::from_bytes(digest),
            changed_at_ms: end.changed_at_ms,
            triggers: triggers(&end.triggers),
            arrived: Instant::now(),
            arrived_at_ms: now_ms(),
        }))
    }
}

/// Those that this version understands.
fn triggers(wire: &[pb::Trigger]) -> Vec<Trigger> {
    let understand = |trigger: &pb::Trigger| {
        let family = match trigger.family() {
            pb::Family::Ipv4 => Family::V4,
            pb::Family::Ipv6 => Family::V6,
            pb::Family::Unspecified => return None,
        };
        Some(Trigger {
            id: trigger.id,
            family,
            at_ms: trigger.at_ms,
        })
    };
    let wire = wire.iter().take(MAX_TRIGGERS);
    wire.filter_map(understand).collect()
}

/// The wall clock, milliseconds since 1970. For people and reports; nothing is ordered by it.
#[must_use]
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}
