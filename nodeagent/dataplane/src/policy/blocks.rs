//! Ranges of addresses of policies, cut at all of their borders: a look-up finds one range at most, and its number stands
//! for the blocks that cover it. So `except` needs no rule.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use kplane_model::{Block, Family, ip_bits, ip_from_bits};

/// The blocks of policies that have a Pod here.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// How many policies have a block.
    used: BTreeMap<Block, usize>,
    /// Whether `used` has changed since the last cut.
    is_stale: bool,
    /// The numbers of the ranges that a block covers, as of the last cut.
    numbers: HashMap<Block, Vec<u32>>,
    /// The number of each combination of blocks.
    combinations: HashMap<Vec<Block>, u32>,
    /// The ranges with their numbers, in order.
    ranges: Vec<Range>,
}

/// A range with the number of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) first: IpAddr,
    pub(super) last: IpAddr,
    pub(super) number: u32,
}

/// What a new cut changes.
#[derive(Debug, Default)]
pub(super) struct Recut {
    pub(super) ranges: (Vec<Range>, Vec<Range>),
    /// Blocks with other numbers than before: those that are gone, and those that are new.
    pub(super) blocks: Vec<(Block, Vec<u32>, Vec<u32>)>,
}

impl Blocks {
    /// Records that a policy has, or no longer has, a block.
    pub(super) fn count(&mut self, block: &Block, there: bool) {
        let count = self.used.entry(block.clone()).or_default();
        match there {
            true => *count += 1,
            false => *count -= 1,
        }
        // Only the first and the last use change the cut.
        self.is_stale |= *count == usize::from(there);
        if *count == 0 {
            self.used.remove(block);
        }
    }

    /// Returns the numbers of the ranges that a block covers.
    pub(super) fn numbers(&self, block: &Block) -> &[u32] {
        self.numbers.get(block).map_or(&[], Vec::as_slice)
    }

    /// Returns the number of the range with an address.
    pub(super) fn find(&self, ip: IpAddr) -> Option<u32> {
        let at = self.ranges.partition_point(|range| range.last < ip);
        let range = self.ranges.get(at).filter(|range| range.first <= ip);
        range.map(|range| range.number)
    }

    /// Cuts anew, if blocks have come or gone.
    pub(super) fn recut(&mut self, family: Family, mut fresh: impl FnMut() -> u32) -> Recut {
        if !std::mem::take(&mut self.is_stale) {
            return Recut::default();
        }
        let mut combinations = HashMap::new();
        let mut numbers: HashMap<Block, Vec<u32>> = HashMap::new();
        let mut ranges = Vec::new();
        for (first, last, blocks) in pieces(self.used.keys()) {
            let blocks: Vec<Block> = blocks.into_iter().cloned().collect();
            let number = match combinations.get(&blocks) {
                Some(number) => *number,
                None => {
                    let before = self.combinations.get(&blocks);
                    let number = before.copied().unwrap_or_else(&mut fresh);
                    for block in &blocks {
                        numbers.entry(block.clone()).or_default().push(number);
                    }
                    combinations.insert(blocks, number);
                    number
                }
            };
            let [first, last] = [first, last].map(|bits| ip_from_bits(family, bits));
            ranges.push(Range {
                first,
                last,
                number,
            });
        }
        let old = std::mem::replace(&mut self.numbers, numbers);
        self.combinations = combinations;
        let known: BTreeSet<&Block> = old.keys().chain(self.numbers.keys()).collect();
        let blocks = known.into_iter().filter_map(|block| {
            let old = old.get(block).map_or(&[][..], Vec::as_slice);
            let new = self.numbers(block);
            let only = |these: &[u32], those: &[u32]| {
                let these = these.iter().copied();
                these.filter(|number| !those.contains(number)).collect()
            };
            let (gone, come): (Vec<u32>, Vec<u32>) = (only(old, new), only(new, old));
            (gone.len() + come.len() > 0).then(|| (block.clone(), gone, come))
        });
        let blocks = blocks.collect();
        let before = std::mem::replace(&mut self.ranges, ranges);
        Recut {
            ranges: (before, self.ranges.clone()),
            blocks,
        }
    }

    /// Returns the blocks of each number.
    #[cfg(test)]
    pub(super) fn all(&self) -> impl Iterator<Item = (&Vec<Block>, u32)> {
        self.combinations
            .iter()
            .map(|(blocks, number)| (blocks, *number))
    }
}

/// Returns the parts of a block's range that are not excepted, as first and last address.
fn allowed(block: &Block) -> Vec<(u128, u128)> {
    let (mut next, end) = (
        Some(ip_bits(block.range.first())),
        ip_bits(block.range.last()),
    );
    let mut except: Vec<_> = block
        .except
        .iter()
        .filter(|e| block.range.covers(**e))
        .collect();
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

/// Cuts blocks at all borders: ranges that do not overlap, with the blocks that cover them.
fn pieces<'a>(blocks: impl Iterator<Item = &'a Block>) -> Vec<(u128, u128, BTreeSet<&'a Block>)> {
    // At each border, blocks begin (true) or have ended.
    let mut borders: BTreeMap<u128, Vec<(bool, &Block)>> = BTreeMap::new();
    for block in blocks {
        for (first, last) in allowed(block) {
            borders.entry(first).or_default().push((true, block));
            // The last address of all has none behind it.
            if let Some(behind) = last.checked_add(1) {
                borders.entry(behind).or_default().push((false, block));
            }
        }
    }
    let mut pieces = Vec::new();
    let mut open: BTreeSet<&Block> = BTreeSet::new();
    let mut borders = borders.into_iter().peekable();
    while let Some((first, events)) = borders.next() {
        // A block's next part may begin where another one ended, but not its own.
        for (begins, block) in events {
            match begins {
                true => open.insert(block),
                false => open.remove(block),
            };
        }
        let last = borders.peek().map_or(u128::MAX, |(next, _)| next - 1);
        if !open.is_empty() {
            pieces.push((first, last, open.clone()));
        }
    }
    pieces
}
