//! Tests of validation (I7) and of what fields mean.

use super::*;
use kplane_dataplane::backend::PodInterface;

type Config = KubeProxyConfiguration;

/// A configuration for mode nftables, changed.
fn with(change: impl FnOnce(&mut Config)) -> Config {
    let mut config = Config {
        mode: "nftables".to_owned(),
        ..Config::default()
    };
    change(&mut config);
    config
}

fn problems(change: impl FnOnce(&mut Config)) -> Vec<String> {
    let problems = resolve(&with(change)).err().unwrap_or_default();
    problems.iter().map(ToString::to_string).collect()
}

fn settings(change: impl FnOnce(&mut Config)) -> Settings {
    resolve(&with(change)).unwrap()
}

fn duration(text: &str) -> GoDuration {
    text.parse().unwrap()
}

fn texts(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

#[test]
fn i7_defaults_are_valid_in_every_mode() {
    for mode in ["", "nftables", "iptables", "ipvs"] {
        let settings = settings(|c| mode.clone_into(&mut c.mode));
        assert_eq!(settings.node, NodeSettings::default());
        assert_eq!(settings.backend, backend::Settings::default());
        assert_eq!(settings.sync_period, Duration::from_secs(30));
        assert_eq!(settings.conntrack.udp_timeout, Duration::ZERO);
    }
}

#[test]
fn i7_periods() {
    let of = |sync: &str, min: &str| {
        problems(|c| {
            c.nftables.sync_period = duration(sync);
            c.nftables.min_sync_period = duration(min);
        })
    };
    assert_eq!(
        of("-1s", "0"),
        ["nftables.syncPeriod: -1s: must be greater than 0"]
    );
    assert_eq!(
        of("0s", "0"),
        ["nftables.syncPeriod: 0s: must be greater than 0"]
    );
    assert_eq!(
        of("1s", "-1ns"),
        ["nftables.minSyncPeriod: -1ns: must be at least 0"]
    );
    assert_eq!(
        of("10s", "1m"),
        [
            "nftables.minSyncPeriod: 1m0s: must not be greater than nftables.syncPeriod, which is 10s"
        ]
    );
    assert_eq!(of("1s", "1s"), [""; 0]);
    assert_eq!(
        problems(|c| c.config_sync_period = duration("-1h")),
        ["configSyncPeriod: -1h0m0s: must be greater than 0"]
    );
}

/// The section of another mode may have any values, as in kube-proxy.
#[test]
fn i7_sections_of_other_modes_are_not_looked_at() {
    let in_mode = |mode: &str| {
        problems(|c| {
            mode.clone_into(&mut c.mode);
            c.nftables.masquerade_bit = 77;
            c.ipvs.tcp_timeout = duration("-1s");
            c.ipvs.exclude_cidrs = texts(&["10.0.0.0/8", "x"]);
            c.iptables.sync_period = duration("-1s");
        })
    };
    let iptables = "iptables.syncPeriod: -1s: must be greater than 0";
    assert_eq!(
        in_mode("nftables"),
        ["nftables.masqueradeBit: 77: must be from 0 to 31"]
    );
    assert_eq!(in_mode("iptables"), [iptables]);
    assert_eq!(in_mode(""), [iptables]);
    assert_eq!(
        in_mode("ipvs"),
        [
            "ipvs.tcpTimeout: -1s: must be at least 0",
            "ipvs.excludeCIDRs[1]: x: must be an address range such as 10.0.0.0/8 or fd00::/8"
        ]
    );
}

/// (i): masquerade settings of mode ipvs come from the iptables section.
#[test]
fn i7_masquerading_is_that_of_the_mode() {
    for (mode, bit, all, period) in [
        ("nftables", 3, false, 5),
        ("iptables", 4, true, 6),
        ("", 4, true, 6),
        ("ipvs", 4, true, 7),
    ] {
        let settings = settings(|c| {
            mode.clone_into(&mut c.mode);
            c.nftables.masquerade_bit = 3;
            c.nftables.sync_period = duration("5s");
            (c.iptables.masquerade_bit, c.iptables.masquerade_all) = (4, true);
            c.iptables.sync_period = duration("6s");
            c.ipvs.sync_period = duration("7s");
        });
        assert_eq!(settings.backend.masquerade_bit, bit, "{mode}");
        assert_eq!(settings.node.masquerade_all, all, "{mode}");
        assert_eq!(settings.sync_period, Duration::from_secs(period), "{mode}");
    }
    for bit in [-1, 32] {
        let expected = format!("iptables.masqueradeBit: {bit}: must be from 0 to 31");
        assert_eq!(problems(|c| c.iptables.masquerade_bit = bit), [expected]);
    }
}

#[test]
fn i7_modes() {
    let of = |mode: &str| problems(|c| mode.clone_into(&mut c.mode));
    let accepted = "must be nftables, iptables, ipvs, userspace or empty";
    assert_eq!(
        of("kernelspace"),
        [format!("mode: kernelspace: is for Windows: {accepted}")]
    );
    assert_eq!(of("NFTables"), [format!("mode: NFTables: {accepted}")]);
}

#[test]
fn i7_addresses() {
    assert_eq!(
        problems(|c| {
            "x".clone_into(&mut c.bind_address);
            "localhost:80".clone_into(&mut c.healthz_bind_address);
            "10.0.0.1:70000".clone_into(&mut c.metrics_bind_address);
        }),
        [
            "bindAddress: x: must be an IP address such as 0.0.0.0, 192.168.1.7 or fd00::7",
            "healthzBindAddress: localhost:80: must be IP:port such as 0.0.0.0:10256 or [::]:10256",
            "metricsBindAddress: 10.0.0.1:70000: must be IP:port such as 0.0.0.0:10256 or [::]:10256",
        ]
    );
    let settings = settings(|c| {
        "fd00::7".clone_into(&mut c.bind_address);
        c.healthz_bind_address.clear();
        "[fd00::7]:1".clone_into(&mut c.metrics_bind_address);
    });
    assert_eq!(settings.node.node_ip, Some("fd00::7".parse().unwrap()));
    assert_eq!(settings.healthz, None);
    assert_eq!(settings.metrics.unwrap().to_string(), "[fd00::7]:1");
    for unspecified in ["0.0.0.0", "::"] {
        let settings = self::settings(|c| unspecified.clone_into(&mut c.bind_address));
        assert_eq!(settings.node.node_ip, None);
    }
}

#[test]
fn i7_ranges_of_numbers() {
    assert_eq!(
        problems(|c| {
            c.oom_score_adj = -1001;
            c.client_connection.burst = -1;
            (c.conntrack.max_per_core, c.conntrack.min) = (-1, -2);
            c.conntrack.tcp_established_timeout = duration("-1s");
            c.conntrack.tcp_close_wait_timeout = duration("-2s");
            c.conntrack.udp_timeout = duration("-3s");
            c.conntrack.udp_stream_timeout = duration("-4s");
            "one".clone_into(&mut c.show_hidden_metrics_for_version);
            "xml".clone_into(&mut c.logging.format);
        }),
        [
            "clientConnection.burst: -1: must be at least 0",
            "logging.format: xml: must be text or json",
            "showHiddenMetricsForVersion: one: must be a version such as 1.35, or empty",
            "oomScoreAdj: -1001: must be from -1000 to 1000",
            "conntrack.maxPerCore: -1: must be at least 0",
            "conntrack.min: -2: must be at least 0",
            "conntrack.tcpEstablishedTimeout: -1s: must be at least 0",
            "conntrack.tcpCloseWaitTimeout: -2s: must be at least 0",
            "conntrack.udpTimeout: -3s: must be at least 0",
            "conntrack.udpStreamTimeout: -4s: must be at least 0",
        ]
    );
}

#[test]
fn i7_a21_node_port_addresses() {
    let of = |addresses: &[&str]| problems(|c| c.node_port_addresses = texts(addresses));
    assert_eq!(
        of(&["10.0.0.0/8", "primary", "10.0.0.1", "all"]),
        ["nodePortAddresses[2]: 10.0.0.1: must be an address range such as 10.0.0.0/8 or fd00::/8"]
    );
    let many = of(&["x"; 1000]);
    assert_eq!(
        (many.len(), &*many[100]),
        (101, "900 more values are wrong")
    );
    let cidrs = |addresses: &[&str]| {
        let settings = settings(|c| c.node_port_addresses = texts(addresses));
        settings
            .node
            .nodeport_addresses
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    assert_eq!(cidrs(&["primary"]), [""; 0]);
    assert_eq!(cidrs(&["all"]), ["0.0.0.0/0", "::/0"]);
    let is_local = |addresses: &[&str]| {
        let settings = settings(|c| c.node_port_addresses = texts(addresses));
        settings.node.nodeport_localhost
    };
    assert_eq!(is_local(&["primary"]), [false; 2]);
    assert_eq!(is_local(&["all"]), [false; 2]);
    assert_eq!(is_local(&["primary", "localhost"]), [true; 2]);
    assert_eq!(cidrs(&["primary", "localhost"]), [""; 0]);
    assert_eq!(cidrs(&["localhost"]), ["127.0.0.0/8", "::1/128"]);
    assert_eq!(
        cidrs(&["localhost", "10.0.0.0/8"]),
        ["10.0.0.0/8", "::1/128"],
        "IPv6 has loopback addresses, and so not all"
    );
    assert_eq!(
        cidrs(&["010.0.0.0/8", "fd00::/8"]),
        ["10.0.0.0/8", "fd00::/8"]
    );
}

/// A file that kube-proxy 1.37 accepts stops no agent.
#[test]
fn k1_k2_k5_words_and_ranges_in_any_mix() {
    let twice = |addresses: &[&str]| problems(|c| c.node_port_addresses = texts(addresses));
    for word in ["primary", "localhost", "all"] {
        let expected = format!("nodePortAddresses[2]: {word}: must be there once");
        assert_eq!(twice(&[word, "10.0.0.0/8", word]), [expected]);
    }
    for (mix, ranges, localhost) in [
        (
            &["primary", "192.168.1.0/24"][..],
            &["192.168.1.0/24"][..],
            [false; 2],
        ),
        (
            &["all", "10.0.0.0/8"],
            &["0.0.0.0/0", "::/0", "10.0.0.0/8"],
            [false; 2],
        ),
        (&["all", "primary"], &["0.0.0.0/0", "::/0"], [false; 2]),
        (&["::1/128", "primary"], &["::1/128"], [false, true]),
        (
            &["127.0.0.0/8", "10.0.0.0/8"],
            &["127.0.0.0/8", "10.0.0.0/8"],
            [true, false],
        ),
        (
            &["primary", "all", "localhost"],
            &["0.0.0.0/0", "::/0"],
            [true; 2],
        ),
    ] {
        let node = settings(|c| c.node_port_addresses = texts(mix)).node;
        let found: Vec<_> = node.nodeport_addresses.iter().map(ToString::to_string).collect();
        assert_eq!(found, ranges, "{mix:?}");
        assert_eq!(node.nodeport_localhost, localhost, "{mix:?}");
    }
}

/// A loopback range says where node ports may be, and `localhostNodePorts` of mode iptables that they are not.
#[test]
fn c8_a_loopback_range_does_not_bring_node_ports_back() {
    for (mode, served, word, expected) in [
        ("iptables", false, false, false),
        ("iptables", false, true, true),
        ("iptables", true, false, true),
        ("nftables", false, false, true),
    ] {
        let node = settings(|c| {
            mode.clone_into(&mut c.mode);
            c.iptables.localhost_node_ports = served;
            c.node_port_addresses = texts(&["10.0.0.0/8", "127.0.0.0/8"]);
            c.node_port_addresses.extend(word.then(|| "localhost".to_owned()));
        })
        .node;
        let v4 = node.nodeport_localhost[Family::V4 as usize];
        assert_eq!(v4, expected, "{mode} {served} {word}");
    }
}

/// kube-proxy takes one of each family; more than that are more ranges here.
#[test]
fn i7_cluster_cidrs_are_ranges() {
    let of = |text: &str| problems(|c| text.clone_into(&mut c.cluster_cidr));
    for (good, count) in [
        ("", 0),
        ("10.0.0.0/8", 1),
        ("10.0.0.0/8,fd00::/8", 2),
        ("fd00::/8, 10.0.0.0/8,11.0.0.0/8", 3),
    ] {
        assert_eq!(of(good), [""; 0], "{good}");
        let settings = settings(|c| good.clone_into(&mut c.cluster_cidr));
        assert_eq!(settings.node.cluster_cidrs.len(), count, "{good}");
    }
    assert_eq!(
        of("10.0.0.0,"),
        [
            "clusterCIDR: 10.0.0.0: must be an address range such as 10.0.0.0/8 or fd00::/8",
            "clusterCIDR: \"\": must be an address range such as 10.0.0.0/8 or fd00::/8"
        ]
    );
}

#[test]
fn i7_detect_local_modes() {
    let local = |mode: &str| {
        settings(|c| {
            mode.clone_into(&mut c.detect_local_mode);
            "10.0.0.0/8".clone_into(&mut c.cluster_cidr);
            "cbr0".clone_into(&mut c.detect_local.bridge_interface);
            "cali".clone_into(&mut c.detect_local.interface_name_prefix);
        })
    };
    let interface = |name: &str, prefix| Some(PodInterface::new(name, prefix).unwrap());
    for (mode, cidrs, node_cidr, pod_interface) in [
        ("ClusterCIDR", 1, false, None),
        ("", 1, false, None),
        ("NodeCIDR", 0, true, None),
        ("BridgeInterface", 0, false, interface("cbr0", false)),
        ("InterfaceNamePrefix", 0, false, interface("cali", true)),
    ] {
        let settings = local(mode);
        assert_eq!(settings.node.cluster_cidrs.len(), cidrs, "{mode}");
        assert_eq!(settings.node.node_cidr, node_cidr, "{mode}");
        assert_eq!(settings.backend.pod_interface, pod_interface, "{mode}");
    }
    assert_eq!(
        problems(|c| "Magic".clone_into(&mut c.detect_local_mode)),
        [
            "detectLocalMode: Magic: must be ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix"
        ]
    );
}

#[test]
fn i7_names_of_interfaces() {
    let of = |name: &str| {
        problems(|c| {
            "BridgeInterface".clone_into(&mut c.detect_local_mode);
            name.clone_into(&mut c.detect_local.bridge_interface);
        })
    };
    for good in ["x", "cbr0", "br-0_1.2@3", "a234567890abcde"] {
        assert_eq!(of(good), [""; 0], "{good}");
    }
    for bad in [
        "",
        "a234567890abcdef",
        "a/b",
        "a b",
        "a\tb",
        "a\"b",
        "a'b",
        "cali*",
        "a:b",
        ".",
        "..",
        "\u{e4}",
        "a\0b",
        "a\nb",
        "a\\b",
    ] {
        let problems = of(bad);
        assert_eq!(problems.len(), 1, "{bad:?}");
        assert!(
            problems[0].starts_with("detectLocal.bridgeInterface: ")
                && problems[0].contains("1 to 15 characters"),
            "{problems:?}"
        );
    }
}

#[test]
fn f6_zeros_leave_the_kernel_alone() {
    let conntrack = settings(|c| {
        c.conntrack.max_per_core = 0;
        c.conntrack.tcp_established_timeout = duration("0s");
        c.conntrack.udp_timeout = duration("1500ms");
    })
    .conntrack;
    assert_eq!(
        (conntrack.max_per_core, conntrack.tcp_established_timeout),
        (0, Duration::ZERO)
    );
    assert_eq!(conntrack.udp_timeout, Duration::from_millis(1500));
}

/// A field in the list of those that a running agent applies must have code that applies it.
#[test]
fn i3_fields_that_are_taken_over_are_those_that_shape_plans() {
    let mut wanted = Config::default();
    wanted.fill_defaults();
    "10.0.0.0/8".clone_into(&mut wanted.cluster_cidr);
    "10.0.0.1".clone_into(&mut wanted.bind_address);
    wanted.iptables.masquerade_all = true;
    wanted.node_port_addresses = vec!["10.0.0.0/8".to_owned()];
    let effective = kplane_kube_proxy_config::change(&Config::default(), &wanted).effective;
    assert_eq!(
        resolve(&effective).unwrap().node,
        resolve(&wanted).unwrap().node
    );
}

/// Every problem is one line, whatever text it quotes.
#[test]
fn i7_text_of_a_file_stays_on_the_line_of_the_problem() {
    let said = problems(|c| "\n\u{1b}".clone_into(&mut c.mode));
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(!said[0].contains(['\n', '\u{1b}']), "{said:?}");
}
