//! Compares what both proxies do, and knows which differences are meant.

use crate::conformance::expected::{DIFFERENCES, Difference};
use crate::conformance::proxy::Mode;
use crate::conformance::scenario::Step;
use kplane_tests::support::fate::{Ends, Packet, reported};

/// One packet with both fates.
pub(crate) struct Compared<'a> {
    pub(crate) mode: Mode,
    pub(crate) step: &'a Step,
    pub(crate) packet: Packet,
    pub(crate) kube_proxy: Ends,
    pub(crate) kplane: Ends,
}

/// What a comparison says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Equal,
    /// Which of [`DIFFERENCES`].
    Expected(usize),
    Unexpected,
}

impl Compared<'_> {
    pub(crate) fn verdict(&self) -> Verdict {
        if self.packet.same(&self.kube_proxy, &self.kplane) {
            return Verdict::Equal;
        }
        let fits = |difference: &Difference| difference.is_of(self.mode) && difference.fits(self);
        match DIFFERENCES.iter().position(fits) {
            Some(index) => Verdict::Expected(index),
            None => Verdict::Unexpected,
        }
    }

    pub(crate) fn tell(&self, round: &str) -> String {
        format!(
            "* {round}: {}\n  {}\n  kube-proxy: {}\n  kplane:     {}\n  {}\n  only this: {}={:?} cargo test \
             -p kplane-tests --test it -- conformance {}",
            self.step.name,
            self.packet,
            reported(&self.kube_proxy),
            reported(&self.kplane),
            self.step.words,
            crate::conformance::run::ONLY_VAR,
            self.step.name.split(", step").next().unwrap_or_default(),
            self.mode.name(),
        )
    }
}
