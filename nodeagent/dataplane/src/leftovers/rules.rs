//! Decides which chains and jumps of iptables are kube-proxy's, and which of them other programs need ([`TableReader`]).
//! Parses the output of `iptables-save`, and writes the text with which `iptables-restore` removes the rest. This module
//! is pure; it accepts any text.
//!
//! Only two things from the input are ever repeated: names of chains that are exactly kube-proxy's
//! ([`is_kube_proxys`]), and rules that jump from a built-in chain to such a chain, if they consist of plain
//! characters ([`is_plain`]).

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fmt::Write as _;

use crate::backend::iptables::{ChainName, words};

/// The tables in which kube-proxy has chains (C1, D4).
pub(super) const TABLES: [&str; 3] = ["nat", "filter", "mangle"];

/// Chains with a fixed name, in any of the tables: C1, C11, D4, and those of mode userspace (U7).
///
/// kubelet's chains are not in the list: `KUBE-KUBELET-CANARY`, `KUBE-IPTABLES-HINT`, `KUBE-MARK-DROP`, and
/// `KUBE-FIREWALL`. kube-proxy has one rule in the last one (C8), which kubelet writes too. While
/// `route_localnet` is set, that rule protects the node.
const CHAINS: [&str; 18] = [
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-FORWARD",
    "KUBE-IPVS-FILTER",
    "KUBE-IPVS-OUT-FILTER",
    "KUBE-LOAD-BALANCER",
    MARK_MASQ,
    "KUBE-NODE-PORT",
    "KUBE-NODEPORT-CONTAINER",
    "KUBE-NODEPORT-HOST",
    "KUBE-NODEPORT-NON-LOCAL",
    "KUBE-NODEPORTS",
    "KUBE-PORTALS-CONTAINER",
    "KUBE-PORTALS-HOST",
    POSTROUTING,
    "KUBE-PROXY-CANARY",
    "KUBE-PROXY-FIREWALL",
    "KUBE-SERVICES",
    "KUBE-SOURCE-RANGES-FIREWALL",
];
/// Chain that asks for masquerading; rules of container network plugins may jump here.
const MARK_MASQ: &str = "KUBE-MARK-MASQ";
/// Chain that masquerades packets with the mark of [`MARK_MASQ`].
const POSTROUTING: &str = "KUBE-POSTROUTING";

/// Prefixes of chains of one ServicePort or endpoint; [`HASH_BYTES`] characters follow (C2).
const PREFIXES: [&str; 6] = [
    "KUBE-SVC-",
    "KUBE-SVL-",
    "KUBE-EXT-",
    "KUBE-FW-",
    "KUBE-SEP-",
    "KUBE-XLB-",
];
/// Length of the hash in a chain's name.
const HASH_BYTES: usize = 16;

/// Chains that always exist, from which kube-proxy jumps to its own chains.
const BUILT_IN: [&str; 5] = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];

/// kube-proxy's chains and rules in one table. `Jump` names a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LeftoverTable<Jump = String> {
    /// Name of the table.
    pub(super) name: &'static str,
    /// Chains to remove.
    pub(super) chains: BTreeSet<String>,
    /// Rules of built-in chains to remove. In a listing: the text behind `-A`.
    pub(super) jumps: Vec<Jump>,
    /// Chains that stay because rules of other programs need them.
    pub(super) kept: BTreeSet<String>,
    /// Whether a proxy has written its rules, and not only chains.
    pub(super) serves: bool,
}

impl<Jump> LeftoverTable<Jump> {
    /// Returns whether there is nothing to remove.
    pub(super) fn is_empty(&self) -> bool {
        self.chains.is_empty() && self.jumps.is_empty()
    }
}

impl LeftoverTable {
    /// Returns the text with which `iptables-restore --noflush` removes everything or nothing.
    pub(super) fn removal(&self) -> String {
        let mut text = format!("*{}\n", self.name);
        // Naming a chain empties it. Afterwards, no chain refers to another one.
        for chain in &self.chains {
            let _ = writeln!(text, ":{chain} - [0:0]");
        }
        for jump in &self.jumps {
            let _ = writeln!(text, "-D {jump}");
        }
        for chain in &self.chains {
            let _ = writeln!(text, "-X {chain}");
        }
        text.push_str("COMMIT\n");
        text
    }
}

impl<Jump> fmt::Display for LeftoverTable<Jump> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (chains, rules) = (self.chains.len(), self.jumps.len());
        let s = |count| if count == 1 { "" } else { "s" };
        write!(
            f,
            "{chains} chain{} and {rules} jump{} in table {}",
            s(chains),
            s(rules),
            self.name
        )
    }
}

/// Prefix of the chains that kplane's iptables backend has besides kube-proxy's.
const OURS: &str = "KUBE-SVC-D-";

/// Returns whether a chain of a table belongs to kube-proxy or kplane's iptables backend, and to no other
/// program.
pub(super) fn is_kube_proxys(table: &str, chain: &str) -> bool {
    let is_hash = |text: &str| {
        let base32 = |b: u8| b.is_ascii_uppercase() || (b'2'..=b'7').contains(&b);
        text.len() == HASH_BYTES && text.bytes().all(base32)
    };
    let mut prefixes = PREFIXES.into_iter();
    TABLES.contains(&table)
        && (CHAINS.contains(&chain)
            || chain.starts_with(OURS)
            || prefixes.any(|prefix| chain.strip_prefix(prefix).is_some_and(is_hash)))
}

/// A test whether a chain of a table belongs to the serving kplane backend.
pub(super) type Keeps = fn(table: &str, chain: &str) -> bool;

/// Returns false for all chains.
pub(super) const KEEP_NONE: Keeps = |_, _| false;

/// Returns whether the chain is one of mode iptables. Chains of IPVS mode are not (D4).
pub(super) fn of_iptables(_table: &str, chain: &str) -> bool {
    ChainName::parse(chain).is_some()
}

/// Returns whether the chain is one of IPVS mode (D4). Mode iptables has chains of the same names in other
/// tables.
pub(super) fn of_ipvs(table: &str, chain: &str) -> bool {
    let other = (table, chain) == ("filter", ChainName::SERVICES.as_str());
    table != "mangle" && !other && ChainName::parse_ipvs(chain).is_some()
}

/// Returns whether the chain is the one that closes other ports of Services' addresses, which belong to the
/// node in IPVS mode.
pub(super) fn of_closed_ports(table: &str, chain: &str) -> bool {
    (table, chain) == ("filter", ChainName::IPVS_FILTER.as_str())
}

/// Returns whether the chain is one of these two kinds.
pub(super) fn of_iptables_and_closed_ports(table: &str, chain: &str) -> bool {
    of_iptables(table, chain) || of_closed_ports(table, chain)
}

/// Finds kube-proxy's chains and rules in the output of `iptables-save`. Returns an entry for each table that
/// has some, without the chains that `keeps` names.
pub(super) fn parse(text: &str, keeps: Keeps) -> Vec<LeftoverTable> {
    let mut found = Vec::new();
    let mut table: Option<TableReader<String>> = None;
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = TABLES.iter().find(|t| **t == name).map(|t| TableReader::new(t, keeps));
        } else if line == "COMMIT" {
            found.extend(table.take().and_then(TableReader::finish));
        } else if let Some(table) = &mut table {
            table.line(line);
        }
    }
    found
}

/// One table while it is read.
#[derive(Debug)]
pub(super) struct TableReader<Jump> {
    name: &'static str,
    keeps: Keeps,
    /// kube-proxy's chains.
    chains: BTreeSet<String>,
    /// Jumps from built-in chains to kube-proxy's: the target, and the rule.
    jumps: Vec<(String, Jump)>,
    /// Jumps between kube-proxy's chains.
    inner: BTreeMap<String, BTreeSet<String>>,
    /// kube-proxy's chains to which rules of other programs jump.
    needed: BTreeSet<String>,
}

impl TableReader<String> {
    fn line(&mut self, line: &str) {
        if let Some(chain) = line.strip_prefix(':') {
            self.chain(chain.split(' ').next().unwrap_or_default());
        } else if let Some(rule) = line.strip_prefix("-A ") {
            let mut words = words(rule);
            let from = words.next().unwrap_or_default();
            let Some(verb) = words.find(|word| matches!(*word, "-j" | "-g")) else {
                return;
            };
            let to = words.next().unwrap_or_default();
            let jump = (verb == "-j" && is_plain(rule)).then(|| rule.to_owned());
            self.rule(from, to, jump);
        }
    }
}

impl<Jump> TableReader<Jump> {
    pub(super) fn new(name: &'static str, keeps: Keeps) -> Self {
        Self {
            name,
            keeps,
            chains: BTreeSet::new(),
            jumps: Vec::new(),
            inner: BTreeMap::new(),
            needed: BTreeSet::new(),
        }
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    fn is_left(&self, chain: &str) -> bool {
        is_kube_proxys(self.name, chain) && !(self.keeps)(self.name, chain)
    }

    /// Adds a chain.
    pub(super) fn chain(&mut self, name: &str) {
        if self.is_left(name) {
            self.chains.insert(name.to_owned());
        }
    }

    /// Returns whether none of the chains is kube-proxy's.
    pub(super) fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }

    /// Adds a rule that leads from one chain to another. `jump` is `None` if the rule cannot be removed alone.
    pub(super) fn rule(&mut self, from: &str, to: &str, jump: Option<Jump>) {
        if !self.is_left(to) {
            return;
        }
        let target = to.to_owned();
        if self.is_left(from) {
            self.inner.entry(from.to_owned()).or_default().insert(target);
        } else if let Some(jump) = jump
            && BUILT_IN.contains(&from)
        {
            self.jumps.push((target, jump));
        } else {
            self.needed.insert(target);
        }
    }

    /// Keeps the chains that rules of other programs need, and all chains to which they lead.
    pub(super) fn finish(self) -> Option<LeftoverTable<Jump>> {
        let mut kept = BTreeSet::new();
        let mut next: Vec<&str> = self.needed.iter().map(String::as_str).collect();
        while let Some(chain) = next.pop() {
            if kept.insert(chain.to_owned()) {
                next.extend(self.inner.get(chain).into_iter().flatten().map(String::as_str));
                // A mark has no effect without the rule that acts on it.
                next.extend((chain == MARK_MASQ).then_some(POSTROUTING));
            }
        }
        let stays = |to: &str| to == POSTROUTING && kept.contains(to);
        let jumps = self.jumps.into_iter().filter(|(to, _)| !stays(to));
        let table = LeftoverTable {
            name: self.name,
            jumps: jumps.map(|(_, rule)| rule).collect(),
            chains: self.chains.difference(&kept).cloned().collect(),
            kept: self.chains.intersection(&kept).cloned().collect(),
            // In modes iptables and ipvs, this chain stays empty until kube-proxy writes all Services at once, and then
            // leads to the chain of node ports at least.
            serves: self.name == "nat" && self.inner.contains_key(ChainName::SERVICES.as_str()),
        };
        (!table.is_empty() || !table.kept.is_empty()).then_some(table)
    }
}

/// Returns whether chains that stay only masquerade packets that rules of other programs mark, so that they lead no
/// packet to an endpoint.
pub(super) fn only_masquerade(chains: &BTreeSet<String>) -> bool {
    chains.iter().all(|chain| [MARK_MASQ, POSTROUTING].contains(&chain.as_str()))
}

/// Returns the node ports to which rules in the output of `iptables-save` apply. kplane's trees have other
/// chains for node ports; their rules are ignored.
pub(super) fn node_ports(text: &str) -> impl Iterator<Item = u16> {
    text.lines()
        .filter_map(|line| line.strip_prefix("-A KUBE-NODEPORTS "))
        .filter_map(|rule| {
            let mut words = words(rule);
            words.find(|word| *word == "--dport")?;
            words.next()?.parse().ok()
        })
}

/// Returns whether `iptables-restore` reads this text as `iptables-save` meant it, and as exactly one rule:
/// no escapes, no unfinished quotation, nothing unprintable.
fn is_plain(rule: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b" _-,.:;/!+\"".contains(&b);
    rule.bytes().all(plain) && rule.bytes().filter(|b| *b == b'"').count() % 2 == 0
}
