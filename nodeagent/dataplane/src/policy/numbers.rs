//! Numbers by which the kernel knows classes, namespaces, all Pods, and ranges of addresses.

use std::collections::HashMap;

use kplane_model::PeerId;

use crate::backend::nftables::{Data, Element, Key};

/// Numbers that this process has given. A number never means something else later, so a packet between two look-ups
/// cannot take one thing for another. 0 is anybody.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    of: HashMap<PeerId, u32>,
    last: u32,
}

impl Numbers {
    /// Returns a number that nothing has.
    pub(super) fn fresh(&mut self) -> u32 {
        // 4 billion numbers last for years of changes.
        self.last = self.last.checked_add(1).unwrap_or(1);
        self.last
    }

    /// Gives only numbers above this one from now on.
    pub(super) fn begin_above(&mut self, number: u32) {
        self.last = self.last.max(number);
    }

    /// Returns the number of a peer, which it gets if it has none.
    pub(super) fn give(&mut self, id: PeerId) -> u32 {
        match self.of.get(&id) {
            Some(number) => *number,
            None => {
                let number = self.fresh();
                self.of.insert(id, number);
                number
            }
        }
    }

    /// Returns the number of a peer; `None` if no object names it.
    pub(super) fn get(&self, id: PeerId) -> Option<u32> {
        self.of.get(&id).copied()
    }

    /// Returns how many peers have numbers.
    pub(super) fn len(&self) -> usize {
        self.of.len()
    }

    /// Forgets the numbers of all other peers.
    pub(super) fn keep(&mut self, is_used: impl Fn(PeerId) -> bool) {
        self.of.retain(|id, _| is_used(*id));
    }

    /// Returns all peers with their numbers.
    #[cfg(test)]
    pub(super) fn all(&self) -> impl Iterator<Item = (PeerId, u32)> {
        self.of.iter().map(|(id, number)| (*id, *number))
    }
}

/// Returns the highest number in the elements of a table, in keys and in data; 0 if there is none.
pub(super) fn highest<'a>(elements: impl IntoIterator<Item = &'a Element>) -> u32 {
    let in_key = |key| match key {
        Key::Grant(_, n) | Key::GrantPort(_, n, ..) | Key::GrantPorts(_, n, ..) => n,
        // A class without an address is a key alone.
        Key::Number(n) | Key::Row(n, ..) => n,
        _ => 0,
    };
    let in_data = |data| match data {
        Some(Data::Number(n)) => n,
        _ => 0,
    };
    elements
        .into_iter()
        .map(|element| in_key(element.key).max(in_data(element.data)))
        .max()
        .unwrap_or_default()
}
