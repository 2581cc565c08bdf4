//! The text that makes `iptables-restore --noflush` carry a change out.

use std::fmt::Write as _;

use super::name::{ChainName, TableName};
use super::ruleset::{JumpOp, Step, Written};

/// How much of a change goes into one `COMMIT`. With the nft flavour the kernel takes quadratic
/// time for what is in one: 70,000 rules take 25 s at once and 2.4 s in parts (kernel.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Chains made or deleted in one.
    pub chains: usize,
    /// Rules written in one; a chain that has more is not divided.
    pub rules: usize,
}

impl Limits {
    /// For the nft flavour.
    pub const NFT: Self = Self {
        chains: 3_000,
        rules: 6_000,
    };
    /// For the legacy flavour, which replaces whole tables: everything at once.
    pub const LEGACY: Self = Self {
        chains: usize::MAX,
        rules: usize::MAX,
    };
}

/// The text of a step: one or more `*table .. COMMIT`, to be given to one `iptables-restore
/// --noflush` in order. A step within the limits is one of them: all or nothing.
///
/// A bigger one comes in parts, each of which leaves every packet its way: chains to which nothing
/// jumps yet, then their rules, then the chains that lead there, and last what nothing needs any
/// more.
#[must_use]
pub fn parts(step: &Step, limits: Limits) -> Vec<String> {
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
            step.write
                .iter()
                .for_each(|chain| text.push_str(&chain.lines));
            jumps(&step.jumps, text);
            delete(&step.delete, text);
        });
        return parts.done;
    }
    let (new, changed): (Vec<&Written>, Vec<&Written>) =
        step.write.iter().partition(|chain| chain.new);
    for some in new.chunks(limits.chains) {
        parts.push(|text| declare(some.iter().map(|chain| &chain.name), text));
    }
    for some in by_rules(&new, limits.rules) {
        parts.push(|text| some.iter().for_each(|chain| text.push_str(&chain.lines)));
    }
    // What is emptied must be filled at once.
    for some in by_rules(&changed, limits.rules) {
        parts.push(|text| {
            declare(some.iter().map(|chain| &chain.name), text);
            some.iter().for_each(|chain| text.push_str(&chain.lines));
        });
    }
    if !step.jumps.is_empty() {
        parts.push(|text| jumps(&step.jumps, text));
    }
    // Chains that are emptied need no order among them.
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
    fn push(&mut self, fill: impl FnOnce(&mut String)) {
        let mut text = format!("*{}\n", self.table);
        fill(&mut text);
        text.push_str("COMMIT\n");
        self.done.push(text);
    }
}

fn rules(chain: &Written) -> usize {
    chain.content.rules() as usize
}

/// Chains in groups of no more than `limit` rules, if none has more.
fn by_rules<'a, 'b>(chains: &'a [&'b Written], limit: usize) -> Vec<&'a [&'b Written]> {
    let mut groups = Vec::new();
    let (mut start, mut sum) = (0, 0);
    for (position, chain) in chains.iter().enumerate() {
        let count = rules(chain);
        if sum + count > limit && position > start {
            groups.push(&chains[start..position]);
            (start, sum) = (position, 0);
        }
        sum += count;
    }
    if start < chains.len() {
        groups.push(&chains[start..]);
    }
    groups
}

/// Makes chains, and empties those that are there. Writing to a string cannot fail.
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
