//! Decides whether an object that a snapshot does not name counts as deleted. The decision depends
//! on the control plane's confidence in its data, and on the cliff guard, which demands more
//! confidence when much would go at once. Pure.

use kplane_proto::v1 as pb;

/// The confidence with which the absence of an object from a snapshot means that it is deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Confidence {
    /// The control plane has read its source in full. Absence is trusted, except for a cliff.
    #[default]
    Whole,
    /// The source could not be read in full since the control plane started. Absence is never
    /// trusted.
    Partial,
    /// A second reading or a person confirmed the data. Absence is trusted, even for a cliff.
    Confirmed,
}

impl From<pb::Confidence> for Confidence {
    fn from(wire: pb::Confidence) -> Self {
        match wire {
            pb::Confidence::Unspecified => Self::Whole,
            pb::Confidence::Partial => Self::Partial,
            pb::Confidence::Confirmed => Self::Confirmed,
        }
    }
}

/// The limits beyond which a loss by absence is a cliff: so large that it is more likely a mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CliffGuard {
    /// Whether the guard is on.
    pub enabled: bool,
    /// The share of the existing Services that a cliff exceeds, in percent, 0..=100.
    pub share_percent: u8,
    /// The least number of Services that a cliff loses.
    pub minimum: u64,
}

impl Default for CliffGuard {
    fn default() -> Self {
        Self {
            enabled: true,
            share_percent: 30,
            minimum: 10,
        }
    }
}

impl CliffGuard {
    /// Returns whether losing `lost` of `all` at once is a cliff.
    pub fn is_cliff(self, lost: usize, all: usize) -> bool {
        let (lost, all) = (lost as u128, all as u128);
        let many = lost >= u128::from(self.minimum);
        self.enabled && many && lost * 100 > all * u128::from(self.share_percent)
    }

    /// Returns whether a loss by absence is held back.
    pub(super) fn holds(self, confidence: Confidence, lost: usize, all: usize) -> bool {
        match confidence {
            Confidence::Confirmed => false,
            Confidence::Partial => lost > 0,
            Confidence::Whole => self.is_cliff(lost, all),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cliff_is_more_than_the_share_and_at_least_the_minimum() {
        let guard = CliffGuard::default();
        let cases = [
            (0, 0, false),
            (9, 9, false),
            (10, 10, true),
            (10, 33, true),
            (10, 34, false),
            (300, 1_000, false),
            (301, 1_000, true),
        ];
        for (lost, all, cliff) in cases {
            assert_eq!(guard.is_cliff(lost, all), cliff, "{lost} of {all}");
        }
        let off = CliffGuard {
            enabled: false,
            ..guard
        };
        assert!(!off.is_cliff(1_000, 1_000));
        assert!(
            off.holds(Confidence::Partial, 1, 1_000),
            "no cliff, no whole picture"
        );
        let eager = CliffGuard {
            share_percent: 0,
            minimum: 0,
            ..guard
        };
        assert!(eager.is_cliff(1, 1_000) && !eager.is_cliff(0, 1_000));
    }
}
