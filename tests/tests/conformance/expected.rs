//! The differences that are meant: each a row of `docs/kube-proxy-compat.md`.

use crate::compare::Compared;
use crate::fate::Fate;

/// Packets that meet another fate on purpose.
pub(crate) struct Difference {
    /// The row of the compatibility page.
    pub(crate) id: &'static str,
    pub(crate) reason: &'static str,
    fits: fn(&Compared<'_>) -> bool,
}

impl Difference {
    pub(crate) fn fits(&self, _round: &str, compared: &Compared<'_>) -> bool {
        (self.fits)(compared)
    }
}

/// Every one must be met in a complete run.
pub(crate) const DIFFERENCES: &[Difference] = &[];

/// Whether a fate is this one end.
#[allow(dead_code, reason = "for differences")]
fn is(fate: &Fate, end: &crate::fate::End) -> bool {
    fate.len() == 1 && fate.contains(end)
}
