//! Addresses that are no peer's any more: their connections may still be in the kernel when another Pod gets them.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use super::held::{ElementChange, Value};
use crate::backend::nftables::{Key, PolicySet};

/// Most addresses that are remembered. When there are more, the connections of all of them are searched.
const MOST: usize = 16_384;

/// The addresses, with the classes that they had.
#[derive(Debug, Default)]
pub(super) struct Departed(HashMap<IpAddr, Value>);

impl Departed {
    /// Follows a change. Returns addresses whose connections may be those of a Pod before.
    pub(super) fn follow(&mut self, changes: &[ElementChange]) -> HashSet<IpAddr> {
        let mut returned = HashSet::new();
        for change in changes {
            let (PolicySet::Peers, Key::Ip(ip)) = change.place else {
                continue;
            };
            match (change.before, change.after) {
                (Some(class), None) => drop(self.0.insert(ip, class)),
                (None, Some(class)) if self.0.remove(&ip).is_some_and(|then| then != class) => {
                    returned.insert(ip);
                }
                _ => {}
            }
        }
        if self.0.len() > MOST {
            returned.extend(self.0.drain().map(|(ip, _)| ip));
        }
        returned
    }

    /// Forgets all addresses.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: u32) -> IpAddr {
        IpAddr::from(number.to_be_bytes())
    }

    fn change(number: u32, before: Option<u32>, after: Option<u32>) -> ElementChange {
        ElementChange {
            place: (PolicySet::Peers, Key::Ip(address(number))),
            before: before.map(Some),
            after: after.map(Some),
        }
    }

    #[test]
    fn an_address_that_returns_in_another_class_is_searched() {
        let mut departed = Departed::default();
        let cases = [
            (change(1, Some(7), None), false, "it goes"),
            (change(2, Some(7), None), false, "it goes"),
            (change(3, None, Some(7)), false, "it was nobody's"),
            (change(1, None, Some(8)), true, "another class"),
            (change(2, None, Some(7)), false, "the same class"),
        ];
        for (change, searched, why) in cases {
            assert_eq!(!departed.follow(&[change]).is_empty(), searched, "{why}");
        }
    }

    #[test]
    fn nothing_is_forgotten_without_a_search() {
        let mut departed = Departed::default();
        let most = u32::try_from(MOST).unwrap();
        let all: Vec<_> = (0..=most).map(|n| change(n, Some(1), None)).collect();
        assert!(departed.follow(&all[1..]).is_empty());
        assert_eq!(departed.follow(&all[..1]).len(), MOST + 1);
        assert!(departed.0.is_empty());
    }
}
