//! Compressed pieces of snapshots. The control plane compresses them once for all agents, where gRPC's own compression
//! would work for each of them.

use std::io::{self, Read as _, Write as _};

use bytes::Bytes;
use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use prost::Message as _;

use crate::v1::Update;

/// Maximum size of an unpacked piece, in bytes.
pub const MAX_UNPACKED: usize = 1 << 20;

/// The reason why a packed piece cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// It is not what DEFLATE makes.
    #[error("it is not compressed as it should be: {0}")]
    Compression(#[from] io::Error),
    /// It is larger than any that a control plane makes.
    #[error("it is larger than {MAX_UNPACKED} bytes")]
    TooLarge,
    /// Its content is no piece.
    #[error("its content is no piece: {0}")]
    Content(#[from] prost::DecodeError),
}

/// Packs objects, each encoded, for `Update.packed`.
pub fn pack(objects: Vec<Bytes>) -> Vec<u8> {
    let piece = Update {
        objects,
        ..Update::default()
    };
    let mut packed = DeflateEncoder::new(Vec::new(), Compression::fast());
    // A vector takes everything.
    let _ = packed.write_all(&piece.encode_to_vec());
    packed.finish().unwrap_or_default()
}

/// Unpacks the objects of `Update.packed`.
///
/// # Errors
/// [`Unreadable`].
pub fn unpack(packed: &[u8]) -> Result<Vec<Bytes>, Unreadable> {
    let mut unpacked = Vec::new();
    let most = MAX_UNPACKED as u64 + 1;
    let mut reader = DeflateDecoder::new(packed).take(most);
    reader.read_to_end(&mut unpacked)?;
    if unpacked.len() > MAX_UNPACKED {
        return Err(Unreadable::TooLarge);
    }
    Ok(Update::decode(Bytes::from(unpacked))?.objects)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_packed_and_unpacked() {
        let objects: Vec<Bytes> = (0..500)
            .map(|number| Bytes::from(format!("a Service with the name web-{number}")))
            .collect();
        let packed = pack(objects.clone());
        let raw: usize = objects.iter().map(Bytes::len).sum();
        assert!(packed.len() < raw / 3, "{} of {raw}", packed.len());
        assert_eq!(unpack(&packed).unwrap(), objects);
        assert_eq!(unpack(&pack(Vec::new())).unwrap(), Vec::<Bytes>::new());
    }

    #[test]
    fn what_is_no_piece_or_too_large_is_refused() {
        let zeros = Bytes::from(vec![0; MAX_UNPACKED]);
        let bomb = pack(vec![zeros]);
        assert!(bomb.len() < MAX_UNPACKED / 100);
        assert!(matches!(unpack(&bomb), Err(Unreadable::TooLarge)));
        assert!(matches!(
            unpack(b"\xff\xff"),
            Err(Unreadable::Compression(_))
        ));
        let half = &bomb[..bomb.len() / 2];
        unpack(half).unwrap_err();
        let mut noise = DeflateEncoder::new(Vec::new(), Compression::fast());
        noise.write_all(&[0x0a, 0xff, 0x01]).unwrap();
        let noise = noise.finish().unwrap();
        assert!(matches!(unpack(&noise), Err(Unreadable::Content(_))));
    }
}
