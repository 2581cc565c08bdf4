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
//! checksum                 16 bytes: SipHash-1-3-128 of all before it
//! ```

use std::hash::Hasher as _;
use std::io::{self, Write};
use std::sync::Arc;

use bytes::{Buf as _, Bytes};
use kplane_proto::convert::{decode_object, encode_object};
use siphasher::sip128::{Hasher128 as _, SipHasher13};

use super::file::FileError;
use super::{Memory, Picture};

const MAGIC: &[u8] = b"kplane desired state\n";

/// Version of the format. Files of other versions are not read.
const VERSION: u32 = 1;

/// Length of the checksum and of the digest, in bytes.
const HASH: usize = 16;

/// The content of a file.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) objects: Memory,
    /// The number of objects that this version does not understand.
    pub(super) skipped: usize,
}

/// Writes a picture.
pub(super) fn encode(to: &mut dyn Write, node: &str, picture: &Picture) -> io::Result<()> {
    let mut to = Summing {
        inner: to,
        sum: SipHasher13::new(),
    };
    to.write_all(MAGIC)?;
    to.write_all(&VERSION.to_be_bytes())?;
    to.block(node.as_bytes())?;
    to.write_all(&picture.position.epoch.to_be_bytes())?;
    to.write_all(&picture.position.revision.to_be_bytes())?;
    to.write_all(&picture.digest.to_bytes())?;
    to.write_all(&length(picture.objects.len())?)?;
    for one in &picture.objects {
        to.write_all(&[u8::from(one.held)])?;
        to.block(&encode_object(&one.object))?;
    }
    let sum = to.sum.finish128().as_u128();
    to.inner.write_all(&sum.to_be_bytes())
}

/// Reads a picture that was written for this node.
pub(super) fn decode(file: Vec<u8>, node: &str) -> Result<Loaded, FileError> {
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
    // Epoch, revision and digest are not used yet.
    take(&mut rest, 2 * size_of::<u64>() + HASH)?;
    let count = number(&mut rest)?;
    let (mut objects, mut skipped) = (Memory::new(), 0);
    for _ in 0..count {
        take(&mut rest, 1)?;
        match decode_object(block(&mut rest)?) {
            Ok(Some(object)) => objects.push(Arc::new(object)),
            Ok(None) | Err(_) => skipped += 1,
        }
    }
    Ok(Loaded { objects, skipped })
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

fn block(from: &mut Bytes) -> Result<Bytes, FileError> {
    let length = number(from)?;
    take(
        from,
        usize::try_from(length).map_err(|_| FileError::Damaged)?,
    )
}

fn length(length: usize) -> io::Result<[u8; 4]> {
    let length = u32::try_from(length);
    let length = length.map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
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
