//! Tests of the chains that a change writes. The history of a state does not matter.

use std::collections::{BTreeMap, BTreeSet};

use kplane_model::Family;
use proptest::prelude::*;

use super::sample::{self, Shape, plain, plan, shape};
use super::*;

/// A change of one ServicePort: new or changed, or removed.
type Op = (u16, Option<Shape>);

fn ops() -> impl Strategy<Value = Vec<Vec<Op>>> {
    let op = (0_u16..60, prop::option::weighted(0.8, shape()));
    let change = prop::collection::vec(op, 1..25);
    prop::collection::vec(change, 1..8)
}

fn settings(family: Family, layout: Layout) -> RuleSettings {
    RuleSettings {
        layout,
        ..RuleSettings::new(family)
    }
}

fn named(family: Family, ops: &BTreeMap<u16, Option<Shape>>) -> Plans {
    ops.iter()
        .map(|(number, shape)| {
            let plan = shape.as_ref().map(|shape| plan(*number, family, shape));
            (sample::key(*number, family), plan)
        })
        .collect()
}

/// Returns the chains that are new, gone, or have other rules than before.
fn differing(before: &walk::Kernel, after: &walk::Kernel) -> BTreeSet<(TableName, String)> {
    let chains = |kernel: &walk::Kernel| -> BTreeMap<(TableName, String), Vec<String>> {
        kernel
            .tables
            .clone()
            .into_iter()
            .flat_map(|(table, chains)| {
                chains.into_iter().map(move |(name, rules)| ((table, name), rules))
            })
            .filter(|((_, name), _)| BuiltIn::parse(name).is_none())
            .collect()
    };
    let (before, after) = (chains(before), chains(after));
    before
        .keys()
        .chain(after.keys())
        .filter(|id| before.get(*id) != after.get(*id))
        .cloned()
        .collect()
}

fn touched(staged: &StagedRules) -> BTreeSet<(TableName, String)> {
    let chains = |step: &TableChange| -> Vec<(TableName, String)> {
        step.write
            .iter()
            .map(|chain| chain.name)
            .chain(step.delete.iter().copied())
            .map(|name| (step.table, name.to_string()))
            .collect()
    };
    staged.steps.iter().flat_map(chains).collect()
}

fn play(family: Family, layout: Layout, changes: &[Vec<Op>], limits: Limits) {
    let node = node_plan(family, &pods());
    let mut held = HeldChain::new(settings(family, layout));
    held.apply_with(change(family, &node, &Plans::new(), true), limits);
    let mut state = BTreeMap::new();
    for ops in changes {
        let ops: BTreeMap<u16, Option<Shape>> = ops.iter().cloned().collect();
        let services = named(family, &ops);
        let before = held.kernel.clone();
        let staged = held.apply_with(change(family, &node, &services, false), limits);
        assert_eq!(staged.failures, []);
        let differing = differing(&before, &held.kernel);
        let touched = touched(&staged);
        assert!(touched.is_superset(&differing));
        // With three steps, the last may write again what the first wrote.
        if staged.steps.len() < 3 {
            assert_eq!(touched, differing);
        }
        state.extend(ops);
    }
    state.retain(|_, shape| shape.is_some());
    let services = named(family, &state);
    let mut scratch = HeldChain::new(settings(family, layout));
    scratch.apply(change(family, &node, &services, true));
    assert_eq!(held.kernel, scratch.kernel);
    // Everything is applied once more to the rules that were found, instead of the known ones.
    let again = held.apply(change(family, &node, &services, true));
    assert!(again.is_empty(), "{again:#?}");
    let found = held.kernel.found();
    held.ruleset = Ruleset::adopt(settings(family, layout), found);
    let again = held.apply(change(family, &node, &services, true));
    assert!(again.is_empty(), "{again:#?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_way_to_a_state_leads_to_the_same_rules_and_writes_only_what_differs(
        changes in ops(), v6: bool, compat: bool, small: bool,
    ) {
        let family = Family::ALL[usize::from(v6)];
        let layout = if compat { Layout::Compat } else { Layout::Tree };
        let limits = if small { Limits { chains: 3, rules: 5 } } else { Limits::NFT };
        play(family, layout, &changes, limits);
    }

    #[test]
    fn what_was_found_becomes_what_is_wanted(
        found in prop::collection::btree_map(0_u16..60, shape(), 0..40),
        wanted in prop::collection::btree_map(0_u16..60, shape(), 0..40),
        compat: [bool; 2],
    ) {
        let layout = |compat| if compat { Layout::Compat } else { Layout::Tree };
        let node = node_plan(Family::V4, &pods());
        let some = |shapes: BTreeMap<u16, Shape>| {
            named(Family::V4, &shapes.into_iter().map(|(n, shape)| (n, Some(shape))).collect())
        };
        let (found, wanted) = (some(found), some(wanted));
        let mut held = HeldChain::new(settings(Family::V4, layout(compat[0])));
        held.apply(change(Family::V4, &node, &found, true));
        let settings = settings(Family::V4, layout(compat[1]));
        held.ruleset = Ruleset::adopt(settings, held.kernel.found());
        held.apply(change(Family::V4, &node, &wanted, true));
        let mut scratch = HeldChain::new(settings);
        scratch.apply(change(Family::V4, &node, &wanted, true));
        prop_assert_eq!(held.kernel, scratch.kernel);
    }
}

fn with_services(count: u16, layout: Layout) -> (HeldChain, NodePlan) {
    let node = node_plan(Family::V4, &pods());
    let mut held = HeldChain::new(settings(Family::V4, layout));
    let all = (0..count).map(|number| (number, Some(plain()))).collect();
    held.apply(change(Family::V4, &node, &named(Family::V4, &all), true));
    (held, node)
}

#[test]
fn one_endpoint_costs_the_same_however_many_services_there_are() {
    let cost = |count: u16| {
        let (mut held, node) = with_services(count, Layout::Tree);
        let mut changed = plain();
        changed.endpoints[0].0 = 7;
        let change_of = BTreeMap::from([(3, Some(changed))]);
        let services = named(Family::V4, &change_of);
        let staged = held.apply(change(Family::V4, &node, &services, false));
        assert_eq!(staged.steps.len(), 1);
        // The change writes the chain of the policy and that of one endpoint, and deletes one chain.
        assert_eq!(
            (staged.steps[0].write.len(), staged.steps[0].delete.len()),
            (2, 1)
        );
        (staged.len(), staged.rules())
    };
    assert_eq!(cost(10), (3, 5));
    assert_eq!(cost(2_000), (3, 5));
}

#[test]
fn a_new_service_costs_its_chains_and_a_leaf() {
    let (mut held, node) = with_services(2_000, Layout::Tree);
    let mut most = 0;
    for number in 2_000..2_100 {
        let services = named(Family::V4, &BTreeMap::from([(number, Some(plain()))]));
        let staged = held.apply(change(Family::V4, &node, &services, false));
        // The change writes the ServicePort's three chains, and a leaf, or, if the leaf is full, two new
        // leaves and the chain above them.
        assert!((4..=7).contains(&staged.len()), "{:#?}", touched(&staged));
        most += staged.len();
    }
    assert!(most < 480, "{most}");
}

/// Applies a change of one ServicePort.
fn step(held: &mut HeldChain, node: &NodePlan, number: u16, shape: Option<Shape>) -> StagedRules {
    let services = named(Family::V4, &BTreeMap::from([(number, shape)]));
    held.apply(change(Family::V4, node, &services, false))
}

#[test]
fn a_tree_that_grows_and_shrinks_is_always_the_one_of_its_places() {
    let (mut held, node) = with_services(0, Layout::Tree);
    let with_ports = Shape {
        node_port: true,
        ..plain()
    };
    // The factor is coprime to 90, so every number comes once, far from the one before.
    let numbers = || (0_u16..90).map(|n| n * 37 % 90);
    let mut there = BTreeMap::new();
    for (number, comes) in numbers().map(|n| (n, true)).chain(numbers().map(|n| (n, false))) {
        let shape = comes.then(|| with_ports.clone());
        step(&mut held, &node, number, shape.clone());
        match shape {
            Some(_) => there.insert(number, shape),
            None => there.remove(&number),
        };
        if number % 3 == 0 {
            let mut scratch = HeldChain::new(settings(Family::V4, Layout::Tree));
            scratch.apply(change(Family::V4, &node, &named(Family::V4, &there), true));
            assert_eq!(held.kernel, scratch.kernel, "{number} {comes}");
        }
    }
}

#[test]
fn a_place_far_from_all_others_costs_no_more() {
    let (mut held, node) = with_services(2_000, Layout::Tree);
    // All other addresses are in 10.96.0.0/12 and 172.16.0.0/12.
    let far = Shape {
        external: true,
        ..plain()
    };
    let staged = step(&mut held, &node, 2_000, Some(far));
    // The change writes four chains of the ServicePort; the root is divided once more.
    assert!(staged.len() <= 9, "{:#?}", touched(&staged));
    let staged = step(&mut held, &node, 2_000, None);
    assert!(staged.len() <= 9, "{:#?}", touched(&staged));
}
