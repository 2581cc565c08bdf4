//! Encoded snapshots that many agents share.
//!
//! An agent without anything needs all shared objects. An encoded snapshot has them as messages that were encoded once. The agent
//! gets these first, and then the rest from the logs: its own objects, and what changed since.

use std::sync::{Arc, OnceLock, Weak};

use bytes::Bytes;
use kplane_proto::packed;
use kplane_proto::shared::{PREFIX, frame};
use kplane_proto::v1::{ServerMessage, Update, server_message};
use prost::Message as _;

use super::cursor::Cursor;
use super::state::State;

/// An encoded snapshot is used until one object in this many changed; agents get changed objects twice.
const STALE_SHARE: usize = 32;

/// The shared objects at a revision, as nodes of one zone get them.
#[derive(Debug)]
pub(super) struct EncodedSnapshot {
    revision: u64,
    messages: Vec<EncodedPiece>,
}

#[derive(Debug)]
struct EncodedPiece {
    message: Bytes,
    /// The same, compressed, from the first agent on that can read it.
    packed: OnceLock<Bytes>,
    /// Revision of the last object in the message.
    upto: u64,
}

/// An agent's way along an encoded snapshot. It does not keep the snapshot, so that agents that stopped reading cost no memory; an
/// agent whose snapshot is gone gets the rest from the logs.
#[derive(Debug, Default)]
pub struct Walk {
    encoded_snapshot: Weak<EncodedSnapshot>,
    next: usize,
    /// The agent can read compressed messages.
    packed: bool,
}

impl EncodedSnapshot {
    /// Encodes the shared objects as nodes of a zone get them, in messages of at least `size` bytes.
    pub(super) fn new(state: &State, zone: Option<&str>, size: usize) -> Self {
        let mut encoded_snapshot = Self {
            revision: state.revision,
            messages: Vec::new(),
        };
        let (mut objects, mut bytes, mut upto) = (Vec::new(), 0, 0);
        for (revision, key) in state.log.after(0) {
            let Some(shared) = state.shared.get(key) else {
                continue;
            };
            let object = shared.resolve_zone(zone).bytes.clone();
            bytes += object.len();
            objects.push(object);
            upto = revision;
            if bytes >= size {
                encoded_snapshot.put(std::mem::take(&mut objects), upto);
                bytes = 0;
            }
        }
        if !objects.is_empty() {
            encoded_snapshot.put(objects, upto);
        }
        encoded_snapshot
    }

    fn put(&mut self, objects: Vec<Bytes>, upto: u64) {
        let update = Update {
            objects,
            snapshot: self.messages.is_empty(),
            ..Update::default()
        };
        let kind = Some(server_message::Kind::Update(update));
        let message = frame(&ServerMessage { kind });
        self.messages.push(EncodedPiece {
            message,
            packed: OnceLock::new(),
            upto,
        });
    }

    /// Returns whether few objects changed since.
    pub(super) fn is_fresh(&self, state: &State) -> bool {
        let some = state.shared.len() / STALE_SHARE + 1;
        state.log.after(self.revision).take(some).count() < some
    }
}

impl Walk {
    pub(super) fn along(encoded_snapshot: &Arc<EncodedSnapshot>) -> Self {
        Self {
            encoded_snapshot: Arc::downgrade(encoded_snapshot),
            next: 0,
            packed: false,
        }
    }

    /// Returns the same way in compressed messages.
    #[must_use]
    pub fn packed(self, packed: bool) -> Self {
        Self { packed, ..self }
    }

    /// Returns the next message with its frame, and moves the cursor behind its objects. `None` when the logs have the rest.
    pub fn next(&mut self, cursor: &mut Cursor) -> Option<Bytes> {
        let encoded_snapshot = self.encoded_snapshot.upgrade()?;
        let Some(encoded) = encoded_snapshot.messages.get(self.next) else {
            self.encoded_snapshot = Weak::new();
            return None;
        };
        self.next += 1;
        let is_last = self.next == encoded_snapshot.messages.len();
        let upto = if is_last { encoded_snapshot.revision } else { encoded.upto };
        cursor.pass(upto, encoded_snapshot.revision);
        Some(if self.packed {
            encoded.packed.get_or_init(|| pack(&encoded.message)).clone()
        } else {
            encoded.message.clone()
        })
    }
}

/// Returns a framed message with its objects compressed, or as it is if that is smaller.
fn pack(message: &Bytes) -> Bytes {
    let plain = ServerMessage::decode(message.slice(PREFIX..)).unwrap_or_default();
    let Some(server_message::Kind::Update(piece)) = plain.kind else {
        return message.clone();
    };
    let update = Update {
        packed: packed::pack(piece.objects).into(),
        objects: Vec::new(),
        ..piece
    };
    let kind = Some(server_message::Kind::Update(update));
    let packed = frame(&ServerMessage { kind });
    if packed.len() < message.len() { packed } else { message.clone() }
}
