//! Tests of the notes at the start (I7).

use super::super::settings::resolve;
use super::*;

const DUAL: Host = Host { ipv6: true };
const V4_ONLY: Host = Host { ipv6: false };

/// Returns the notes about a configuration that has none before the change.
fn notes(
    host: Host,
    change: impl FnOnce(&mut KubeProxyConfiguration),
) -> Result<Vec<Note>, Problem> {
    let mut config = KubeProxyConfiguration {
        mode: "nftables".to_owned(),
        cluster_cidr: "10.0.0.0/8,fd00::/8".to_owned(),
        ..KubeProxyConfiguration::default()
    };
    change(&mut config);
    start_up(&config, &resolve(&config).unwrap(), host)
}

fn only(notes: Result<Vec<Note>, Problem>) -> (Level, String) {
    let mut notes = notes.unwrap();
    assert_eq!(notes.len(), 1, "{notes:?}");
    let note = notes.remove(0);
    (note.level, note.text)
}

#[test]
fn i7_a_plain_configuration_needs_no_words() {
    assert_eq!(notes(DUAL, |_| ()), Ok(Vec::new()));
    assert_eq!(notes(V4_ONLY, |_| ()), Ok(Vec::new()));
    let iptables = notes(DUAL, |c| {
        "iptables".clone_into(&mut c.mode);
        c.iptables.localhost_node_ports = false;
    });
    assert_eq!(iptables, Ok(Vec::new()));
}

#[test]
fn i7_another_mode_is_told_what_it_gets() {
    let (level, text) = only(notes(DUAL, |c| c.mode.clear()));
    assert_eq!(level, Level::Info);
    assert!(text.contains("kplane uses nftables"), "{text}");
    assert!(text.contains("docs/kube-proxy-compat.md"), "{text}");
}

/// D1.
#[test]
fn d1_mode_ipvs_is_told_to_be_deprecated() {
    let (level, text) = only(notes(DUAL, |c| "ipvs".clone_into(&mut c.mode)));
    assert_eq!(level, Level::Warning);
    assert!(text.contains("deprecated"), "{text}");
}

#[test]
fn u55_short_times_of_udp_flows_are_kept_with_a_warning() {
    let of = |mode: &str, idle: &str| {
        notes(DUAL, |c| {
            mode.clone_into(&mut c.mode);
            c.udp_idle_timeout = Some(idle.parse().unwrap());
        })
    };
    let found = of("userspace", "250ms").unwrap();
    let warnings: Vec<_> = found
        .iter()
        .filter(|note| note.level == Level::Warning)
        .map(|note| note.text.as_str())
        .collect();
    assert_eq!(warnings.len(), 1, "{found:?}");
    assert!(
        warnings[0].starts_with("udpIdleTimeout 250ms"),
        "{warnings:?}"
    );
    let (level, text) = only(of("userspace", "30s"));
    assert_eq!(level, Level::Info);
    assert!(text.contains("docs/userspace.md"), "{text}");
    let (level, text) = only(of("nftables", "250ms"));
    assert_eq!(level, Level::Info);
    assert!(text.contains("no effect"), "{text}");
    let mut config = KubeProxyConfiguration {
        mode: "userspace".to_owned(),
        udp_idle_timeout: Some("250ms".parse().unwrap()),
        ..KubeProxyConfiguration::default()
    };
    let idle = |config: &KubeProxyConfiguration| {
        let settings = resolve(config).unwrap();
        settings.backend.userspace.udp_idle
    };
    assert_eq!(idle(&config), Some(Duration::from_millis(250)));
    config.udp_idle_timeout = Some("0s".parse().unwrap());
    assert_eq!(idle(&config), None);
}

#[test]
fn i7_ranges_of_one_family_on_a_host_with_both() {
    let (level, text) = only(notes(DUAL, |c| {
        "10.0.0.0/8".clone_into(&mut c.cluster_cidr);
    }));
    // Most clusters have one family.
    assert_eq!(level, Level::Info);
    assert!(
        text.starts_with("clusterCIDR has no range of IPv6"),
        "{text}"
    );
    let (level, _) = only(notes(DUAL, |c| {
        "10.0.0.0/8".clone_into(&mut c.cluster_cidr);
        "fd00::7".clone_into(&mut c.bind_address);
    }));
    assert_eq!(level, Level::Warning);
    let (_, text) = only(notes(DUAL, |c| {
        c.node_port_addresses = vec!["fd00::/8".to_owned(), "fd01::/16".to_owned()];
    }));
    assert!(
        text.starts_with("nodePortAddresses has no range of IPv4"),
        "{text}"
    );
    assert_eq!(
        notes(V4_ONLY, |c| "10.0.0.0/8".clone_into(&mut c.cluster_cidr)),
        Ok(Vec::new())
    );
}

#[test]
fn i7_pods_of_a_family_that_the_host_does_not_have_are_fatal() {
    let problem = notes(V4_ONLY, |c| "fd00::/8".clone_into(&mut c.cluster_cidr)).unwrap_err();
    assert_eq!(
        problem.to_string(),
        "clusterCIDR: fd00::/8: must have an IPv4 range: this host has no IPv6"
    );
    assert!(notes(DUAL, |c| "fd00::/8".clone_into(&mut c.cluster_cidr)).is_ok());
    // Only where the range is used.
    let node_cidr = |c: &mut KubeProxyConfiguration| {
        "fd00::/8".clone_into(&mut c.cluster_cidr);
        "NodeCIDR".clone_into(&mut c.detect_local_mode);
    };
    assert_eq!(notes(V4_ONLY, node_cidr), Ok(Vec::new()));
}

#[test]
fn i7_no_detector_is_said() {
    let (level, text) = only(notes(DUAL, |c| c.cluster_cidr.clear()));
    assert_eq!(level, Level::Warning);
    assert!(
        text.contains("cannot distinguish pods from other clients"),
        "{text}"
    );
}

#[test]
fn i7_fields_without_meaning_are_named_in_one_line() {
    let (level, text) = only(notes(DUAL, |c| {
        "/kubeconfig".clone_into(&mut c.client_connection.kubeconfig);
        c.client_connection.burst = 20;
        c.feature_gates.insert("SomeGate".to_owned(), true);
        c.winkernel.enable_dsr = true;
        c.config_sync_period = "1h".parse().unwrap();
        c.nftables.min_sync_period = "2s".parse().unwrap();
        c.iptables.masquerade_all = true;
        c.nftables.masquerade_all = true;
        c.ipvs.sync_period = "1h".parse().unwrap();
        c.oom_score_adj = 0;
    }));
    assert_eq!(level, Level::Info);
    assert_eq!(
        text,
        "set, but without effect in kplane: clientConnection.burst, configSyncPeriod, \
         featureGates.SomeGate, iptables.masqueradeAll, ipvs.syncPeriod, nftables.minSyncPeriod, \
         winkernel.enableDSR"
    );
    let in_ipvs = notes(DUAL, |c| {
        "ipvs".clone_into(&mut c.mode);
        c.ipvs.sync_period = "1h".parse().unwrap();
        c.ipvs.strict_arp = true;
        c.iptables.masquerade_all = true;
    });
    assert!(
        only(in_ipvs).1.starts_with("mode ipvs"),
        "all of them count in this mode"
    );
}
