//! The goals of `wait`.

use std::str::FromStr;

use clap::ValueEnum;

/// The state to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Goal {
    /// The kernel holds the newest state.
    Programmed,
    /// The agent has read the newest state back from the kernel.
    Verified,
    /// The Service is deleted, and the kernel has nothing of it.
    Deleted,
}

/// A share of the nodes, in thousandths of a percent; more than none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threshold(u32);

impl Threshold {
    /// All nodes.
    pub const ALL: Self = Self(100_000);

    /// Returns the number of nodes that are enough.
    pub fn of(self, nodes: u64) -> u64 {
        let shares = u128::from(nodes) * u128::from(self.0);
        let needed = shares.div_ceil(u128::from(Self::ALL.0));
        u64::try_from(needed).unwrap_or(u64::MAX)
    }

    /// Returns the share in percent.
    pub fn percent(self) -> f64 {
        f64::from(self.0) / 1_000.0
    }
}

impl FromStr for Threshold {
    type Err = String;

    /// Parses a share such as `99%` or `99.5`.
    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_suffix('%').unwrap_or(text);
        let (whole, part) = number.split_once('.').unwrap_or((number, ""));
        let digits = format!("{whole}{part:0<3}");
        let are_digits = part.len() <= 3 && digits.bytes().all(|b| b.is_ascii_digit());
        let share = if are_digits { digits.parse().ok() } else { None };
        let share = share
            .filter(|share| (1..=Self::ALL.0).contains(share))
            .ok_or("expected a share such as 99% or 99.5%, 100% at most")?;
        Ok(Self(share))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds() {
        for (text, of_5_000) in [
            ("100%", Some(5_000)),
            ("99%", Some(4_950)),
            ("99.9", Some(4_995)),
            ("99.99%", Some(5_000)),
            ("0.001%", Some(1)),
            ("0", None),
            ("99.9999%", None),
            ("-1%", None),
            ("", None),
            ("101%", None),
            ("NaN", None),
            ("most", None),
        ] {
            let threshold = text.parse::<Threshold>().ok();
            assert_eq!(threshold.map(|t| t.of(5_000)), of_5_000, "{text}");
        }
        assert_eq!("99%".parse::<Threshold>().unwrap().of(0), 0);
        assert_eq!("99%".parse::<Threshold>().unwrap().of(3), 3);
    }
}
