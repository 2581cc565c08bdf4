//! Random numbers that are the same for the same seed.

use std::time::Duration;

/// A generator (SplitMix64).
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below a limit.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.number() % limit.max(1)
    }

    /// Returns a small number below a limit.
    pub(crate) fn small(&mut self, limit: u8) -> u8 {
        u8::try_from(self.below(limit.into())).unwrap_or(0)
    }

    pub(crate) fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// Returns a time of at most so many milliseconds, and more than none.
    pub(crate) fn time(&mut self, most_ms: u64) -> Duration {
        Duration::from_micros(1 + self.below(most_ms * 1_000))
    }
}
