//! A quantity of Kubernetes, such as `128Ki`. kplane reads it and writes it back, without using it.

use std::fmt;

use serde::de::{Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

const EXPECTED: &str = "a quantity such as 0, 512 or 128Ki";
const SUFFIXES: [&str; 16] = [
    "", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei",
];
/// Longest text that is read, in bytes.
const MAX_TEXT: usize = 64;

/// A number with an optional suffix, as it was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Quantity(String);

impl Default for Quantity {
    fn default() -> Self {
        Self("0".to_owned())
    }
}

impl Quantity {
    /// Parses a quantity; returns `None` for text that is not one.
    pub fn parse(text: &str) -> Option<Self> {
        let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
        let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.');
        let (number, suffix) = unsigned.split_at(end.unwrap_or(unsigned.len()));
        let exponent = suffix.strip_prefix(['e', 'E']).is_some_and(|digits| {
            let digits = digits.strip_prefix(['+', '-']).unwrap_or(digits);
            !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
        });
        let is_number = number.bytes().any(|b| b.is_ascii_digit())
            && number.bytes().filter(|b| *b == b'.').count() <= 1;
        let fits = text.len() <= MAX_TEXT && is_number;
        (fits && (exponent || SUFFIXES.contains(&suffix))).then(|| Self(text.to_owned()))
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NumberOrText)
    }
}

struct NumberOrText;

impl Visitor<'_> for NumberOrText {
    type Value = Quantity;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_i64<E>(self, number: i64) -> Result<Quantity, E> {
        Ok(Quantity(number.to_string()))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Quantity, E> {
        Ok(Quantity(number.to_string()))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Quantity, E> {
        Quantity::parse(text).ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_a_quantity() {
        for text in ["0", "128Ki", "1.5G", "-1", "+2m", "1e3", "1E-3", ".5", "7E"] {
            assert!(Quantity::parse(text).is_some(), "{text}");
        }
        for text in ["", "Ki", "1.2.3", "1 Ki", "1KB", "e3", "1e", "."] {
            assert!(Quantity::parse(text).is_none(), "{text}");
        }
    }
}
