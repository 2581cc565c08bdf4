//! Conversions between wire and model: the only place where one becomes the other.
//!
//! From the model to the wire never fails. From the wire to the model everything is checked, since
//! every byte from outside is hostile: lengths, ranges, families, and endpoint addresses that must
//! never be reached (a second line of defence behind the control plane's own check).

mod address;
mod object;
mod status;

#[cfg(test)]
mod tests;

pub use object::{decode_object, encode_object, family};

use tonic::Status;

/// A wire message that has no meaning in the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("field {field}: {reason}")]
pub struct ConvertError {
    /// The field, as named in the .proto file.
    pub field: &'static str,
    /// What is wrong with it.
    pub reason: String,
}

impl ConvertError {
    /// An error about one field.
    #[must_use]
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
