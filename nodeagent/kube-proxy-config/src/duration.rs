//! Durations as Go writes and reads them: `30s`, `1m30s`, `24h0m0s`, `1.5s`, `0`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{Error as _, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The text of errors where a duration is expected.
pub const EXPECTED: &str = "a duration such as 30s, 1m30s or 24h0m0s";

/// Longest text that is read, in bytes: `-2562047h47m16.854775808s` has 25.
const MAX_TEXT: usize = 64;

/// Most digits after the point that count: beyond the ninth they are below a nanosecond.
const MAX_FRACTION_DIGITS: usize = 18;

const SECOND: u64 = 1_000_000_000;

/// The units and their nanoseconds. The micro sign has two forms in Unicode, and Go reads both.
const UNITS: [(&str, u64); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("\u{b5}s", 1_000),
    ("\u{3bc}s", 1_000),
    ("ms", 1_000_000),
    ("s", SECOND),
    ("m", 60 * SECOND),
    ("h", 3_600 * SECOND),
];

/// A length of time in nanoseconds, which may be negative (`metav1.Duration`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct GoDuration(i64);

/// A text that is not a duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be {EXPECTED}")]
pub struct ParseDurationError;

impl GoDuration {
    /// The zero duration.
    pub const ZERO: Self = Self(0);

    /// Creates a duration from nanoseconds.
    pub const fn from_nanos(nanos: i64) -> Self {
        Self(nanos)
    }

    /// Creates a duration from seconds.
    pub const fn from_secs(seconds: u32) -> Self {
        // No overflow is possible: 32 bits of seconds are 62 bits of nanoseconds.
        Self(seconds as i64 * SECOND as i64)
    }

    /// Converts to the standard library's type; returns `None` for a negative duration.
    pub fn to_std(self) -> Option<Duration> {
        u64::try_from(self.0).ok().map(Duration::from_nanos)
    }

    /// Returns whether the duration is negative.
    pub fn is_negative(self) -> bool {
        self.0 < 0
    }
}

impl FromStr for GoDuration {
    type Err = ParseDurationError;

    fn from_str(text: &str) -> Result<Self, ParseDurationError> {
        let (negative, unsigned) = match text.as_bytes() {
            [b'-', ..] => (true, &text[1..]),
            [b'+', ..] => (false, &text[1..]),
            _ => (false, text),
        };
        let nanos = match unsigned {
            "" => return Err(ParseDurationError),
            "0" => 0,
            _ if text.len() > MAX_TEXT => return Err(ParseDurationError),
            _ => magnitude(unsigned).ok_or(ParseDurationError)?,
        };
        let signed = if negative {
            0_i64.checked_sub_unsigned(nanos)
        } else {
            i64::try_from(nanos).ok()
        };
        signed.map(Self).ok_or(ParseDurationError)
    }
}

/// Returns the nanoseconds of a sequence of numbers with units; `None` if the text is not one, or
/// on overflow.
fn magnitude(mut rest: &str) -> Option<u64> {
    let mut sum = 0_u64;
    while !rest.is_empty() {
        let whole = leading_digits(&mut rest);
        let fraction = match rest.strip_prefix('.') {
            Some(after) => {
                rest = after;
                leading_digits(&mut rest)
            }
            None => "",
        };
        if whole.is_empty() && fraction.is_empty() {
            return None;
        }
        let end = rest.find(|c: char| c == '.' || c.is_ascii_digit());
        let (unit, after) = rest.split_at(end.unwrap_or(rest.len()));
        let nanos = UNITS.iter().find(|(name, _)| *name == unit)?.1;
        rest = after;
        let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
        let part = whole.checked_mul(nanos)?.checked_add(part_of(fraction, nanos)?)?;
        sum = sum.checked_add(part)?;
    }
    Some(sum)
}

/// Removes the digits at the beginning, and returns them.
fn leading_digits<'t>(rest: &mut &'t str) -> &'t str {
    let end = rest.find(|c: char| !c.is_ascii_digit());
    let (digits, after) = rest.split_at(end.unwrap_or(rest.len()));
    *rest = after;
    digits
}

/// Returns `0.{digits}` of a unit, in nanoseconds, rounded down.
fn part_of(digits: &str, nanos: u64) -> Option<u64> {
    let digits = &digits[..digits.len().min(MAX_FRACTION_DIGITS)];
    if digits.is_empty() {
        return Some(0);
    }
    let scale = 10_u128.pow(u32::try_from(digits.len()).ok()?);
    let part = digits.parse::<u128>().ok()? * u128::from(nanos) / scale;
    u64::try_from(part).ok()
}

impl fmt::Display for GoDuration {
    /// Writes the duration as Go does: hours, minutes and seconds, or one smaller unit.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 0 {
            f.write_str("-")?;
        }
        let nanos = self.0.unsigned_abs();
        let fraction = |of: u64| {
            let digits = match of {
                SECOND => 9,
                1_000_000 => 6,
                _ => 3,
            };
            let text = format!(".{:0digits$}", nanos % of);
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        };
        match nanos {
            0 => f.write_str("0s"),
            1..1_000 => write!(f, "{nanos}ns"),
            1_000..1_000_000 => write!(f, "{}{}\u{b5}s", nanos / 1_000, fraction(1_000)),
            1_000_000..SECOND => write!(f, "{}{}ms", nanos / 1_000_000, fraction(1_000_000)),
            _ => {
                let seconds = nanos / SECOND;
                let (hours, minutes) = (seconds / 3_600, seconds / 60 % 60);
                if hours > 0 {
                    write!(f, "{hours}h")?;
                }
                if seconds >= 60 {
                    write!(f, "{minutes}m")?;
                }
                write!(f, "{}{}s", seconds % 60, fraction(SECOND))
            }
        }
    }
}

impl Serialize for GoDuration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for GoDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Text)
    }
}

struct Text;

impl Visitor<'_> for Text {
    type Value = GoDuration;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<GoDuration, E> {
        let parsed = text.parse();
        parsed.map_err(|_| E::invalid_value(Unexpected::Str(text), &self))
    }
}

/// Reads a duration as text or as a whole number of nanoseconds (`logging.flushFrequency`).
pub(super) fn or_nanoseconds<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<GoDuration, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        Nanos(i64),
        Text(String),
    }
    let expected = || D::Error::custom(format_args!("expected {EXPECTED}"));
    match Either::deserialize(deserializer).map_err(|_| expected())? {
        Either::Nanos(nanos) => Ok(GoDuration(nanos)),
        Either::Text(text) => text.parse().map_err(|_| expected()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn nanos(text: &str) -> Option<i64> {
        text.parse().ok().map(|GoDuration(nanos)| nanos)
    }

    #[test]
    fn what_go_reads() {
        for (text, expected) in [
            ("0", 0),
            ("0s", 0),
            ("+5s", 5_000_000_000),
            ("-1s", -1_000_000_000),
            ("1m30s", 90_000_000_000),
            ("24h0m0s", 86_400_000_000_000),
            ("1.5h", 5_400_000_000_000),
            (".5s", 500_000_000),
            ("1.s", 1_000_000_000),
            ("1h1m1s1ms1us1ns", 3_661_001_001_001),
            ("2\u{b5}s", 2_000),
            ("2\u{3bc}s", 2_000),
            ("0.9999999999s", 999_999_999),
            ("9223372036854775807ns", i64::MAX),
            ("-9223372036854775808ns", i64::MIN),
        ] {
            assert_eq!(nanos(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn what_go_refuses() {
        for text in [
            "",
            "-",
            "+",
            "s",
            ".",
            ".s",
            "1",
            "1.5",
            "5 s",
            "1x",
            "1S",
            "--1s",
            "1s-1s",
            "9223372036854775808ns",
            "99999999999h",
            " 1s",
            "1s ",
            "\u{0660}s",
            "1d",
        ] {
            assert_eq!(nanos(text), None, "{text}");
        }
        assert_eq!(nanos(&"1s".repeat(100)), None);
    }

    #[test]
    fn what_go_writes() {
        for (nanos, expected) in [
            (0, "0s"),
            (1, "1ns"),
            (1_100, "1.1\u{b5}s"),
            (2_200_000, "2.2ms"),
            (3_300_000_000, "3.3s"),
            (86_400_000_000_000, "24h0m0s"),
            (90_000_000_000, "1m30s"),
            (60_000_000_000, "1m0s"),
            (-5_000_000_000, "-5s"),
            (i64::MIN, "-2562047h47m16.854775808s"),
        ] {
            assert_eq!(GoDuration(nanos).to_string(), expected);
        }
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(nanos: i64) {
            let duration = GoDuration(nanos);
            prop_assert_eq!(duration.to_string().parse(), Ok(duration));
        }

        #[test]
        fn nothing_panics(text in "[-+0-9.nuµmsh]{0,80}") {
            let _ = text.parse::<GoDuration>();
        }
    }
}
