//! The format of the cache file. All numbers are big endian.
//!
//! ```text
//! "kplane desired state\n"
//! version                  u32
//! node                     u32 length, bytes
//! epoch, revision          u64 each: the last update
//! digest                   16 bytes: of the objects as the control plane last sent them
//! number of objects        u32
//! each: held               u8, 1 = the control plane does not send it like this (any more)
//!       object             u32 length, bytes: an encoded Object
//! confirmed                u64, milliseconds since 1970: a control plane last confirmed this state
//! cluster                  u32 length, bytes: see Welcome.cluster_id
//! number of kinds          u32
//! each: kind, version      u32 length, bytes each: the newest change of the source in this state
//! number of addresses      u32
//! each                     u32 length, 4 or 16 bytes: the node's own, as the Node object last named them
//! checksum                 16 bytes: SipHash-1-3-128 of all before it
//! ```
//!
//! Readers ignore what follows the fields that they know, and files may end after the objects. So
//! versions of the agent with fewer or more fields read each other's files. A field that a reader must
//! not ignore needs another version of the format.

use std::hash::Hasher as _;
use std::io::{self, Write};
use std::net::IpAddr;
use std::sync::Arc;

use bytes::{Buf as _, Bytes};
use kplane_model::{Cidr, Digest, Family, ObjectHash};
use kplane_proto::convert::{decode_object, encode_object};
use siphasher::sip128::{Hasher128 as _, SipHasher13};

use super::file::FileError;
use crate::desired::{Freshness, Position, Remembered, SavedState};

const MAGIC: &[u8] = b"kplane desired state\n";

/// Version of the format. Files of other versions are not read.
const VERSION: u32 = 1;

/// Length of the checksum and of the digest, in bytes.
const HASH: usize = 16;

/// The content of a file.
#[derive(Debug)]
pub(super) struct CacheContent {
    pub(super) saved: SavedState,
    /// The number of objects that this version does not understand.
    pub(super) skipped: usize,
}

/// Writes a state.
pub(super) fn encode(to: &mut dyn Write, node: &str, saved: &SavedState) -> io::Result<()> {
    let mut to = Summing {
        inner: to,
        sum: SipHasher13::new(),
    };
    to.write_all(MAGIC)?;
    to.write_all(&VERSION.to_be_bytes())?;
    to.block(node.as_bytes())?;
    to.write_all(&saved.position.epoch.to_be_bytes())?;
    to.write_all(&saved.position.revision.to_be_bytes())?;
    to.write_all(&saved.digest.to_bytes())?;
    to.write_all(&length(saved.objects.len())?)?;
    for one in &saved.objects {
        to.write_all(&[u8::from(one.held)])?;
        to.block(&encode_object(&one.object))?;
    }
    to.write_all(&saved.confirmed_ms.to_be_bytes())?;
    to.block(saved.cluster.as_bytes())?;
    to.write_all(&length(saved.freshness.kinds().len())?)?;
    for (kind, version) in saved.freshness.kinds() {
        to.block(kind.as_bytes())?;
        to.block(version.as_bytes())?;
    }
    let addresses: Vec<IpAddr> = saved.last_known.into_iter().flatten().collect();
    to.write_all(&length(addresses.len())?)?;
    for ip in addresses {
        to.block(&octets(ip))?;
    }
    to.write_all(&length(saved.pod_ranges.len())?)?;
    for range in &saved.pod_ranges {
        to.write_all(&[range.prefix_len()])?;
        to.block(&octets(range.first()))?;
    }
    let sum = to.sum.finish128().as_u128();
    to.inner.write_all(&sum.to_be_bytes())
}

/// Reads a state that was written for this node.
pub(super) fn decode(file: Vec<u8>, node: &str) -> Result<CacheContent, FileError> {
    let mut rest = Bytes::from(file);
    if !rest.starts_with(MAGIC) || rest.len() < MAGIC.len() + HASH {
        return Err(FileError::Damaged);
    }
    let sum = rest.split_off(rest.len() - HASH);
    let mut computed = SipHasher13::new();
    computed.write(&rest);
    if computed.finish128().as_u128().to_be_bytes() != *sum {
        return Err(FileError::Damaged);
    }
    rest.advance(MAGIC.len());
    let version = number(&mut rest)?;
    if version != VERSION {
        return Err(FileError::Version(version));
    }
    let written_for = block(&mut rest)?;
    if written_for != node.as_bytes() {
        let name = String::from_utf8_lossy(&written_for).into_owned();
        return Err(FileError::Foreign(name));
    }
    let position = Position {
        epoch: long(&mut rest)?,
        revision: long(&mut rest)?,
    };
    let digest = take(&mut rest, HASH)?;
    let digest = <[u8; HASH]>::try_from(&*digest).map_err(|_| FileError::Damaged)?;
    let count = number(&mut rest)?;
    let (mut objects, mut skipped) = (Vec::new(), 0);
    for _ in 0..count {
        let held = take(&mut rest, 1)?[..] != [0];
        let encoded = block(&mut rest)?;
        let hash = ObjectHash::of(&encoded);
        match decode_object(encoded) {
            Ok(Some(object)) => objects.push(Remembered {
                object: Arc::new(object),
                hash,
                held,
            }),
            Ok(None) | Err(_) => skipped += 1,
        }
    }
    let (confirmed_ms, cluster) = if rest.is_empty() {
        (0, Bytes::new())
    } else {
        (long(&mut rest)?, block(&mut rest)?)
    };
    let freshness = if rest.is_empty() { Freshness::default() } else { freshness(&mut rest)? };
    let last_known = if rest.is_empty() { [None; 2] } else { addresses(&mut rest)? };
    let pod_ranges = if rest.is_empty() { Vec::new() } else { ranges(&mut rest)? };
    let saved = SavedState {
        position,
        digest: Digest::from_bytes(digest),
        confirmed_ms,
        cluster: String::from_utf8_lossy(&cluster).into(),
        freshness,
        last_known,
        pod_ranges,
        objects,
    };
    Ok(CacheContent { saved, skipped })
}

fn freshness(from: &mut Bytes) -> Result<Freshness, FileError> {
    let count = number(from)?;
    let mut kinds = Vec::new();
    for _ in 0..count {
        let text = |block: Bytes| String::from_utf8_lossy(&block).into_owned();
        kinds.push((text(block(from)?), text(block(from)?)));
    }
    let kinds = kinds.iter();
    Ok(Freshness::of(
        kinds.map(|(kind, version)| (&**kind, &**version)),
    ))
}

fn addresses(from: &mut Bytes) -> Result<[Option<IpAddr>; 2], FileError> {
    let mut addresses = [None; 2];
    for _ in 0..number(from)? {
        let ip = address(from)?;
        addresses[Family::of(ip) as usize] = Some(ip);
    }
    Ok(addresses)
}

fn ranges(from: &mut Bytes) -> Result<Vec<Cidr>, FileError> {
    let mut ranges = Vec::new();
    for _ in 0..number(from)? {
        let length = take(from, 1)?.get_u8();
        let range = Cidr::new(address(from)?, length);
        ranges.push(range.ok_or(FileError::Damaged)?);
    }
    Ok(ranges)
}

fn address(from: &mut Bytes) -> Result<IpAddr, FileError> {
    let ip = block(from)?;
    let v4 = <[u8; 4]>::try_from(&*ip).map(IpAddr::from);
    let v6 = || <[u8; 16]>::try_from(&*ip).map(IpAddr::from);
    v4.or_else(|_| v6()).map_err(|_| FileError::Damaged)
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// Appends the checksum to the content of a file.
pub(super) fn seal(content: &mut Vec<u8>) {
    let mut sum = SipHasher13::new();
    sum.write(content);
    content.extend(sum.finish128().as_u128().to_be_bytes());
}

fn take(from: &mut Bytes, bytes: usize) -> Result<Bytes, FileError> {
    if from.len() < bytes {
        return Err(FileError::Damaged);
    }
    Ok(from.split_to(bytes))
}

fn number(from: &mut Bytes) -> Result<u32, FileError> {
    Ok(take(from, size_of::<u32>())?.get_u32())
}

fn long(from: &mut Bytes) -> Result<u64, FileError> {
    Ok(take(from, size_of::<u64>())?.get_u64())
}

fn block(from: &mut Bytes) -> Result<Bytes, FileError> {
    let length = number(from)?;
    take(
        from,
        usize::try_from(length).map_err(|_| FileError::Damaged)?,
    )
}

fn length(length: usize) -> io::Result<[u8; 4]> {
    let length = u32::try_from(length).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
    Ok(length.to_be_bytes())
}

/// Writer that computes the checksum of everything written.
struct Summing<'a> {
    inner: &'a mut dyn Write,
    sum: SipHasher13,
}

impl Summing<'_> {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sum.write(bytes);
        self.inner.write_all(bytes)
    }

    fn block(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(&length(bytes.len())?)?;
        self.write_all(bytes)
    }
}
