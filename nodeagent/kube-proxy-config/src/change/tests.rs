//! Tests of what takes effect at once (I3).

use super::*;

fn nothing() -> KubeProxyConfiguration {
    KubeProxyConfiguration::default()
}

#[test]
fn i3_nothing_changed() {
    let change = change(&nothing(), &nothing());
    assert_eq!(change.effective, nothing());
    assert!(change.applied.is_empty() && change.needs_restart.is_empty());
}

#[test]
fn i3_what_shapes_plans_and_the_log_is_taken_over() {
    let mut wanted = nothing();
    "10.0.0.0/8".clone_into(&mut wanted.cluster_cidr);
    "10.0.0.1".clone_into(&mut wanted.bind_address);
    wanted.iptables.masquerade_all = true;
    wanted.nftables.masquerade_all = true;
    wanted.node_port_addresses = vec!["10.0.0.0/8".to_owned()];
    wanted.logging.verbosity = 4;
    "NodeCIDR".clone_into(&mut wanted.detect_local_mode);
    let change = change(&nothing(), &wanted);
    let mut live: Vec<_> = LIVE.to_vec();
    live.push("detectLocalMode");
    live.sort_unstable();
    assert_eq!(change.applied, live);
    assert_eq!(change.needs_restart, [""; 0]);
    assert_eq!(change.effective, wanted);
}

#[test]
fn i3_everything_else_keeps_its_value_and_is_named() {
    let mut wanted = nothing();
    wanted.nftables.masquerade_bit = 7;
    "[::]:1".clone_into(&mut wanted.healthz_bind_address);
    wanted.conntrack.min = 1;
    wanted.feature_gates.insert("A".to_owned(), true);
    wanted.logging.verbosity = 2;
    let change = change(&nothing(), &wanted);
    assert_eq!(
        change.needs_restart,
        [
            "conntrack.min",
            "featureGates.A",
            "healthzBindAddress",
            "nftables.masqueradeBit"
        ]
    );
    assert_eq!(change.applied, ["logging.verbosity"]);
    let mut expected = nothing();
    expected.logging.verbosity = 2;
    assert_eq!(change.effective, expected);
}

/// Rules for interfaces are written at the start only.
#[test]
fn i3_to_and_from_interfaces_needs_a_restart() {
    let mode = |mode: &str| KubeProxyConfiguration {
        detect_local_mode: mode.to_owned(),
        ..nothing()
    };
    for (from, to) in [
        ("ClusterCIDR", "BridgeInterface"),
        ("InterfaceNamePrefix", "NodeCIDR"),
    ] {
        let change = change(&mode(from), &mode(to));
        assert_eq!(change.needs_restart, ["detectLocalMode"]);
        assert_eq!(change.effective.detect_local_mode, from);
    }
}
