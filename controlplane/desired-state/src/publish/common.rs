//! Updates that many agents share.
//!
//! Most agents lack the same after a change. Their updates differ in one field only: the digest of everything that the
//! agent holds, because each node has objects of its own. So an update is encoded once, and each agent gets a copy
//! with its digest.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use kplane_model::{Digest, ZoneName};
use kplane_proto::shared::frame;
use kplane_proto::v1::{KindVersion, ServerMessage, Update, UpdateEnd, server_message};
use prost::Message as _;

use super::cursor::{Cursor, Mark, Piece, PieceEnd};
use super::state::State;
use crate::freshness::Freshness;
use crate::wire::confidence;
use kplane_util::clock::millis;

/// Number of updates that are kept. Agents that are at different revisions need different ones.
const KEPT: usize = 16;

/// Size of an update in bytes up to which it is copied with the digest. A larger one goes out in two parts, so that
/// agents share most of it.
const COPIED: usize = 4 * 1024;

/// Bytes before the digest: the field's tag and the length.
const DIGEST_TAG: usize = 2;

/// The position of agents that need the same update.
#[derive(Debug)]
struct Position {
    /// Revision that the agents hold completely.
    base: u64,
    /// The agents' zone, if it has variants of its own.
    zone: Option<ZoneName>,
    /// The freshness that the agents received last.
    sent: Arc<Freshness>,
}

/// An encoded update without the digest.
#[derive(Debug)]
struct Common {
    position: Position,
    mark: Mark,
    /// The message with its frame, up to the end of the update.
    objects: Bytes,
    /// The end of the update, with room for the digest.
    end: Bytes,
    /// Place of the digest in `end`.
    digest_at: usize,
}

/// An update for one agent, encoded with its frame.
#[derive(Debug)]
pub struct Ready {
    /// The message, or its first part.
    pub first: Bytes,
    /// The second part of a large message.
    pub rest: Option<Bytes>,
    /// What the agent has afterwards.
    pub mark: Mark,
}

/// The latest updates that agents shared, newest last.
#[derive(Debug, Default)]
pub(super) struct Commons(Vec<Common>);

impl Commons {
    /// Returns the update of an agent at a cursor, and moves the cursor behind it. `None` for an agent that needs
    /// another one than its neighbours: it begins from nothing, its own objects changed, or it lacks too much.
    pub(super) fn take(
        &mut self,
        state: &State,
        node: &str,
        cursor: &mut Cursor,
        sent: &Arc<Freshness>,
    ) -> Option<Ready> {
        let zone = state.common_zone(node, *cursor)?;
        self.0.retain(|common| common.leads_to(state));
        let known = self.0.iter().rposition(|common| {
            let at = &common.position;
            at.base == cursor.base() && at.zone.as_ref() == zone && Arc::ptr_eq(&at.sent, sent)
        });
        let known = match known {
            Some(known) => known,
            None => {
                let position = Position {
                    base: cursor.base(),
                    zone: zone.cloned(),
                    sent: Arc::clone(sent),
                };
                let common = Common::new(state, node, *cursor, position)?;
                if self.0.len() == KEPT {
                    self.0.remove(0);
                }
                self.0.push(common);
                self.0.len() - 1
            }
        };
        let common = self.0.get(known)?;
        *cursor = Cursor::at(common.mark.revision);
        Some(common.with(state.digest(node)))
    }
}

impl Common {
    /// Encodes what an agent lacks; `None` if that is too much for one message.
    fn new(state: &State, node: &str, mut cursor: Cursor, position: Position) -> Option<Self> {
        let mut piece = state.collect(node, &mut cursor);
        let mut end = piece.end.take()?;
        end.digest = Digest::default();
        let mark = end.mark();
        let freshness = end.freshness.news(&position.sent);
        let end = update_end(end, freshness);
        // The end is the last field of an update, and begins with the revision and the digest.
        let length = end.encoded_len();
        let only_revision = UpdateEnd {
            revision: end.revision,
            ..UpdateEnd::default()
        };
        let digest_at = only_revision.encoded_len() + DIGEST_TAG;
        let mut objects = message(piece, Some(end));
        let end = objects.split_off(objects.len().checked_sub(length)?);
        Some(Self {
            position,
            mark,
            objects,
            end,
            digest_at,
        })
    }

    fn leads_to(&self, state: &State) -> bool {
        self.mark.revision == state.revision
            && self.mark.trust_changes == state.trust_changes
            && Arc::ptr_eq(&self.mark.freshness, &state.freshness)
    }

    /// Returns the update for an agent that holds objects with this digest afterwards.
    fn with(&self, digest: Digest) -> Ready {
        let copied = self.objects.len() <= COPIED;
        let shared: &[u8] = if copied { &self.objects } else { &[] };
        let mut own = BytesMut::with_capacity(shared.len() + self.end.len());
        own.extend_from_slice(shared);
        let (before, after) = self.end.split_at(self.digest_at);
        let digest = digest.to_bytes();
        own.extend_from_slice(before);
        own.extend_from_slice(&digest);
        own.extend_from_slice(after.get(digest.len()..).unwrap_or_default());
        let own = own.freeze();
        let (first, rest) = if copied { (own, None) } else { (self.objects.clone(), Some(own)) };
        let mark = self.mark.clone();
        Ready { first, rest, mark }
    }
}

impl State {
    /// Returns the zone whose agents lack the same as the agent of a node; `None` if the agent lacks something else
    /// than its neighbours.
    fn common_zone(&self, node: &str, cursor: Cursor) -> Option<Option<&ZoneName>> {
        let base = cursor.base();
        if base == 0 || !cursor.is_fresh() || self.forgot(&cursor) {
            return None;
        }
        let view = self.views.get(node);
        let own = view.and_then(|view| view.log.newest_first().next());
        let stranger = view.is_none_or(|view| view.facts.is_none());
        let own_changed = own.is_some_and(|(revision, _)| revision > base);
        if own_changed || stranger && self.strangers_revision > base {
            return None;
        }
        Some(self.varied_zone(node))
    }
}

/// Returns an encoded update with its frame.
pub fn message(piece: Piece, end: Option<UpdateEnd>) -> Bytes {
    let update = Update {
        objects: piece.objects,
        deleted: piece.deleted.iter().map(Into::into).collect(),
        snapshot: piece.snapshot,
        end,
        ..Update::default()
    };
    let kind = Some(server_message::Kind::Update(update));
    frame(&ServerMessage { kind })
}

/// Returns the end of an update; `freshness` is what its agent has not received.
pub fn update_end(end: PieceEnd, freshness: Vec<KindVersion>) -> UpdateEnd {
    UpdateEnd {
        revision: end.revision,
        digest: end.digest.to_bytes().to_vec(),
        changed_at_ms: end.changed_at.map_or(0, millis),
        triggers: end.triggers.into_iter().map(Into::into).collect(),
        confidence: confidence(&end.trust).into(),
        doubt: end.trust.doubt().to_owned(),
        freshness,
        enforcement: end.enforcement.into(),
    }
}

#[cfg(test)]
mod tests;
