//! Ranges of addresses of policies, as a tree.
//!
//! A look-up finds the innermost range with an address, and each range leads to the next one around it, as a class leads to
//! its namespace. A packet tries one range after the other. So what a range costs does not depend on the ranges of other
//! policies, and `except` needs no rule: a rule has the fewest prefixes that cover what its blocks allow.

use std::collections::BTreeMap;
use std::net::IpAddr;

use kplane_model::{Block, Cidr, Family, PolicyRule, ip_bits, ip_from_bits};

/// Addresses from a first to a last one, as numbers.
type Stretch = (u128, u128);

/// A prefix that policies use.
#[derive(Clone, Copy, Debug)]
struct UsedRange {
    number: u32,
    /// Number of users. A prefix that lost the last one stays until the next cut.
    users: u64,
}

/// The prefixes of policies that have a Pod here.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    used: BTreeMap<Cidr, UsedRange>,
    /// Whether `used` has other prefixes than at the last cut.
    is_stale: bool,
    tree: Tree,
}

/// A range with the number of the innermost prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Range {
    pub(super) first: IpAddr,
    pub(super) last: IpAddr,
    pub(super) number: u32,
}

/// Prefixes, cut where they begin and end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tree {
    /// The ranges in order.
    pub(super) ranges: Vec<Range>,
    /// The number of a prefix, and that of the next one around it; sorted.
    pub(super) parents: Vec<(u32, u32)>,
}

impl Blocks {
    /// Counts users of a prefix. Returns the prefix's number.
    pub(super) fn acquire(&mut self, prefix: Cidr, users: u64, fresh: impl FnOnce() -> u32) -> u32 {
        let stale = &mut self.is_stale;
        let used = self.used.entry(prefix).or_insert_with(|| {
            *stale = true;
            UsedRange {
                number: fresh(),
                users: 0,
            }
        });
        used.users += users;
        used.number
    }

    /// Takes users of a prefix back. Returns the prefix's number.
    pub(super) fn release(&mut self, prefix: Cidr, users: u64) -> Option<u32> {
        let used = self.used.get_mut(&prefix)?;
        used.users -= users;
        self.is_stale |= used.users == 0;
        Some(used.number)
    }

    /// Returns the number of the innermost prefix with an address.
    pub(super) fn find(&self, ip: IpAddr) -> Option<u32> {
        let ranges = &self.tree.ranges;
        let at = ranges.partition_point(|range| range.last < ip);
        let range = ranges.get(at).filter(|range| range.first <= ip);
        range.map(|range| range.number)
    }

    /// Cuts anew, if prefixes have come or gone. Returns the tree before, and the new one.
    pub(super) fn recut(&mut self) -> Option<(Tree, &Tree)> {
        if !std::mem::take(&mut self.is_stale) {
            return None;
        }
        self.used.retain(|_, used| used.users > 0);
        let new = tree(self.used.iter().map(|(prefix, used)| (*prefix, used.number)));
        let old = std::mem::replace(&mut self.tree, new);
        Some((old, &self.tree))
    }

    /// Returns all prefixes with their numbers.
    #[cfg(test)]
    pub(super) fn all(&self) -> impl Iterator<Item = (Cidr, u32)> {
        let used = self.used.iter();
        used.map(|(prefix, used)| (*prefix, used.number))
    }
}

/// A prefix whose end has not come yet.
struct Open {
    prefix: Cidr,
    number: u32,
    /// The first address that no range has yet; `None` = behind the last address of all.
    next: Option<u128>,
}

/// Makes a tree of prefixes, which come in the order of their first addresses, wider ones first.
fn tree(prefixes: impl Iterator<Item = (Cidr, u32)>) -> Tree {
    let mut tree = Tree::default();
    let mut open: Vec<Open> = Vec::new();
    for (prefix, number) in prefixes {
        while let Some(ended) = open.pop_if(|top| !top.prefix.covers(prefix)) {
            close(&mut tree, &mut open, &ended);
        }
        let first = ip_bits(prefix.first());
        if let Some(around) = open.last_mut() {
            if let Some(before) = first.checked_sub(1) {
                tree.push(around, before);
            }
            tree.parents.push((number, around.number));
        }
        let next = Some(first);
        open.push(Open {
            prefix,
            number,
            next,
        });
    }
    while let Some(top) = open.pop() {
        close(&mut tree, &mut open, &top);
    }
    tree.parents.sort_unstable();
    tree
}

/// Ends a prefix: the one around it goes on behind it.
fn close(tree: &mut Tree, open: &mut [Open], top: &Open) {
    let last = ip_bits(top.prefix.last());
    tree.push(top, last);
    if let Some(around) = open.last_mut() {
        around.next = last.checked_add(1);
    }
}

impl Tree {
    /// Adds the rest of a prefix up to an address, if there is any.
    fn push(&mut self, of: &Open, last: u128) {
        if let Some(first) = of.next.filter(|first| *first <= last) {
            let [first, last] = [first, last].map(|bits| ip_from_bits(of.prefix.family(), bits));
            let number = of.number;
            self.ranges.push(Range {
                first,
                last,
                number,
            });
        }
    }
}

/// The addresses that a rule's blocks of a family allow, without overlaps.
#[derive(Debug)]
pub(super) struct Stretches {
    family: Family,
    stretches: Vec<Stretch>,
}

impl Stretches {
    /// Returns what the blocks of a rule allow together. Work: n log n of the blocks and their exceptions.
    pub(super) fn of(rule: &PolicyRule, family: Family) -> Self {
        let blocks = rule
            .peers
            .iter()
            .flat_map(|peers| &peers.blocks)
            .filter(|block| block.range.family() == family);
        let mut all: Vec<Stretch> = blocks.flat_map(allowed).collect();
        all.sort_unstable();
        let mut stretches: Vec<Stretch> = Vec::with_capacity(all.len());
        for (first, last) in all {
            match stretches.last_mut() {
                Some(before) if before.1.checked_add(1).is_none_or(|next| first <= next) => {
                    before.1 = before.1.max(last);
                }
                _ => stretches.push((first, last)),
            }
        }
        Self { family, stretches }
    }

    /// Returns the fewest prefixes that cover the addresses.
    pub(super) fn prefixes(&self) -> impl Iterator<Item = Cidr> {
        self.stretches.iter().flat_map(|stretch| prefixes(*stretch, self.family))
    }
}

/// Returns the prefixes that a stretch consists of: at each address the largest one that begins there and fits.
fn prefixes((first, last): Stretch, family: Family) -> impl Iterator<Item = Cidr> {
    let width: u32 = family.pick(32, 128);
    let mut next = Some(first);
    std::iter::from_fn(move || {
        let first = next.filter(|first| *first <= last)?;
        let aligned = first.trailing_zeros().min(width);
        // Only the stretch of all 128 bits has too many addresses to count.
        let fitting = (last - first).checked_add(1).map_or(128, u128::ilog2);
        let host = aligned.min(fitting);
        let size = 1_u128.checked_shl(host);
        next = size.and_then(|size| first.checked_add(size));
        let prefix_len = u8::try_from(width - host).ok()?;
        Cidr::new(ip_from_bits(family, first), prefix_len)
    })
}

/// Returns the parts of a block's range that are not excepted, as first and last address.
fn allowed(block: &Block) -> Vec<Stretch> {
    let (mut next, end) = (
        Some(ip_bits(block.range.first())),
        ip_bits(block.range.last()),
    );
    let mut except: Vec<_> = block.except.iter().filter(|e| block.range.covers(**e)).collect();
    except.sort_unstable();
    let mut parts = Vec::new();
    for hole in except {
        let (first, last) = (ip_bits(hole.first()), ip_bits(hole.last()));
        let Some(from) = next else { break };
        if from < first {
            parts.push((from, first - 1));
        }
        next = last.checked_add(1).map(|behind| behind.max(from));
    }
    if let Some(from) = next.filter(|from| *from <= end) {
        parts.push((from, end));
    }
    parts
}

#[cfg(test)]
mod tests {
    use kplane_model::Peers;

    use super::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    fn rule(blocks: &[(&str, &[&str])]) -> PolicyRule {
        let blocks = blocks.iter().map(|(range, except)| Block {
            range: cidr(range),
            except: except.iter().map(|text| cidr(text)).collect(),
        });
        let peers = Some(Peers {
            groups: Vec::new(),
            blocks: blocks.collect(),
        });
        PolicyRule { peers, ports: None }
    }

    fn prefixes(blocks: &[(&str, &[&str])], family: Family) -> Vec<String> {
        let stretches = Stretches::of(&rule(blocks), family);
        stretches.prefixes().map(|p| p.to_string()).collect()
    }

    #[test]
    fn a_rule_has_the_fewest_prefixes_that_cover_its_blocks() {
        let v4 = |blocks: &[(&str, &[&str])]| prefixes(blocks, Family::V4);
        assert_eq!(v4(&[("10.0.0.0/8", &[])]), ["10.0.0.0/8"]);
        assert_eq!(
            v4(&[("10.0.0.0/30", &["10.0.0.1/32"])]),
            ["10.0.0.0/32", "10.0.0.2/31"]
        );
        // Blocks of one rule add up, and what one excepts another may allow.
        assert_eq!(
            v4(&[
                ("0.0.0.0/0", &["10.0.0.0/8"]),
                ("0.0.0.0/0", &["192.168.0.0/16"])
            ]),
            ["0.0.0.0/0"]
        );
        assert_eq!(
            v4(&[("10.0.0.0/9", &[]), ("10.128.0.0/9", &[])]),
            ["10.0.0.0/8"]
        );
        assert_eq!(v4(&[("fd00::/8", &[])]), [""; 0]);
        let v6 = prefixes(&[("::/0", &[])], Family::V6);
        assert_eq!(v6, ["::/0"]);
        let halves = prefixes(&[("::/0", &["8000::/1"])], Family::V6);
        assert_eq!(halves, ["::/1"]);
        assert_eq!(prefixes(&[("::/0", &["::/128"])], Family::V6).len(), 128);
        assert_eq!(v4(&[("10.0.0.0/8", &["10.0.0.0/8"])]), [""; 0]);
    }

    #[test]
    fn a_range_leads_to_the_next_one_around_it() {
        let mut blocks = Blocks::default();
        let texts = [
            "0.0.0.0/0",
            "10.0.0.0/8",
            "10.0.0.0/30",
            "255.255.255.255/32",
        ];
        for (prefix, number) in texts.iter().zip(1..) {
            assert_eq!(blocks.acquire(cidr(prefix), 1, || number), number);
        }
        let (_, tree) = blocks.recut().unwrap();
        assert_eq!(tree.parents, [(2, 1), (3, 2), (4, 1)]);
        let ranges = tree.ranges.iter().map(|r| format!("{}-{} {}", r.first, r.last, r.number));
        assert_eq!(
            ranges.collect::<Vec<_>>(),
            [
                "0.0.0.0-9.255.255.255 1",
                "10.0.0.0-10.0.0.3 3",
                "10.0.0.4-10.255.255.255 2",
                "11.0.0.0-255.255.255.254 1",
                "255.255.255.255-255.255.255.255 4",
            ]
        );
        assert_eq!(blocks.find("10.0.0.2".parse().unwrap()), Some(3));
        assert!(blocks.recut().is_none());
        // A prefix keeps its number as long as it has users, also if it goes and comes back at once.
        blocks.release(cidr("10.0.0.0/8"), 1);
        assert_eq!(blocks.acquire(cidr("10.0.0.0/8"), 1, || 9), 2);
        blocks.recut();
        blocks.release(cidr("10.0.0.0/8"), 1);
        let (_, tree) = blocks.recut().unwrap();
        assert_eq!(tree.parents, [(3, 1), (4, 1)]);
        assert_eq!(blocks.acquire(cidr("10.0.0.0/8"), 1, || 9), 9);
    }
}
