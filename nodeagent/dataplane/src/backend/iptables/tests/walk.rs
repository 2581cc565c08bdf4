//! A kernel in miniature: accepts the texts for `iptables-restore --noflush`, holds rules as text, and sends
//! packets through them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use kplane_model::{Cidr, Protocol};

use crate::backend::iptables::{BuiltIn, ChainName, FoundRules, TableName};

/// Tables with their chains and rules (`-A NAME ..`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Kernel {
    pub(super) tables: BTreeMap<TableName, BTreeMap<String, Vec<String>>>,
}

/// A packet, with the fields that rules test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) source: IpAddr,
    pub(super) to: IpAddr,
    pub(super) protocol: Protocol,
    pub(super) port: u16,
    /// The destination is one of the node's addresses.
    pub(super) to_node: bool,
    /// The source is one of the node's addresses.
    pub(super) from_node: bool,
}

/// An end of a packet's way, and what happened to the packet before.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct End {
    /// Marked for masquerading.
    pub(super) marked: bool,
    /// The verdict of a terminating target, in its words; empty if none.
    pub(super) verdict: String,
}

impl Kernel {
    /// Executes one text. Panics where `iptables-restore` would refuse it.
    pub(super) fn restore(&mut self, text: &str) {
        let mut new = self.clone();
        let mut chains = None;
        for line in text.lines() {
            if let Some(table) = line.strip_prefix('*') {
                let table = TableName::parse(table).unwrap();
                let built_in = BuiltIn::ALL.map(|chain| chain.to_string());
                let chains_of = new.tables.entry(table).or_default();
                for chain in built_in {
                    chains_of.entry(chain).or_default();
                }
                chains = Some(table);
                continue;
            }
            let table = new.tables.get_mut(&chains.expect("a table first")).unwrap();
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["COMMIT"] => {}
                [declared, "-", "[0:0]"] => {
                    let name = declared.strip_prefix(':').unwrap();
                    assert!(ChainName::parse(name).is_some(), "{line}");
                    table.insert(name.to_owned(), Vec::new());
                }
                ["-A", chain, ..] => table.get_mut(chain).expect(line).push(line.to_owned()),
                ["-I", chain, ..] => {
                    let rule = line.replacen("-I", "-A", 1);
                    table.get_mut(chain).unwrap().insert(0, rule);
                }
                ["-D", chain, ..] => {
                    let rule = line.replacen("-D", "-A", 1);
                    let rules = table.get_mut(chain).unwrap();
                    let position = rules.iter().position(|r| *r == rule).expect(line);
                    rules.remove(position);
                }
                ["-X", chain] => {
                    let rules = table.remove(chain).expect(line);
                    assert!(rules.is_empty(), "{line}: not empty");
                }
                _ => panic!("{line}"),
            }
        }
        assert!(text.ends_with("COMMIT\n"));
        new.check();
        *self = new;
    }

    /// Checks that every jump has a target.
    fn check(&self) {
        for chains in self.tables.values() {
            for rule in chains.values().flatten() {
                let to = target(rule).1;
                if to.starts_with("KUBE-") {
                    assert!(chains.contains_key(to), "{rule}: no such chain");
                }
            }
        }
    }

    /// Returns the objects that a readback finds.
    pub(super) fn found(&self) -> FoundRules {
        let mut found = FoundRules::default();
        for (table, chains) in &self.tables {
            for (name, rules) in chains {
                if let Some(name) = ChainName::parse(name) {
                    found.chain(*table, name);
                    rules.iter().for_each(|rule| found.rule(*table, name, rule));
                } else {
                    rules.iter().for_each(|rule| found.jump(*table, rule));
                }
            }
        }
        found
    }

    /// Returns the rules of a chain.
    pub(super) fn rules(&self, table: TableName, chain: &str) -> &[String] {
        let chains = self.tables.get(&table);
        chains.and_then(|chains| chains.get(chain)).map_or(&[], Vec::as_slice)
    }

    /// Returns all ends that a packet may reach in a table, starting at a chain, for every random choice; and
    /// the most rules that were evaluated.
    pub(super) fn play(
        &self,
        table: TableName,
        chain: &str,
        packet: Packet,
    ) -> (BTreeSet<End>, usize) {
        let mut walk = Walk {
            chains: &self.tables[&table],
            packet,
            ends: BTreeSet::new(),
        };
        let mut looked = 0;
        let open = walk.chain(chain, BTreeSet::from([false]), &mut looked);
        let verdict = String::new;
        walk.ends.extend(open.into_iter().map(|marked| End {
            marked,
            verdict: verdict(),
        }));
        (walk.ends, looked)
    }
}

struct Walk<'a> {
    chains: &'a BTreeMap<String, Vec<String>>,
    packet: Packet,
    ends: BTreeSet<End>,
}

impl Walk<'_> {
    /// Walks a chain with each of these marks. Returns the marks with which the packet may return.
    fn chain(&mut self, name: &str, marks: BTreeSet<bool>, looked: &mut usize) -> BTreeSet<bool> {
        let mut open = marks;
        let rules = &self.chains[name];
        let mut back = BTreeSet::new();
        for rule in rules {
            if open.is_empty() {
                break;
            }
            *looked += 1;
            let Some(chance) = self.matches(rule) else {
                continue;
            };
            let before = open.clone();
            let (verb, to) = target(rule);
            match to {
                "" => {}
                "RETURN" => {
                    back.extend(open.iter().copied());
                    open.clear();
                }
                "MARK" => open = BTreeSet::from([true]),
                _ if self.chains.contains_key(to) => open = self.chain(to, open, looked),
                _ => {
                    self.ends.extend(open.iter().map(|marked| End {
                        marked: *marked,
                        verdict: verb.to_owned(),
                    }));
                    open.clear();
                }
            }
            if chance {
                open.extend(before);
            }
        }
        open.extend(back);
        open
    }

    /// Returns `None` if a rule does not apply, `Some(true)` if it may apply, and `Some(false)` if it certainly
    /// applies.
    fn matches(&self, rule: &str) -> Option<bool> {
        let packet = self.packet;
        // Most rules are for another address, so they need no further evaluation.
        let to = rule.split(" -d ").nth(1).and_then(|rest| rest.split(' ').next());
        if to.is_some_and(|range| !rule.contains("! -d") && !inside(range, packet.to)) {
            return None;
        }
        let words: Vec<&str> = split(rule);
        let mut words = words.iter().copied().skip(2);
        let (mut chance, mut negated) = (false, false);
        while let Some(word) = words.next() {
            let mut next = || words.next().unwrap();
            let holds = match word {
                "!" => {
                    negated = true;
                    continue;
                }
                "-s" => inside(next(), packet.source),
                "-d" => inside(next(), packet.to),
                "-p" => next() == packet.protocol.as_str().to_lowercase(),
                "--dport" => {
                    let range = next();
                    let (first, last) = range.split_once(':').unwrap_or((range, range));
                    let port = |text: &str| text.parse::<u16>().unwrap();
                    (port(first)..=port(last)).contains(&packet.port)
                }
                "--src-type" => next() == "LOCAL" && packet.from_node,
                "--dst-type" => next() == "LOCAL" && packet.to_node,
                // The first packet of a flow, which nothing has marked.
                "--ctstate" => next().split(',').any(|state| state == "NEW"),
                "--mark" => {
                    next();
                    false
                }
                "--probability" | "--rcheck" => {
                    chance = true;
                    if word == "--probability" {
                        next();
                    }
                    true
                }
                "-m" | "--comment" | "--mode" | "--name" | "--mask" | "--seconds" => {
                    next();
                    true
                }
                "--set" | "--reap" | "--rsource" => true,
                "-j" => break,
                word => panic!("{word} in {rule}"),
            };
            if holds == std::mem::take(&mut negated) {
                return None;
            }
        }
        Some(chance)
    }
}

fn inside(range: &str, ip: IpAddr) -> bool {
    range.parse::<Cidr>().unwrap().contains(ip)
}

/// Returns the target of a rule with its options, and the target's name.
fn target(rule: &str) -> (&str, &str) {
    let verb = rule.rsplit_once(" -j ").map_or("", |(_, verb)| verb);
    (verb, verb.split(' ').next().unwrap_or_default())
}

/// Splits text into words. Text between quotation marks is one word.
fn split(rule: &str) -> Vec<&str> {
    let mut words = Vec::new();
    for (position, part) in rule.split('"').enumerate() {
        if position % 2 == 1 {
            words.push(part);
        } else {
            words.extend(part.split(' ').filter(|word| !word.is_empty()));
        }
    }
    words
}
