//! The differences that are meant: each is a row of `docs/kube-proxy-compat.md`.

use kplane_model::Protocol;

use crate::compare::Compared;
use crate::fate::{End, Fate};

/// Packets that meet another fate on purpose.
pub(crate) struct Difference {
    /// The row of the compatibility page.
    pub(crate) id: &'static str,
    pub(crate) reason: &'static str,
    fits: fn(&Compared<'_>) -> bool,
}

impl Difference {
    pub(crate) fn fits(&self, compared: &Compared<'_>) -> bool {
        (self.fits)(compared)
    }
}

/// Every one must be met in a complete run.
pub(crate) const DIFFERENCES: &[Difference] = &[Difference {
    id: "A18",
    reason: "a refused TCP client gets a reset: over IPv6 it learns of it at once",
    fits: |compared| {
        let question = compared.packet.question;
        question.protocol == Protocol::Tcp
            && question.to.is_ipv6()
            && is(&compared.kube_proxy, &End::RefusedLate)
            && is(&compared.kplane, &End::Refused)
    },
}];

/// Whether a fate is this one end.
fn is(fate: &Fate, end: &End) -> bool {
    fate.len() == 1 && fate.contains(end)
}
