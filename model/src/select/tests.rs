//! One test per rule, with the rule's id in its name, then a property that compares the two
//! formulations.

use std::net::IpAddr;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::key::ServiceKey;
use crate::net::Protocol;
use crate::program::LocalEndpoints;
use crate::service::TrafficPolicy::{self, Cluster, Local};

/// A NodePort Service, so that both policies count.
fn port(internal: TrafficPolicy, external: TrafficPolicy) -> ServicePort {
    ServicePort {
        node_port: Some(30080),
        internal_policy: internal,
        external_policy: external,
        ..ServicePort::sample(ServiceKey::sample("shop", "web"))
    }
}

fn addr(n: u8) -> EndpointAddr {
    EndpointAddr::new([10, 0, 0, n], 8080)
}

fn ep(n: u8, node: &str) -> Endpoint {
    Endpoint {
        node: Some(node.into()),
        ..Endpoint::ready(addr(n))
    }
}

fn draining(mut e: Endpoint) -> Endpoint {
    (e.ready, e.serving, e.terminating) = (false, true, true);
    e
}

fn unready(mut e: Endpoint) -> Endpoint {
    (e.ready, e.serving, e.terminating) = (false, true, false);
    e
}

fn zones(mut e: Endpoint, zones: &[&str]) -> Endpoint {
    e.zone_hints = zones.iter().map(|z| Arc::from(*z)).collect();
    e
}

fn nodes(mut e: Endpoint, nodes: &[&str]) -> Endpoint {
    e.node_hints = nodes.iter().map(|n| Arc::from(*n)).collect();
    e
}

/// Returns the cluster endpoints of node `node` in `zone`, after checking that both formulations
/// agree.
fn cluster(port: &ServicePort, endpoints: &[Endpoint], node: &str, zone: Option<&str>) -> Vec<u8> {
    let resolved = variants(port, endpoints).resolve(node, zone).to_vec();
    let categorized = categorize(port, endpoints, node, zone);
    assert_eq!(resolved, categorized.cluster.unwrap_or_default());
    last_octets(&resolved)
}

fn last_octets(addrs: &[EndpointAddr]) -> Vec<u8> {
    addrs
        .iter()
        .map(|a| match a.ip {
            IpAddr::V4(v4) => v4.octets()[3],
            IpAddr::V6(v6) => v6.octets()[15],
        })
        .collect()
}

fn local(endpoints: &[Endpoint], node: &str) -> Vec<u8> {
    let overlay = LocalEndpoints {
        key: ServiceKey::sample("shop", "web"),
        endpoints: local_by_node(endpoints).remove(node).unwrap_or_default(),
    };
    let selected: Vec<_> = overlay.selected().collect();
    let reference = categorize(&port(Local, Local), endpoints, node, None);
    assert_eq!(selected, reference.local.unwrap());
    last_octets(&selected)
}

#[test]
fn a27_output_is_sorted_and_unique() {
    let merged = merge([ep(3, "a"), ep(1, "a"), ep(3, "a"), ep(2, "b")]);
    assert_eq!(last_octets(&addrs(merged.iter())), [1, 2, 3]);
}

#[test]
fn a27_later_duplicate_wins_unless_terminating() {
    let merged = merge([ep(1, "old"), ep(1, "new")]);
    assert_eq!(merged[0].node.as_deref(), Some("new"));
    let merged = merge([ep(1, "alive"), draining(ep(1, "dying"))]);
    assert_eq!(merged[0].node.as_deref(), Some("alive"));
    let merged = merge([draining(ep(1, "dying")), ep(1, "alive")]);
    assert_eq!(merged[0].node.as_deref(), Some("alive"));
    let merged = merge([draining(ep(1, "one")), draining(ep(1, "two"))]);
    assert_eq!(merged[0].node.as_deref(), Some("two"));
}

#[test]
fn a28_endpoints_may_have_different_ports() {
    let mut other = ep(1, "a");
    other.addr.port = 9090;
    assert_eq!(merge([ep(1, "a"), other]).len(), 2);
}

#[test]
fn b1_no_endpoints_select_nothing() {
    let c = categorize(&port(Cluster, Local), &[], "a", Some("z"));
    assert_eq!(c.cluster.unwrap(), []);
    assert_eq!(c.local.unwrap(), []);
    assert!(c.all.is_empty() && !c.has_any);
    assert_eq!(variants(&port(Cluster, Local), &[]), Variants::default());
}

#[test]
fn b2_same_node_when_all_hinted_and_this_node_named() {
    let endpoints = [nodes(ep(1, "a"), &["a"]), nodes(ep(2, "b"), &["b"])];
    let p = port(Cluster, Cluster);
    assert_eq!(cluster(&p, &endpoints, "a", None), [1]);
    assert_eq!(cluster(&p, &endpoints, "c", None), [1, 2]);
    assert_eq!(
        categorize(&p, &endpoints, "a", None).mode,
        TopologyMode::SameNode
    );
}

#[test]
fn b2_same_node_goes_before_same_zone() {
    let endpoints = [
        zones(nodes(ep(1, "a"), &["a"]), &["z"]),
        zones(nodes(ep(2, "b"), &["b"]), &["z"]),
    ];
    let p = port(Cluster, Cluster);
    assert_eq!(cluster(&p, &endpoints, "a", Some("z")), [1]);
    assert_eq!(cluster(&p, &endpoints, "c", Some("z")), [1, 2]);
}

#[test]
fn b2_same_zone_when_all_hinted_and_this_zone_named() {
    let endpoints = [
        zones(ep(1, "a"), &["x"]),
        zones(ep(2, "b"), &["y", "x"]),
        zones(ep(3, "c"), &["y"]),
    ];
    let p = port(Cluster, Cluster);
    assert_eq!(cluster(&p, &endpoints, "n", Some("x")), [1, 2]);
    assert_eq!(cluster(&p, &endpoints, "n", Some("y")), [2, 3]);
    assert_eq!(cluster(&p, &endpoints, "n", Some("w")), [1, 2, 3]);
    assert_eq!(
        categorize(&p, &endpoints, "n", Some("x")).mode,
        TopologyMode::SameZone
    );
}

#[test]
fn b2_one_unhinted_ready_endpoint_disables_the_mode() {
    let p = port(Cluster, Cluster);
    let endpoints = [zones(ep(1, "a"), &["x"]), ep(2, "b")];
    assert_eq!(cluster(&p, &endpoints, "n", Some("x")), [1, 2]);
    let endpoints = [nodes(ep(1, "a"), &["a"]), ep(2, "b")];
    assert_eq!(cluster(&p, &endpoints, "a", None), [1, 2]);
}

#[test]
fn b2_only_ready_endpoints_decide_the_mode() {
    let endpoints = [
        zones(ep(1, "a"), &["x"]),
        zones(ep(2, "b"), &["y"]),
        draining(ep(3, "c")),
        unready(ep(4, "c")),
    ];
    assert_eq!(
        cluster(&port(Cluster, Cluster), &endpoints, "n", Some("x")),
        [1]
    );
}

#[test]
fn b2_node_without_zone_has_no_zone_mode() {
    let endpoints = [zones(ep(1, "a"), &["x"]), zones(ep(2, "b"), &["y"])];
    assert_eq!(
        cluster(&port(Cluster, Cluster), &endpoints, "n", None),
        [1, 2]
    );
}

#[test]
fn b3_nothing_ready_falls_back_to_all_draining_ignoring_topology() {
    let endpoints = [
        draining(zones(ep(1, "a"), &["x"])),
        draining(ep(2, "b")),
        unready(ep(3, "b")),
    ];
    assert_eq!(
        cluster(&port(Cluster, Cluster), &endpoints, "n", Some("x")),
        [1, 2]
    );
}

#[test]
fn b4_local_is_none_when_not_used() {
    let c = categorize(&port(Cluster, Cluster), &[ep(1, "a")], "a", None);
    assert_eq!(c.local, None);
    assert_eq!(last_octets(&c.all), [1]);
    assert!(c.has_any);
}

#[test]
fn b5_local_prefers_ready_then_draining_of_the_node() {
    let endpoints = [
        ep(1, "a"),
        draining(ep(2, "a")),
        draining(ep(3, "b")),
        unready(ep(4, "b")),
        ep(5, "c"),
    ];
    assert_eq!(local(&endpoints, "a"), [1]);
    assert_eq!(local(&endpoints, "b"), [3]);
    assert_eq!(local(&endpoints, "d"), []);
}

#[test]
fn b5_topology_never_narrows_local() {
    let endpoints = [zones(ep(1, "a"), &["y"]), zones(ep(2, "b"), &["x"])];
    assert_eq!(local(&endpoints, "a"), [1]);
}

#[test]
fn b5_fallback_is_independent_of_cluster() {
    let endpoints = [ep(1, "remote"), draining(ep(2, "here"))];
    let c = categorize(&port(Cluster, Local), &endpoints, "here", None);
    assert_eq!(last_octets(&c.cluster.unwrap()), [1]);
    assert_eq!(last_octets(&c.local.unwrap()), [2]);
    assert_eq!(last_octets(&c.all), [1, 2]);
}

#[test]
fn b6_has_any_counts_remote_and_draining() {
    let p = {
        let mut p = port(Local, Cluster);
        p.node_port = None;
        p
    };
    assert!(!p.uses_cluster_endpoints());
    let v = variants(&p, &[draining(ep(1, "remote"))]);
    assert!(v.has_any && v.default.is_empty());
    let c = categorize(&p, &[draining(ep(1, "remote"))], "here", None);
    assert!(c.has_any && c.cluster.is_none() && c.all.is_empty());
}

#[test]
fn b6_all_is_the_union_under_topology() {
    let endpoints = [zones(ep(1, "here"), &["y"]), zones(ep(2, "there"), &["x"])];
    let c = categorize(&port(Cluster, Local), &endpoints, "here", Some("x"));
    assert_eq!(last_octets(&c.cluster.unwrap()), [2]);
    assert_eq!(last_octets(&c.all), [1, 2]);
}

#[test]
fn b7_serving_without_ready_or_terminating_is_never_used() {
    let endpoints = [unready(ep(1, "a"))];
    assert_eq!(cluster(&port(Cluster, Cluster), &endpoints, "a", None), []);
    assert_eq!(local(&endpoints, "a"), []);
    assert!(!variants(&port(Cluster, Cluster), &endpoints).has_any);
}

/// B8, B9, B10: selection sees hints, the zone label and nothing else: no annotation, no
/// `trafficDistribution`, no weight reaches these types, so every selected endpoint is equal.
#[test]
fn b8_b9_b10_every_selected_endpoint_appears_once() {
    let endpoints: Vec<_> = (1..=9).map(|n| ep(n, "a")).collect();
    assert_eq!(
        cluster(&port(Cluster, Cluster), &endpoints, "b", None),
        (1..=9).collect::<Vec<_>>()
    );
}

#[test]
fn an_endpoint_is_led_to_until_no_node_needs_it() {
    let is = |n: u8| move |at: EndpointAddr| at == addr(n);
    let web = port(Cluster, Cluster);
    let two = [ep(1, "a"), ep(2, "b")];
    assert_eq!(lead(&web, &two, is(1)), Some(Lead::Ready));
    let [one, other] = two;
    let shutting = [draining(one.clone()), other.clone()];
    assert_eq!(lead(&web, &shutting, is(1)), None);
    let last = [draining(one.clone()), unready(other.clone())];
    assert_eq!(lead(&web, &last, is(1)), Some(Lead::Last));
    // Node a has no other endpoint of its own, whatever there is elsewhere.
    let local = port(Cluster, Local);
    assert_eq!(lead(&local, &shutting, is(1)), Some(Lead::Last));
    let here = [draining(one), ep(3, "a"), other];
    assert_eq!(lead(&local, &here, is(1)), None);
    assert_eq!(lead(&local, &here, is(9)), None);
}

fn any_hints() -> impl Strategy<Value = Vec<Arc<str>>> {
    prop::collection::vec(
        prop::sample::select(vec!["a", "b", "c"]).prop_map(Arc::from),
        0..3,
    )
}

fn any_endpoint() -> impl Strategy<Value = Endpoint> {
    (
        1_u8..12,
        prop::option::of(prop::sample::select(vec!["a", "b", "c"])),
        any::<(bool, bool, bool)>(),
        any_hints(),
        any_hints(),
    )
        .prop_map(
            |(n, node, (ready, serving, terminating), zone_hints, node_hints)| Endpoint {
                addr: addr(n),
                ready,
                serving,
                terminating,
                pod: None,
                node: node.map(Arc::from),
                zone_hints,
                node_hints,
            },
        )
}

proptest! {
    /// The shared part and the overlay give every node exactly what kube-proxy would select there.
    #[test]
    fn shared_variants_equal_the_view_of_each_node(
        endpoints in prop::collection::vec(any_endpoint(), 0..10),
        internal in any::<bool>(), external in any::<bool>(), node_port in any::<bool>(),
        most in 1_usize..10,
    ) {
        let policy = |local| if local { Local } else { Cluster };
        let mut port = port(policy(internal), policy(external));
        if !node_port {
            port.node_port = None;
        }
        let endpoints = merge(endpoints);
        let mut variants = variants(&port, &endpoints);
        variants.limit(most);
        let mut overlays = local_by_node(&endpoints);
        overlays.values_mut().for_each(|local| sample_local(local, most));
        let mut led = BTreeSet::new();
        for node in ["a", "b", "c", "d"] {
            for zone in [None, Some("a"), Some("b"), Some("c"), Some("d")] {
                let mut want = categorize(&port, &endpoints, node, zone);
                led.extend(std::mem::take(&mut want.all));
                want.limit(most);
                prop_assert!(want.all.len() <= 2 * most);
                prop_assert_eq!(variants.resolve(node, zone), want.cluster.as_deref().unwrap_or_default());
                prop_assert_eq!(variants.has_any, want.has_any);
                if let Some(local) = want.local {
                    let overlay = LocalEndpoints {
                        key: port.key.clone(),
                        endpoints: overlays.get(node).cloned().unwrap_or_default(),
                    };
                    prop_assert_eq!(overlay.selected().collect::<Vec<_>>(), local);
                }
            }
        }
        for endpoint in &endpoints {
            let why = lead(&port, &endpoints, |at| at == endpoint.addr);
            prop_assert_eq!(why.is_some(), led.contains(&endpoint.addr));
            prop_assert_eq!(why == Some(Lead::Ready), why.is_some() && endpoint.ready);
        }
    }
}

fn udp() -> ServicePort {
    let mut port = port(Cluster, Cluster);
    port.key.protocol = Protocol::Udp;
    port
}

#[test]
fn f2_whatever_serves_is_known_of_udp() {
    let mut stopped = draining(ep(4, "a"));
    stopped.serving = false;
    // Ready but not serving is contradictory; new flows go there all the same.
    let mut contradictory = ep(5, "a");
    contradictory.serving = false;
    let endpoints = [
        ep(1, "a"),
        draining(ep(2, "b")),
        unready(ep(3, "b")),
        stopped,
        contradictory,
    ];
    let all = variants(&udp(), &endpoints);
    assert_eq!(last_octets(&all.serving), [1, 2, 3, 5]);
    assert_eq!(last_octets(&all.default), [1, 5]);
    let others = all.serving_others(&all.default, 1);
    assert_eq!(last_octets(&others), [2, 3]);
    let mut local_only = udp();
    (local_only.internal_policy, local_only.node_port) = (Local, None);
    let all = variants(&local_only, &endpoints);
    assert!(all.default.is_empty());
    assert_eq!(last_octets(&all.serving_others(&[], 1)), [1, 2, 3, 5]);
    let nothing_ready = variants(&udp(), &endpoints[1..4]);
    let others = nothing_ready.serving_others(&nothing_ready.default, 1);
    assert_eq!(last_octets(&others), [3]);
}

#[test]
fn f2_other_zones_serve_too() {
    let endpoints = [zones(ep(1, "a"), &["x"]), zones(ep(2, "b"), &["y"])];
    let all = variants(&udp(), &endpoints);
    let selected = all.resolve("a", Some("x"));
    assert_eq!(last_octets(selected), [1]);
    assert_eq!(last_octets(&all.serving_others(selected, 2)), [2]);
}

/// The list is empty for TCP, and for a Service that would need a list for each of thousands of
/// nodes.
#[test]
fn f2_lists_of_others_are_bounded() {
    let endpoints: Vec<_> = (0..=255).map(|n| draining(ep(n, "a"))).collect();
    let tcp = variants(&port(Cluster, Cluster), &endpoints);
    assert!(tcp.serving.is_empty());
    let all = variants(&udp(), &endpoints);
    assert_eq!(all.serving_others(&[], 256).len(), 256);
    assert!(all.serving_others(&[], 257).is_empty());
}

/// 30,000 endpoints in three zones of which one is small, with addresses by zone.
#[test]
fn a_sample_has_its_share_of_each_zone_and_changes_little() {
    const MOST: usize = 16_384;
    let address = |n: u16| {
        let [high, low] = n.to_be_bytes();
        EndpointAddr::new([10, 0, high, low], 8080)
    };
    let sampled = |numbers: &mut dyn Iterator<Item = u16>| {
        let all: BTreeSet<_> = numbers.map(address).collect();
        let mut list: Vec<_> = all.into_iter().collect();
        sample(&mut list, MOST, |addr| (false, *addr));
        assert!(list.is_sorted());
        list
    };
    let before = sampled(&mut (0..16_000));
    assert_eq!(before.len(), 16_000, "a list that fits stays");
    let before = sampled(&mut (0..30_000));
    assert_eq!(before.len(), MOST);
    let zones = [0..1_000_u16, 1_000..14_000, 14_000..30_000];
    for zone in zones {
        let (size, share) = (zone.len(), MOST as f64 / 30_000.0);
        let chosen = zone.filter(|n| before.binary_search(&address(*n)).is_ok()).count();
        let off = chosen as f64 / (size as f64 * share) - 1.0;
        assert!(off.abs() < 0.05, "{chosen} of {size}");
    }
    let goes = before[77];
    let one_less = sampled(&mut (0..30_000).filter(|n| address(*n) != goes));
    let in_both = one_less.iter().filter(|addr| before.binary_search(addr).is_ok());
    assert_eq!(in_both.count(), MOST - 1, "one place changed");
}

#[test]
fn a_node_with_very_many_endpoints_of_its_own_keeps_the_ready_ones() {
    let local = |n| LocalEndpoint {
        addr: addr(n),
        ready: n % 10 == 0,
    };
    let mut endpoints: Vec<_> = (1..=250).map(local).collect();
    sample_local(&mut endpoints, 26);
    assert_eq!(endpoints.len(), 26);
    assert_eq!(
        endpoints.iter().filter(|endpoint| endpoint.ready).count(),
        25
    );
    assert!(endpoints.is_sorted());
}
