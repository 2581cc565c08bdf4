//! The flows of each Service and namespace, so that an owner that has its share ends flows of its own.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

use crate::worker::token::Token;

/// Tokens that may be stale, beside as many as there are flows.
const SLACK: usize = 16;

/// The flows of one thread by owner, each in the order in which they were checked last.
pub(super) struct Queues<K>(HashMap<K, Queue>);

impl<K> Default for Queues<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

#[derive(Default)]
struct Queue {
    /// Some may have ended.
    tokens: VecDeque<Token>,
    open: usize,
}

impl<K: Hash + Eq> Queues<K> {
    /// Adds a flow.
    pub(super) fn add(&mut self, owner: K, token: Token, is_open: impl Fn(&Token) -> bool) {
        let queue = self.0.entry(owner).or_default();
        queue.open += 1;
        if queue.tokens.len() > 2 * queue.open + SLACK {
            queue.tokens.retain(is_open);
        }
        queue.tokens.push_back(token);
    }

    /// Counts the end of a flow.
    pub(super) fn ended(&mut self, owner: &K) {
        if let Some(queue) = self.0.get_mut(owner) {
            queue.open = queue.open.saturating_sub(1);
            if queue.open == 0 {
                self.0.remove(owner);
            }
        }
    }

    /// Returns open flows of an owner: those that were not returned for longest.
    pub(super) fn some_of(
        &mut self,
        owner: &K,
        most: usize,
        is_open: impl Fn(&Token) -> bool,
    ) -> Vec<Token> {
        let Some(queue) = self.0.get_mut(owner) else {
            return Vec::new();
        };
        let mut some = Vec::with_capacity(most);
        while some.len() < most.min(queue.open)
            && let Some(token) = queue.tokens.pop_front()
        {
            some.extend(is_open(&token).then_some(token));
        }
        queue.tokens.extend(&some);
        some
    }
}

#[cfg(test)]
mod tests {
    use kplane_model::ServiceName;

    use super::*;

    #[test]
    fn services_take_turns_over_their_own_flows_and_forget_those_that_ended() {
        let (web, dns) = (
            ServiceName::new("shop", "web"),
            ServiceName::new("shop", "dns"),
        );
        let token = |place| Token::flow(place, 1);
        let mut queues = Queues::default();
        for place in 0..4 {
            queues.add(web.clone(), token(place), |_| true);
        }
        queues.add(dns.clone(), token(9), |_| true);
        let mut some = |service, most| queues.some_of(service, most, |open| *open != token(1));
        assert_eq!(some(&web, 2), [0, 2].map(token));
        assert_eq!(some(&web, 2), [3, 0].map(token));
        assert_eq!(some(&dns, 2), [token(9)]);
        for place in 10..100 {
            queues.ended(&dns);
            queues.add(dns.clone(), token(place), |open| *open == token(place));
        }
        assert!(queues.0[&dns].tokens.len() <= 2 + SLACK + 1);
        queues.ended(&dns);
        assert_eq!(queues.some_of(&dns, 2, |_| true), []);
    }
}
