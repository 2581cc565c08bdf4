//! Everything that agents of this process have received, once: keys and objects have numbers, and a message that many
//! agents get is decoded for the first of them.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use anyhow::{Context as _, Result};
use kplane_model::{DesiredKey, DesiredObject, Digest, ObjectHash, Ranges};
use kplane_proto::convert::decode_object;
use kplane_proto::v1::{self as pb, ServerMessage, server_message};
use prost::Message as _;
use prost::bytes::Bytes;

use super::input::stamp_of;

/// Maximum number of updates that are remembered.
const REMEMBERED: usize = 4_096;
/// Number of bytes at both ends of a message by which it is looked up.
const SAMPLE: usize = 256;

/// A message of a control plane.
#[derive(Debug)]
pub(super) enum Reply {
    Welcome {
        epoch: u64,
        /// Longest time between two messages of the agent; `None` = any.
        beat: Option<Duration>,
    },
    Update(Arc<Piece>),
    Ping(u64),
    /// The number of ranges to compare.
    Compare(u32),
    ComeBackLater(Duration),
    /// The time over which reports are spread.
    Heartbeat(Duration),
    Other,
}

/// A piece of an update.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) snapshot: bool,
    pub(super) ranges: Option<Ranges>,
    /// Numbers of keys, and of their objects; 0 = deleted.
    pub(super) changes: Vec<(u32, u32)>,
    pub(super) end: Option<End>,
}

/// The end of an update.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub(super) revision: u64,
    pub(super) digest: Digest,
}

/// An object, without its content.
#[derive(Clone, Copy, Debug)]
pub(super) struct Object {
    pub(super) hash: ObjectHash,
    /// Number of the change that made it; 0 = none.
    pub(super) stamp: u64,
}

/// All keys and objects.
#[derive(Debug, Default)]
pub(super) struct Tables {
    numbers: HashMap<DesiredKey, u32>,
    keys: Vec<DesiredKey>,
    by_content: HashMap<Bytes, u32>,
    objects: Vec<Object>,
}

impl Tables {
    pub(super) fn key(&self, number: u32) -> Option<&DesiredKey> {
        self.keys.get(usize::try_from(number).ok()?)
    }

    /// Returns the object with a number; there is none with 0.
    pub(super) fn object(&self, number: u32) -> Option<Object> {
        let place = usize::try_from(number.checked_sub(1)?).ok()?;
        self.objects.get(place).copied()
    }

    fn number(&mut self, key: DesiredKey) -> Result<u32> {
        if let Some(number) = self.numbers.get(&key) {
            return Ok(*number);
        }
        let number = u32::try_from(self.keys.len())?;
        self.keys.push(key.clone());
        self.numbers.insert(key, number);
        Ok(number)
    }

    fn add(&mut self, encoded: &Bytes) -> Result<(u32, u32)> {
        let object = decode_object(encoded.clone())?.context("an object of an unknown kind")?;
        let key = self.number(object.key())?;
        if let Some(number) = self.by_content.get(encoded) {
            return Ok((key, *number));
        }
        self.objects.push(Object {
            hash: ObjectHash::of(encoded),
            stamp: stamp(&object),
        });
        let number = u32::try_from(self.objects.len())?;
        // A copy, as the original keeps the whole message.
        let content = Bytes::copy_from_slice(encoded);
        self.by_content.insert(content, number);
        Ok((key, number))
    }

    fn piece(&mut self, update: &pb::Update) -> Result<Piece> {
        let objects = update.objects.iter().map(|encoded| self.add(encoded));
        let mut changes = objects.collect::<Result<Vec<_>>>()?;
        for key in &update.deleted {
            changes.push((self.number(DesiredKey::try_from(key.clone())?)?, 0));
        }
        let ranges = Some(&update.ranges)
            .filter(|bits| !bits.is_empty())
            .map(|bits| Ranges::from_bytes(bits).context("ranges"));
        let end = update.end.as_ref().map(|end| {
            let digest = <[u8; 16]>::try_from(end.digest.as_slice()).context("a digest")?;
            Ok::<_, anyhow::Error>(End {
                revision: end.revision,
                digest: Digest::from_bytes(digest),
            })
        });
        Ok(Piece {
            snapshot: update.snapshot,
            ranges: ranges.transpose()?,
            changes,
            end: end.transpose()?,
        })
    }
}

fn stamp(object: &DesiredObject) -> u64 {
    let DesiredObject::Service(program) = object else {
        return 0;
    };
    match program.endpoints.first().map(|endpoint| endpoint.ip) {
        Some(IpAddr::V4(ip)) => stamp_of(ip),
        _ => 0,
    }
}

/// What all agents of this process share.
#[derive(Debug, Default)]
pub(super) struct Catalog {
    tables: RwLock<Tables>,
    updates: Mutex<HashMap<u64, (Bytes, Arc<Piece>)>>,
}

impl Catalog {
    pub(super) fn tables(&self) -> RwLockReadGuard<'_, Tables> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what a message says.
    pub(super) fn read(&self, message: &Bytes) -> Result<Reply> {
        let sample = sample(message);
        if let Some(known) = self.known(sample, message) {
            return Ok(Reply::Update(known));
        }
        Ok(match ServerMessage::decode(message.clone())?.kind {
            Some(server_message::Kind::Update(update)) => {
                let mut tables = self.tables.write().unwrap_or_else(PoisonError::into_inner);
                let piece = Arc::new(tables.piece(&update)?);
                drop(tables);
                self.remember(sample, message, &piece);
                Reply::Update(piece)
            }
            Some(server_message::Kind::Welcome(welcome)) => Reply::Welcome {
                epoch: welcome.epoch,
                beat: Some(Duration::from_millis(welcome.beat_ms.into()))
                    .filter(|beat| !beat.is_zero()),
            },
            Some(server_message::Kind::Ping(ping)) => Reply::Ping(ping.token),
            Some(server_message::Kind::Heartbeat(heartbeat)) => {
                Reply::Heartbeat(Duration::from_millis(heartbeat.report_within_ms.into()))
            }
            Some(server_message::Kind::Compare(compare)) => Reply::Compare(compare.ranges),
            Some(server_message::Kind::ComeBackLater(later)) => {
                Reply::ComeBackLater(Duration::from_millis(later.after_ms.into()))
            }
            _ => Reply::Other,
        })
    }

    fn known(&self, sample: u64, message: &Bytes) -> Option<Arc<Piece>> {
        let updates = self.updates.lock().unwrap_or_else(PoisonError::into_inner);
        let (bytes, piece) = updates.get(&sample)?.clone();
        drop(updates);
        (bytes == message).then_some(piece)
    }

    fn remember(&self, sample: u64, message: &Bytes, piece: &Arc<Piece>) {
        let mut updates = self.updates.lock().unwrap_or_else(PoisonError::into_inner);
        if updates.len() >= REMEMBERED {
            updates.clear();
        }
        let message = Bytes::copy_from_slice(message);
        updates.insert(sample, (message, Arc::clone(piece)));
    }
}

/// Returns a hash of the ends of a message.
fn sample(message: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    message.len().hash(&mut hasher);
    let ends = [message.first_chunk::<SAMPLE>(), message.last_chunk()];
    match ends {
        [Some(first), Some(last)] => (first, last).hash(&mut hasher),
        _ => message.hash(&mut hasher),
    }
    hasher.finish()
}
