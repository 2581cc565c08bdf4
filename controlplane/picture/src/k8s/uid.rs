//! UIDs of objects.

use std::fmt;

use serde::{Deserialize, Deserializer};

/// A UUID, in 16 bytes instead of 36.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Uid([u8; 16]);

impl Uid {
    /// Parses the form in which Kubernetes writes a UUID; `None` for anything else.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let is_dash = |at: usize| matches!(at, 8 | 13 | 18 | 23);
        let fits = text.len() == 36
            && text
                .bytes()
                .enumerate()
                .all(|(at, b)| is_dash(at) == (b == b'-'));
        if !fits {
            return None;
        }
        let digits: String = text.chars().filter(|c| *c != '-').collect();
        let number = u128::from_str_radix(&digits, 16).ok()?;
        Some(Self(number.to_be_bytes())).filter(|uid| uid.to_string() == text)
    }
}

impl fmt::Display for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            let dash = if matches!(at, 4 | 6 | 8 | 10) {
                "-"
            } else {
                ""
            };
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
