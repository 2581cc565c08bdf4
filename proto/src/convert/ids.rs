//! Identities of Pods and of their classes, packed.

use kplane_model::PeerId;

use super::ConvertError;

/// Length of an identity in bytes.
pub(super) const ID: usize = 16;

pub(super) fn id(field: &'static str, bytes: &[u8]) -> Result<PeerId, ConvertError> {
    let wrong = |_| ConvertError::new(field, format!("{} bytes instead of {ID}", bytes.len()));
    bytes.try_into().map(PeerId).map_err(wrong)
}

pub(super) fn pack_ids(ids: &[PeerId]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.0).collect()
}

/// Reads packed identities, sorted and unique.
pub(super) fn unpack_ids(field: &'static str, bytes: &[u8]) -> Result<Vec<PeerId>, ConvertError> {
    let (ids, rest) = bytes.as_chunks::<ID>();
    if !rest.is_empty() {
        let reason = format!("{} bytes are no multiple of {ID}", bytes.len());
        return Err(ConvertError::new(field, reason));
    }
    let mut ids: Vec<PeerId> = ids.iter().copied().map(PeerId).collect();
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}
