//! How far absence is believed: the confidence of a control plane in its picture, and the cliff
//! guard, which asks for more of it when much would go at once. Pure.

use kplane_proto::v1 as pb;

/// How far the absence of an object from a snapshot means that it is gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Confidence {
    /// The source's picture is whole: believed, but for a cliff.
    #[default]
    Whole,
    /// The source could not be read in full since the control plane started: never believed.
    Partial,
    /// A second look or a person agreed with it: believed, a cliff too.
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

/// When so much would go by absence that it is more likely a mistake: a cliff.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CliffGuard {
    /// Cliffs are looked for.
    pub enabled: bool,
    /// More than so many percent of what is there would go, 0..=100,
    pub share_percent: u8,
    /// and at least so many.
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
    /// Whether losing `lost` of `all` at once is a cliff.
    #[must_use]
    pub fn is_cliff(self, lost: usize, all: usize) -> bool {
        let (lost, all) = (lost as u128, all as u128);
        let many = lost >= u128::from(self.minimum);
        self.enabled && many && lost * 100 > all * u128::from(self.share_percent)
    }

    /// Whether a loss by absence is held back.
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
