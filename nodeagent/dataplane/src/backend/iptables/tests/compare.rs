//! Compares the chains for the objects that kube-proxy 1.36.3 had. kube-proxy's chains are recorded in a
//! file: the output of `iptables-save` in a namespace with the API server, on a node 172.18.0.2.

use std::collections::{BTreeMap, BTreeSet};

use kplane_model::Family;

use super::*;

const OBJECTS: &str = include_str!("kube_proxy/objects.yaml");

/// The rules of every chain; blanks between words count once.
type Chains = BTreeMap<(TableName, String), Vec<String>>;

fn chains(save: &str) -> Chains {
    let mut chains = Chains::new();
    let mut table = TableName::Filter;
    for line in save.lines() {
        let line = line.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
        if let Some(name) = line.strip_prefix('*') {
            table = TableName::parse(name).unwrap();
        } else if let Some(chain) = line.strip_prefix(':') {
            let name = chain.split(' ').next().unwrap();
            chains.entry((table, name.to_owned())).or_default();
        } else if let Some(rule) = line.strip_prefix("-A ") {
            let name = rule.split(' ').next().unwrap().to_owned();
            chains.get_mut(&(table, name)).unwrap().push(line);
        }
    }
    chains
}

fn ours(family: Family, settings: RuleSettings, node: &NodeSettings) -> Chains {
    let node = node_plan(family, node);
    let plans = plans(OBJECTS, family);
    let mut held = HeldChain::new(settings);
    let staged = held.apply(change(family, &node, &plans, true));
    assert_eq!(staged.failures, []);
    held.kernel
        .tables
        .into_iter()
        .flat_map(|(table, chains)| {
            chains.into_iter().map(move |(name, rules)| ((table, name), rules))
        })
        .collect()
}

/// Chains in which kube-proxy's order is that of a hash map.
fn is_unordered(name: &str) -> bool {
    [
        "KUBE-SERVICES",
        "KUBE-EXTERNAL-SERVICES",
        "KUBE-NODEPORTS",
        "KUBE-PROXY-FIREWALL",
    ]
    .contains(&name)
}

fn assert_same(family: Family, settings: RuleSettings, node: &NodeSettings, theirs: &str) {
    let settings = RuleSettings {
        layout: Layout::Compat,
        ..settings
    };
    let (ours, theirs) = (ours(family, settings, node), chains(theirs));
    // kube-proxy writes some rules for each port of a Service, although all ports share them.
    let duplicates = ["shop/lb-local-none:b health check node port"];
    let mut differences = Vec::new();
    let none = Vec::new();
    let names: BTreeSet<_> = ours.keys().chain(theirs.keys()).collect();
    for id @ (_, name) in names {
        // iptables lists the chains that a table has. The kernel in miniature has all chains.
        let built_in = BuiltIn::parse(name).is_some();
        if !built_in && ours.contains_key(id) != theirs.contains_key(id) {
            differences.push(format!("{id:?} is in one of them only"));
        }
        let mut rules: [Vec<&String>; 2] =
            [&ours, &theirs].map(|all| all.get(id).unwrap_or(&none).iter().collect());
        rules[1].retain(|rule| !duplicates.iter().any(|text| rule.contains(text)));
        if is_unordered(name) {
            rules.iter_mut().for_each(|rules| rules.sort());
        }
        if rules[0] != rules[1] {
            differences.push(format!("{id:?}: {rules:#?}"));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

fn settings(family: Family) -> RuleSettings {
    RuleSettings {
        counters: true,
        ..RuleSettings::new(family)
    }
}

#[test]
fn c2_c3_c4_chains_are_kube_proxys_ipv4() {
    let theirs = include_str!("kube_proxy/pods.4.txt");
    assert_same(Family::V4, settings(Family::V4), &pods(), theirs);
}

#[test]
fn c2_c3_c4_chains_are_kube_proxys_ipv6() {
    let theirs = include_str!("kube_proxy/pods.6.txt");
    assert_same(Family::V6, settings(Family::V6), &pods(), theirs);
}

#[test]
fn a15_a16_chains_are_kube_proxys_where_pods_are_not_told() {
    let theirs = include_str!("kube_proxy/nopods.4.txt");
    let node = NodeSettings::default();
    assert_same(Family::V4, settings(Family::V4), &node, theirs);
}

#[test]
fn a17_c8_chains_are_kube_proxys_when_all_is_masqueraded_and_localhost_is_not_served() {
    let theirs = include_str!("kube_proxy/all.4.txt");
    let node = NodeSettings {
        masquerade_all: true,
        ..pods()
    };
    let settings = RuleSettings {
        localhost_nodeports: false,
        ..settings(Family::V4)
    };
    assert_same(Family::V4, settings, &node, theirs);
}
