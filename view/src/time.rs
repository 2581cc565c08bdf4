//! Points in time and durations, human-readable and for programs.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::{Serialize, Serializer};

/// A point in time, printed as RFC 3339 in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(Timestamp);

impl Time {
    /// Converts milliseconds since 1970 from the wire; 0 means never.
    pub fn from_wire(ms: u64) -> Option<Self> {
        let ms = i64::try_from(ms).ok().filter(|ms| *ms > 0)?;
        Timestamp::from_millisecond(ms).ok().map(Self)
    }

    /// Returns the time in the time zone of this machine, human-readable: `2026-01-31 12:00:00.123 CET`.
    pub fn local(self) -> String {
        let local = self.0.to_zoned(TimeZone::system());
        local.strftime("%Y-%m-%d %H:%M:%S%.3f %Z").to_string()
    }

    /// Returns the age; zero when the time is in the future (clocks differ).
    pub fn age(self, now: Self) -> Duration {
        now.0.duration_since(self.0).try_into().unwrap_or_default()
    }

    /// Returns the age, human-readable, in whole seconds: `3m12s`.
    pub fn age_text(self, now: Self) -> String {
        age(self.age(now))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Returns a duration in whole seconds, human-readable.
pub fn age(duration: Duration) -> String {
    human(Duration::from_secs(duration.as_secs()))
}

/// Returns a duration, human-readable, with two or three digits: `412us`, `3.1ms`, `45s`, `3m12s`,
/// `2h5m`, `13h`, `12d`. It is always rounded down, so that no age is overstated.
pub fn human(duration: Duration) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    let (us, s) = (duration.as_micros(), duration.as_secs());
    match s {
        0 if us == 0 => "0s".to_owned(),
        0 if us < 1_000 => format!("{us}us"),
        0 => tenths(us / 100, "ms"),
        1..10 => tenths(us / 100_000, "s"),
        10..MINUTE => format!("{s}s"),
        MINUTE..HOUR => pair(s / MINUTE, "m", s % MINUTE, "s"),
        HOUR..DAY => pair(s / HOUR, "h", s % HOUR / MINUTE, "m"),
        DAY.. => pair(s / DAY, "d", s % DAY / HOUR, "h"),
    }
}

/// Formats a number of tenths: with its decimal below ten, unless that is zero.
fn tenths(tenths: u128, unit: &str) -> String {
    match (tenths / 10, tenths % 10) {
        (whole @ 0..10, tenth @ 1..) => format!("{whole}.{tenth}{unit}"),
        (whole, _) => format!("{whole}{unit}"),
    }
}

/// Formats two units if the larger one is below ten, unless the smaller one is zero.
fn pair(large: u64, large_unit: &str, small: u64, small_unit: &str) -> String {
    match (large, small) {
        (0..10, 1..) => format!("{large}{large_unit}{small}{small_unit}"),
        _ => format!("{large}{large_unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_for_people() {
        let cases: [(u64, &str); 17] = [
            (0, "0s"),
            (412, "412us"),
            (999, "999us"),
            (1_000, "1ms"),
            (3_140, "3.1ms"),
            (9_999, "9.9ms"),
            (31_400, "31ms"),
            (999_999, "999ms"),
            (1_250_000, "1.2s"),
            (45_900_000, "45s"),
            (192_000_000, "3m12s"),
            (180_000_000, "3m"),
            (840_000_000, "14m"),
            (7_500_000_000, "2h5m"),
            (46_800_000_000, "13h"),
            (273_600_000_000, "3d4h"),
            (u64::MAX, "213503982d"),
        ];
        for (us, expected) in cases {
            assert_eq!(human(Duration::from_micros(us)), expected, "{us} us");
        }
    }

    #[test]
    fn times_are_rfc_3339_and_never_panic() {
        let time = Time::from_wire(1_795_239_300_250).unwrap();
        assert_eq!(time.to_string(), "2026-11-21T05:35:00.25Z");
        assert_eq!(Time::from_wire(0), None, "never");
        assert_eq!(Time::from_wire(u64::MAX), None, "out of range");
    }

    #[test]
    fn the_future_has_no_age() {
        let [earlier, later] = [1_000, 4_900].map(|ms| Time::from_wire(ms).unwrap());
        assert_eq!(earlier.age_text(later), "3s");
        assert_eq!(later.age_text(earlier), "0s");
    }
}
