//! UIDs of objects.

use std::fmt;

use serde::{Deserialize, Deserializer};

/// A UUID, in 16 bytes instead of 36.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Uid([u8; 16]);

impl Uid {
    /// Parses the form in which Kubernetes writes a UUID; `None` for anything else.
    pub fn parse(text: &str) -> Option<Self> {
        let text: &[u8; 36] = text.as_bytes().try_into().ok()?;
        let mut number = 0_u128;
        for (at, byte) in text.iter().enumerate() {
            let digit = match (at, byte) {
                (8 | 13 | 18 | 23, b'-') => continue,
                (8 | 13 | 18 | 23, _) => return None,
                (_, b'0'..=b'9') => byte - b'0',
                (_, b'a'..=b'f') => byte - b'a' + 10,
                _ => return None,
            };
            number = number << 4 | u128::from(digit);
        }
        Some(Self(number.to_be_bytes()))
    }
}

impl fmt::Display for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            let dash = if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

/// Reads a UID. A UID in another form is ignored, because it is no reason to refuse an object.
pub(super) fn read_uid<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Uid>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    Ok(text.and_then(|text| Uid::parse(&text)))
}
