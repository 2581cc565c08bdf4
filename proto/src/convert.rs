//! Conversions between wire and model: no other code converts between them.
//!
//! Conversions from the model to the wire never fail. Conversions from the wire to the model check
//! everything, since every byte from outside is hostile: lengths, ranges, families, and endpoint
//! addresses that must never be reached (a second line of defence behind the control plane's own
//! check).

mod address;
mod enums;
mod ids;
mod object;
mod policy;
mod proxied;
mod status;
mod tiers;

#[cfg(test)]
mod tests;

pub use address::{ip_bytes, unpack_ip};
pub use enums::{family, protocol};
pub use object::{decode_object, encode_object, key_of_object};

use tonic::Status;

/// The error for a wire message that is invalid in the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("field {field}: {reason}")]
pub struct ConvertError {
    /// The field, as named in the .proto file.
    pub field: &'static str,
    /// The problem with the field.
    pub reason: String,
}

impl ConvertError {
    /// Creates an error about one field.
    pub fn new(field: &'static str, reason: impl Into<String>) -> Self {
        Self {
            field,
            reason: reason.into(),
        }
    }
}

impl From<ConvertError> for Status {
    fn from(error: ConvertError) -> Self {
        Self::invalid_argument(error.to_string())
    }
}
