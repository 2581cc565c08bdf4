//! Writes the text with which `iptables-restore --noflush` executes a change.

use std::fmt::Write as _;

use super::name::{ChainName, TableName};
use super::ruleset::{JumpOp, TableChange, Written};

/// Limits of the part of a change in one `COMMIT`. The time of the nft flavour grows with the square of the
/// part's size, and each part costs some time too. 31,000 chains with 81,000 rules take 25 s in one part, 4.4
/// s of processor time in parts of 3,000 chains or 6,000 rules, 2.1 s in parts of 300 chains with their
/// rules, and 2.5 s in parts of 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most chains written or deleted in one part.
    pub chains: usize,
    /// Most rules written in one part. A chain with more rules is not divided.
    pub rules: usize,
}

impl Limits {
    /// Limits for the nft flavour.
    pub const NFT: Self = Self {
        chains: 300,
        rules: 1_000,
    };
    /// Limits for the legacy flavour, which replaces whole tables: everything in one part.
    pub const LEGACY: Self = Self {
        chains: usize::MAX,
        rules: usize::MAX,
    };
}

/// Returns the text of a step: one or more blocks `*table .. COMMIT`, to be given in order to one
/// `iptables-restore --noflush`. A step within the limits is one block, all or nothing.
///
/// A bigger step has several blocks. After each block, every packet still finds its way. The order is: chains
/// with their rules, each before the chains that jump to it; then the jumps from built-in chains; last the
/// deletion of everything unneeded.
pub fn parts(step: &TableChange, limits: Limits) -> Vec<String> {
    let chains = step.write.len() + step.delete.len();
    let rules: usize = step.write.iter().map(rules).sum();
    let mut parts = Parts {
        table: step.table,
        done: Vec::new(),
    };
    if chains <= limits.chains && rules <= limits.rules {
        parts.push(|text| {
            let written = step.write.iter().map(|chain| &chain.name);
            declare(written.chain(&step.delete), text);
            fill(&step.write, text);
            jumps(&step.jumps, text);
            delete(&step.delete, text);
        });
        return parts.done;
    }
    for some in groups(&step.write, limits) {
        parts.push(|text| {
            declare(some.iter().map(|chain| &chain.name), text);
            fill(some, text);
        });
    }
    if !step.jumps.is_empty() {
        parts.push(|text| jumps(&step.jumps, text));
    }
    // Chains that are emptied need no order.
    for some in step.delete.chunks(limits.chains) {
        parts.push(|text| declare(some.iter(), text));
    }
    for some in step.delete.chunks(limits.chains) {
        parts.push(|text| delete(some, text));
    }
    parts.done
}

struct Parts {
    table: TableName,
    done: Vec<String>,
}

impl Parts {
    fn push(&mut self, write: impl FnOnce(&mut String)) {
        let mut text = format!("*{}\n", self.table);
        write(&mut text);
        text.push_str("COMMIT\n");
        self.done.push(text);
    }
}

fn rules(chain: &Written) -> usize {
    chain.content.rules() as usize
}

/// Returns chains in groups within the limits. A chain that exceeds the limits is a group of its own.
fn groups(chains: &[Written], limits: Limits) -> Vec<&[Written]> {
    let mut groups = Vec::new();
    let (mut start, mut sum) = (0, 0);
    for (position, chain) in chains.iter().enumerate() {
        let full = position - start >= limits.chains || sum + rules(chain) > limits.rules;
        if full && position > start {
            groups.push(&chains[start..position]);
            (start, sum) = (position, 0);
        }
        sum += rules(chain);
    }
    if start < chains.len() {
        groups.push(&chains[start..]);
    }
    groups
}

fn fill(chains: &[Written], to: &mut String) {
    chains.iter().for_each(|chain| to.push_str(&chain.lines));
}

/// Writes lines that create chains, and empty existing ones. Writing to a string cannot fail.
fn declare<'a>(chains: impl Iterator<Item = &'a ChainName>, to: &mut String) {
    for chain in chains {
        let _ = writeln!(to, ":{chain} - [0:0]");
    }
}

fn jumps(jumps: &[JumpOp], to: &mut String) {
    for JumpOp {
        chain,
        insert,
        rule,
    } in jumps
    {
        let verb = if *insert { "-I" } else { "-D" };
        let _ = writeln!(to, "{verb} {chain}{rule}");
    }
}

fn delete(chains: &[ChainName], to: &mut String) {
    for chain in chains {
        let _ = writeln!(to, "-X {chain}");
    }
}
