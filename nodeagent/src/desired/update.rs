//! Updates: assembles the pieces of the stream, and defines why an update is refused.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use kplane_model::{Digest, Family, Ranges};
use kplane_proto::packed;
use kplane_proto::v1 as pb;
use prost::Message;

use super::staged::{Change, Staged};
use super::{Confidence, Enforcement, Freshness, Lag, Offer};

/// Most bytes of objects in one update: 1,000,000 Services of 200 bytes. The limit also bounds the
/// memory that a faulty control plane can make an agent use.
const MAX_UPDATE_BYTES: usize = 200_000_000;

/// Most triggers that are taken from one update: the most that a control plane sends. The limit
/// also bounds the memory that a faulty control plane can make an agent use.
const MAX_TRIGGERS: usize = 256;

/// Most bytes of [`Update::doubt`] that are taken; the text goes into reports and logs.
const MAX_DOUBT: usize = 200;

/// A point in the control plane's history. Revisions of different epochs do not compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// A random number, new for each start of a control plane.
    pub epoch: u64,
    /// A number that grows within the epoch.
    pub revision: u64,
}

/// A complete update: all pieces up to the one that ends it.
#[derive(Debug)]
pub struct Update {
    /// Whether the update names everything that the control plane knows. Objects that a snapshot
    /// does not name are gone, unless their absence is not trusted.
    pub snapshot: bool,
    /// The ranges that the update replaces, if it does. It then names everything in them, and all of the node's own
    /// objects; ServicePrograms in other ranges are as they were.
    pub ranges: Option<Ranges>,
    /// The control plane's confidence that its data is complete.
    pub confidence: Confidence,
    /// The reason why the control plane's data is not complete, human-readable; empty otherwise.
    pub doubt: String,
    /// The control plane's word about NetworkPolicies as a whole.
    pub enforcement: Enforcement,
    /// The cluster of the control plane; empty = not known.
    pub cluster: Arc<str>,
    /// The versions of the source that the control plane shows.
    pub offer: Offer,
    /// Whether the update is taken even if it shows an older state of the cluster.
    pub may_go_back: bool,
    /// The changes.
    pub changes: Staged,
    /// The position after the update.
    pub position: Position,
    /// The digest of all objects after the update.
    pub digest: Digest,
    /// The time when the control plane learnt of the first change, milliseconds since 1970; 0 = not
    /// known.
    pub changed_at_ms: u64,
    /// The triggers of the changes, as far as their time is known.
    pub triggers: Vec<Trigger>,
    /// The time when the last piece arrived.
    pub arrived: Instant,
    /// The time of `arrived`, milliseconds since 1970.
    pub arrived_at_ms: u64,
}

/// A change in the cluster that led to an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trigger {
    /// The identifier of the trigger for the control plane of the update's epoch.
    pub id: u64,
    /// The family whose kernel state it changes.
    pub family: Family,
    /// The time of the change, milliseconds since 1970.
    pub at_ms: u64,
}

/// The reason why an update is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The control plane's revision is older than the one that this node already has.
    #[error(
        "revision {} is older than revision {} of the same epoch, which this node already has: the \
         control plane went back to an older state",
        got.revision, held.revision
    )]
    Older {
        /// The position of the node.
        held: Position,
        /// The position of the update.
        got: Position,
    },
    /// The control plane shows an older state of the cluster than the one that this node holds.
    #[error(transparent)]
    Behind(Lag),
    /// The update is a delta, but the agent has no state to which it could belong.
    #[error("revision {} is a difference, but no snapshot came before it", position.revision)]
    NoSnapshot {
        /// The position of the update.
        position: Position,
    },
    /// The digest of the result differs from the one that the control plane sent.
    #[error(
        "digest at revision {} is {computed} here and {expected} at the control plane: data was \
         lost on the way, the agent needs a snapshot",
        position.revision
    )]
    Digest {
        /// The position of the update.
        position: Position,
        /// The digest that the agent computed.
        computed: Digest,
        /// The digest that the control plane sent.
        expected: Digest,
    },
    /// The end of the update does not follow the protocol.
    #[error("an update ends with a digest of {len} bytes instead of 16")]
    Malformed {
        /// The length of the digest in bytes.
        len: usize,
    },
    /// The ranges that the update replaces do not follow the protocol.
    #[error(
        "an update replaces ranges that are listed in {len} bytes; 2, 4, 8, 16 or 32 are possible"
    )]
    MalformedRanges {
        /// The length of the list in bytes.
        len: usize,
    },
    /// A compressed piece cannot be read.
    #[error("a compressed piece of an update cannot be used: {reason}")]
    Packed {
        /// The reason.
        reason: String,
    },
    /// The update replaces ranges of what the node holds, but the node keeps objects that no control plane sent.
    #[error("revision {} replaces ranges, but the state of this node is not one that a control plane sent", position.revision)]
    NotComparable {
        /// The position of the update.
        position: Position,
    },
    /// The update is larger than an agent accepts.
    #[error("an update has more than {MAX_UPDATE_BYTES} bytes")]
    TooLarge,
}

/// The action that a refusal requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Connect again and ask for a complete snapshot.
    Snapshot,
    /// Connect again, to another replica where there is one, and continue from the current state.
    Reconnect,
}

impl Update {
    /// Returns whether the update determines the whole state: objects that it does not name are gone, unless their
    /// absence is not trusted.
    pub fn is_whole(&self) -> bool {
        self.snapshot || self.ranges.is_some()
    }
}

impl Refusal {
    /// Returns the action that this refusal requires.
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::NoSnapshot { .. } | Self::Digest { .. } | Self::NotComparable { .. } => {
                Remedy::Snapshot
            }
            Self::Older { .. }
            | Self::Behind(_)
            | Self::Malformed { .. }
            | Self::MalformedRanges { .. }
            | Self::Packed { .. }
            | Self::TooLarge => Remedy::Reconnect,
        }
    }
}

/// Collects the pieces of one update. They have no effect until the end of the update arrives.
#[derive(Debug)]
pub struct Collector {
    epoch: u64,
    cluster: Arc<str>,
    /// The versions of the source that the stream has reported so far.
    offer: Offer,
    may_go_back: bool,
    snapshot: bool,
    ranges: Option<Ranges>,
    changes: Vec<Change>,
    bytes: usize,
}

impl Collector {
    /// Creates a collector for a stream of this epoch.
    pub fn new(epoch: u64) -> Self {
        Self::of_cluster(epoch, Arc::default())
    }

    /// Creates a collector for a stream of this epoch, from a control plane of this cluster.
    pub fn of_cluster(epoch: u64, cluster: Arc<str>) -> Self {
        Self {
            epoch,
            cluster,
            offer: Offer::default(),
            may_go_back: false,
            snapshot: false,
            ranges: None,
            changes: Vec::new(),
            bytes: 0,
        }
    }

    /// Returns the epoch of the stream.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Sets whether updates of this stream are taken even if they show an older state of the cluster.
    #[must_use]
    pub fn going_back(self, may_go_back: bool) -> Self {
        Self {
            may_go_back,
            ..self
        }
    }

    /// Takes in the versions of the source that a message reports.
    pub fn hear(&mut self, announced: &[pb::KindVersion]) {
        self.offer.hear(announced);
    }

    /// Returns by what this stream shows an older state than the one that a node of this cluster holds, if
    /// it does. States of different clusters do not compare.
    pub fn lag(&self, cluster: &str, held: &Freshness) -> Option<Lag> {
        let same = cluster.is_empty() || self.cluster.is_empty() || *cluster == *self.cluster;
        let may_not = same && !self.may_go_back;
        if may_not { self.offer.lag(held) } else { None }
    }

    /// Takes a piece; returns the update that it completes.
    ///
    /// # Errors
    /// [`Refusal::Malformed`], [`Refusal::Packed`] and [`Refusal::TooLarge`]; the stream cannot be used any more.
    pub fn push(&mut self, piece: pb::Update) -> Result<Option<Update>, Refusal> {
        if piece.snapshot {
            *self = self.anew();
            self.snapshot = true;
        } else if !piece.ranges.is_empty() {
            let ranges = Ranges::from_bytes(&piece.ranges);
            let len = piece.ranges.len();
            let ranges = ranges.ok_or(Refusal::MalformedRanges { len })?;
            *self = self.anew();
            self.ranges = Some(ranges);
        }
        self.bytes += piece.encoded_len();
        if self.bytes > MAX_UPDATE_BYTES {
            return Err(Refusal::TooLarge);
        }
        // Deletions come first: if a piece deletes and sets the same name, the object stays.
        self.changes.extend(piece.deleted.into_iter().map(Change::gone));
        self.changes.extend(piece.objects.into_iter().map(Change::object));
        self.unpack(&piece.packed)?;
        let Some(end) = piece.end else {
            return Ok(None);
        };
        let digest = <[u8; 16]>::try_from(&end.digest[..]).map_err(|_| Refusal::Malformed {
            len: end.digest.len(),
        })?;
        self.offer.hear(&end.freshness);
        let collected = std::mem::replace(self, self.anew());
        Ok(Some(Update {
            snapshot: collected.snapshot,
            ranges: collected.ranges,
            confidence: end.confidence().into(),
            doubt: end.doubt[..end.doubt.floor_char_boundary(MAX_DOUBT)].to_owned(),
            enforcement: end.enforcement().into(),
            cluster: collected.cluster,
            offer: collected.offer,
            may_go_back: collected.may_go_back,
            changes: Staged::of(collected.changes),
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

impl Collector {
    /// Adds the objects of a compressed piece.
    fn unpack(&mut self, packed: &[u8]) -> Result<(), Refusal> {
        if packed.is_empty() {
            return Ok(());
        }
        let objects = packed::unpack(packed).map_err(|error| Refusal::Packed {
            reason: error.to_string(),
        })?;
        self.bytes += objects.iter().map(Bytes::len).sum::<usize>();
        if self.bytes > MAX_UPDATE_BYTES {
            return Err(Refusal::TooLarge);
        }
        self.changes.extend(objects.into_iter().map(Change::object));
        Ok(())
    }

    /// Returns an empty collector for the same stream.
    fn anew(&self) -> Self {
        Self {
            offer: self.offer.clone(),
            may_go_back: self.may_go_back,
            ..Self::of_cluster(self.epoch, self.cluster.clone())
        }
    }
}

/// Returns the triggers that this version understands.
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
    wire.iter().take(MAX_TRIGGERS).filter_map(understand).collect()
}

/// Returns the wall clock, milliseconds since 1970. Its values are for readers and reports; nothing
/// is ordered by them.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}
