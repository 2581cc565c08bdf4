//! What `iptables-save` prints on two nodes, compared chain by chain: kube-proxy's, and ours in its
//! layout. Comments say nothing to packets.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use kplane_model::Family;
use kplane_tests::netns::NetNs;
use kplane_tests::wait::eventually;

use crate::conformance::stand::Stand;

/// How soon kube-proxy must have written what it writes last.
const SETTLED: Duration = Duration::from_secs(60);
/// Chains in which the order is that of a hash map.
const UNORDERED: [&str; 4] = [
    "KUBE-SERVICES",
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-NODEPORTS",
    "KUBE-PROXY-FIREWALL",
];
/// Differences that are told.
const REPORTED: usize = 20;

/// The rules of every chain, by table and name.
type Chains = BTreeMap<(String, String), Vec<String>>;

/// C1 to C8: every chain of kube-proxy is there, with the same rules in the same order, and no other.
///
/// # Errors
/// Names the chains that differ.
pub(crate) fn c2_chains_are_those_of_a_running_kube_proxy(stands: &[Stand]) -> Result<()> {
    let [kube_proxy, kplane] = stands else {
        anyhow::bail!("two stands");
    };
    are_the_same(kube_proxy, kplane)
}

/// Waits until the nodes of two stands have the same chains.
pub(crate) fn are_the_same(theirs: &Stand, ours: &Stand) -> Result<()> {
    for number in [1, 2] {
        for family in Family::ALL {
            let what = format!("the chains of node-{number} are the same ({family})");
            let chains = eventually(SETTLED, &what, || {
                let theirs = chains(theirs.world.node(number)?, family)?;
                let ours = chains(ours.world.node(number)?, family)?;
                let differences = differences(&theirs, &ours);
                ensure!(
                    differences.is_empty(),
                    "{} chains differ:\n{}",
                    differences.len(),
                    differences[..differences.len().min(REPORTED)].join("\n")
                );
                Ok(ours)
            })?;
            let rules: usize = chains.values().map(Vec::len).sum();
            println!("{what}: {} chains, {rules} rules", chains.len());
        }
    }
    Ok(())
}

fn chains(node: &NetNs, family: Family) -> Result<Chains> {
    let program = match family {
        Family::V4 => "iptables-nft-save",
        Family::V6 => "ip6tables-nft-save",
    };
    Ok(parse(&node.output(Command::new(program))?))
}

fn parse(save: &str) -> Chains {
    let mut chains = Chains::new();
    let mut table = "";
    for line in save.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = name;
        } else if let Some(chain) = line.strip_prefix(':') {
            let name = chain.split(' ').next().unwrap_or_default();
            chains.entry((table.to_owned(), name.to_owned())).or_default();
        } else if let Some(rule) = line.strip_prefix("-A ") {
            let (name, rule) = rule.split_once(' ').unwrap_or((rule, ""));
            let rules = chains.entry((table.to_owned(), name.to_owned()));
            rules.or_default().push(without_comment(rule));
        }
    }
    for ((_, name), rules) in &mut chains {
        if UNORDERED.contains(&name.as_str()) {
            rules.sort();
            // Of what the ports of a Service share kube-proxy has a copy for each.
            rules.dedup();
        }
    }
    chains
}

/// With one blank between words.
fn without_comment(rule: &str) -> String {
    const COMMENT: &str = "-m comment --comment ";
    let mut text = rule.to_owned();
    if let Some(from) = text.find(COMMENT) {
        let value = &text[from + COMMENT.len()..];
        // None of the comments has a quote in it.
        let length = match value.strip_prefix('"') {
            Some(quoted) => quoted.find('"').map_or(value.len(), |end| end + 2),
            None => value.find(' ').unwrap_or(value.len()),
        };
        text.replace_range(from..from + COMMENT.len() + length, "");
    }
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    words.join(" ")
}

/// The chain to which a rule jumps.
fn jump(rule: &str) -> Option<&str> {
    rule.split(' ').skip_while(|word| *word != "-j").nth(1)
}

/// A dispatch chain of our layout.
fn is_ours(name: &str) -> bool {
    name.starts_with("KUBE-SVC-D-")
}

fn differences(theirs: &Chains, ours: &Chains) -> Vec<String> {
    let names: BTreeSet<_> = theirs.keys().chain(ours.keys()).collect();
    let others = ours.iter().filter(|((_, name), _)| !is_ours(name));
    let jumps: BTreeSet<&str> =
        others.flat_map(|(_, rules)| rules).filter_map(|rule| jump(rule)).collect();
    let difference = |id: &(String, String)| {
        let (table, name) = id;
        match (theirs.get(id), ours.get(id)) {
            (Some(theirs), Some(ours)) if theirs == ours => None,
            (Some(theirs), Some(ours)) => {
                let only = |these: &[String], those: &[String]| -> String {
                    these
                        .iter()
                        .filter(|rule| !those.contains(rule))
                        .take(3)
                        .map(|rule| format!("\n    {rule}"))
                        .collect()
                };
                Some(format!(
                    "* {table} {name}: {} rules of the first, {} of the second\n  only the first:{}\n  only the second:{}",
                    theirs.len(),
                    ours.len(),
                    only(theirs, ours),
                    only(ours, theirs),
                ))
            }
            (Some(_), None) => Some(format!("* {table} {name} is the first's only")),
            // C13: kube-proxy empties and deletes our dispatch chains in table nat. Where no packet comes,
            // they do no harm in table filter.
            (None, _) if table == "filter" && is_ours(name) && !jumps.contains(&**name) => None,
            (None, _) => Some(format!("* {table} {name} is the second's only")),
        }
    };
    names.into_iter().filter_map(difference).collect()
}
