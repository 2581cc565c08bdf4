//! Times at which entries want to be woken. A time that an entry no longer needs fires in vain.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use super::token::Token;

/// The times, the next one on top.
#[derive(Debug, Default)]
pub(super) struct Timers(BinaryHeap<Reverse<(Instant, u64)>>);

impl Timers {
    pub(super) fn add(&mut self, at: Instant, token: Token) {
        self.0.push(Reverse((at, token.into())));
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.0.peek().map(|Reverse((at, _))| *at)
    }

    /// Takes an entry whose time has come.
    pub(super) fn due(&mut self, now: Instant) -> Option<Token> {
        if self.next()? > now {
            return None;
        }
        self.0.pop().map(|Reverse((_, token))| Token::from(token))
    }
}
