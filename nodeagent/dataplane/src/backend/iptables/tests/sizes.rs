//! Tests of sizes: the number of rules by the number of Services, and large clusters.

use super::*;

/// Returns ServicePorts with this many endpoints each.
fn services(number: u16, endpoints: u8) -> Plans {
    let shape = sample::Shape {
        endpoints: (0..endpoints).map(|pod| (pod, false)).collect(),
        ..sample::plain()
    };
    let one = |number| {
        let plan = sample::plan(number, Family::V4, &shape);
        (sample::key(number, Family::V4), Some(plan))
    };
    (0..number).map(one).collect()
}

fn compat() -> RuleSettings {
    RuleSettings {
        layout: Layout::Compat,
        ..RuleSettings::new(Family::V4)
    }
}

#[test]
fn c14_there_are_as_many_rules_as_in_kube_proxy() {
    let node = node_plan(Family::V4, &pods());
    let nat = |services: &Plans| {
        let mut held = HeldChain::new(compat());
        held.apply(change(Family::V4, &node, services, true));
        held.ruleset.rules_in(TableName::Nat)
    };
    assert_eq!(nat(&services(0, 0)), 5);
    assert_eq!(nat(&services(10, 10)), 325);
}

#[test]
fn c12_in_large_clusters_rules_do_not_say_which_endpoint() {
    let node = node_plan(Family::V4, &pods());
    // Names are only in comments.
    let naming = |endpoints| {
        let mut held = HeldChain::new(compat());
        let services = services(100, endpoints);
        let staged = held.apply(change(Family::V4, &node, &services, true));
        staged
            .steps
            .iter()
            .flat_map(|step| &step.write)
            .filter(|chain| chain.name.to_string().contains("-SEP-"))
            .filter(|chain| chain.lines.contains("shop/svc-"))
            .count()
    };
    assert_eq!((naming(10), naming(11)), (1_000, 0));
}
