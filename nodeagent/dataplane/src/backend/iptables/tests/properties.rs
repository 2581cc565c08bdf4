//! Rules do not depend on names, and packets have the same fate in both layouts.

use std::collections::BTreeMap;
use std::net::IpAddr;

use kplane_model::{Family, KeyParts, Protocol, ServiceKey, ServiceName};
use proptest::prelude::*;

use super::sample::{self, Shape, shape};
use super::walk::Packet;
use super::*;

fn held(family: Family, layout: Layout, services: &Plans) -> HeldChain {
    let settings = RuleSettings {
        layout,
        ..RuleSettings::new(family)
    };
    let mut held = HeldChain::new(settings);
    held.apply(change(family, &node_plan(family, &pods()), services, true));
    held
}

fn services(family: Family, shapes: &BTreeMap<u16, Shape>) -> Plans {
    shapes
        .iter()
        .map(|(n, shape)| {
            (
                sample::key(*n, family),
                Some(sample::plan(*n, family, shape)),
            )
        })
        .collect()
}

/// Places of a ServicePort and some beside them.
fn packets(family: Family, number: u16) -> Vec<Packet> {
    let sources = [sample::pod(1, family), sample::external_ip(200, family)];
    let protocol = sample::key(number, family).protocol;
    let protocols = Protocol::ALL.into_iter().filter(|p| *p != Protocol::Sctp || *p == protocol);
    let addresses = [
        sample::cluster_ip(number, family),
        sample::load_balancer_ip(number, family),
        sample::external_ip(number, family),
        sample::pod(99, family),
    ];
    let ports = [
        sample::port(number),
        sample::port(number) + 1,
        sample::node_port(number),
        32_000 + number / 2,
        1,
    ];
    let mut packets = Vec::new();
    for source in sources {
        for to in addresses {
            for port in ports {
                for protocol in protocols.clone() {
                    packets.push(Packet {
                        source,
                        to,
                        protocol,
                        port,
                        to_node: to == addresses[3],
                        from_node: false,
                    });
                }
            }
        }
    }
    packets
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn tree_and_list_send_every_packet_to_the_same_target(
        shapes in prop::collection::btree_map(0_u16..160, shape(), 0..160), v6: bool,
    ) {
        let family = Family::ALL[usize::from(v6)];
        let services = services(family, &shapes);
        let [flat, tree] = [Layout::Compat, Layout::Tree].map(|l| held(family, l, &services));
        let chains = [
            (TableName::Nat, "PREROUTING"),
            (TableName::Filter, "INPUT"),
            (TableName::Filter, "FORWARD"),
        ];
        for number in (0..160).step_by(31) {
            for packet in packets(family, number) {
                for (table, chain) in chains {
                    let [flat, tree] = [&flat, &tree].map(|h| h.kernel.play(table, chain, packet).0);
                    prop_assert_eq!(flat, tree, "{:?} {}", packet, chain);
                }
            }
        }
    }

    #[test]
    fn a_rule_is_one_line_whatever_objects_are_called(
        shape in shape(), namespace: String, name: String, port in ".{0,20}",
        number in 0_u16..60,
    ) {
        let mut plan = sample::plan(number, Family::V4, &shape);
        let key = ServiceKey::from(KeyParts {
            service: ServiceName::new(&namespace, &name),
            port_name: port.as_str().into(),
            ..KeyParts::clone(&plan.key)
        });
        plan.key = key.clone();
        let ordinary = vec![(sample::key(number, Family::V4), Some(sample::plan(number, Family::V4, &shape)))];
        let strange = vec![(key, Some(plan))];
        let [ordinary, strange] = [ordinary, strange].map(|s| held(Family::V4, Layout::Tree, &s));
        // The chains have other names, and rules may have no comments.
        let rules = |held: &HeldChain, table| -> Vec<usize> {
            let mut counts: Vec<usize> = held.kernel.tables[&table].values().map(Vec::len).collect();
            counts.sort_unstable();
            counts
        };
        prop_assert_eq!(rules(&ordinary, TableName::Filter), rules(&strange, TableName::Filter));
        for (held, allowed) in [(&ordinary, "\""), (&strange, "\"")] {
            for rule in held.kernel.tables.values().flat_map(BTreeMap::values).flatten() {
                let plain = |c: char| c.is_ascii_alphanumeric() || " -_.,:/!>[]()=;+".contains(c);
                prop_assert!(rule.chars().all(|c| plain(c) || allowed.contains(c)), "{}", rule);
                prop_assert_eq!(rule.matches('"').count() % 2, 0);
                prop_assert!(rule.starts_with("-A "));
            }
        }
    }
}

#[test]
fn strange_names_have_no_comments_and_ordinary_ones_do() {
    let shape = sample::plain();
    for (name, has) in [
        ("web", true),
        ("we\nb", false),
        ("w\"", false),
        ("a b", false),
        ("", false),
    ] {
        let mut plan = sample::plan(1, Family::V4, &shape);
        plan.key.service = ServiceName::new("shop", name);
        let services = vec![(plan.key.clone(), Some(plan))];
        let held = held(Family::V4, Layout::Tree, &services);
        let rules = held.kernel.rules(TableName::Nat, "KUBE-SERVICES");
        assert_eq!(rules[0].contains("cluster IP"), has, "{name:?}: {rules:?}");
    }
}

#[test]
fn few_rules_are_looked_at_in_a_tree() {
    let shapes = (0..5_000).map(|number| (number, sample::plain())).collect();
    let held = held(Family::V4, Layout::Tree, &services(Family::V4, &shapes));
    let chains = &held.kernel.tables[&TableName::Nat];
    let dispatch = chains.iter().filter(|(name, _)| name.starts_with("KUBE-SVC-D-"));
    let longest = dispatch.clone().map(|(_, rules)| rules.len()).max();
    assert!(longest <= Some(16) && dispatch.count() < 1_000);
    let mut most = 0;
    for number in (0..5_000).step_by(11) {
        let key = sample::key(number, Family::V4);
        let packet = Packet {
            source: sample::pod(1, Family::V4),
            to: sample::cluster_ip(number, Family::V4),
            protocol: key.protocol,
            port: sample::port(number),
            to_node: false,
            from_node: false,
        };
        let (ends, looked) = held.kernel.play(TableName::Nat, "KUBE-SERVICES", packet);
        // The packet goes to the endpoint itself, masqueraded, or to the other endpoint.
        assert_eq!(ends.len(), 2, "{ends:?}");
        most = most.max(looked);
    }
    let lookups = held.ruleset.lookups();
    assert_eq!(lookups.list, 5_000);
    // Of the evaluated rules, up to eight are the Service's own.
    assert!(
        most as u64 <= lookups.now + 8 && lookups.now < 70,
        "{most} {lookups:?}"
    );
}

/// All addresses are printed as the C library prints them.
#[test]
fn addresses_are_printed_as_iptables_does() {
    for (text, printed) in [
        ("::", "::"),
        ("::1", "::1"),
        ("::ffff", "::ffff"),
        ("::1:2", "::0.1.0.2"),
        ("::10.0.0.1", "::10.0.0.1"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1"),
        ("1:0:0:2::", "1:0:0:2::"),
        ("fd00::1:0:0:1", "fd00::1:0:0:1"),
    ] {
        let ip: IpAddr = text.parse().unwrap();
        assert_eq!(text::Address(ip).to_string(), printed);
    }
}
