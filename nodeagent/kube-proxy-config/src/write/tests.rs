//! Tests of writing: what is written reads back to the same.

use proptest::prelude::*;

use super::*;
use crate::duration::GoDuration;
use crate::quantity::Quantity;
use crate::read::document;
use crate::types::*;

/// Texts that YAML takes for something else unless they are quoted, and any others.
fn text() -> impl Strategy<Value = String> {
    let tricky = [
        "",
        "yes",
        "no",
        "null",
        "~",
        "true",
        "1",
        "0x1F",
        "1e3",
        ".inf",
        "a: b",
        "# x",
        "- x",
        "'",
        "\"",
        " x ",
        "[x]",
        "{x}",
        "&a",
        "*a",
        "!t",
        "|",
        ">",
        "%x",
        "@x",
        "`x",
        "x\ny",
        "\t",
        "::",
        "12:30:45",
        "2026-11-21",
        "0o7",
        "...",
        "---",
        "\u{feff}x",
        "\u{85}",
        "\u{2028}",
    ];
    prop_oneof![
        proptest::sample::select(tricky.map(str::to_owned).to_vec()),
        "\\PC{0,20}",
        "[ -~\n\t]{0,20}",
    ]
}

fn duration() -> impl Strategy<Value = GoDuration> {
    any::<i64>().prop_map(GoDuration::from_nanos)
}

fn quantity() -> impl Strategy<Value = Quantity> {
    "[0-9]{1,9}(Ki|Mi|k)?".prop_map(|text| Quantity::parse(&text).unwrap())
}

prop_compose! {
    fn top()(
        hostname_override in text(), bind_address in text(), healthz_bind_address in text(),
        metrics_bind_address in text(), mode in text(), detect_local_mode in text(),
        cluster_cidr in text(), port_range in text(), show in text(),
        node_port_addresses in prop::collection::vec(text(), 0..4),
        feature_gates in prop::collection::btree_map(text(), any::<bool>(), 0..4),
    ) -> KubeProxyConfiguration {
        KubeProxyConfiguration {
            hostname_override, bind_address, healthz_bind_address, metrics_bind_address, mode,
            detect_local_mode, cluster_cidr, port_range, node_port_addresses, feature_gates,
            show_hidden_metrics_for_version: show,
            ..KubeProxyConfiguration::default()
        }
    }
}

prop_compose! {
    fn logging()(
        format in text(), flush_frequency in duration(), verbosity: u32,
        split_stream: bool, info_buffer_size in quantity(),
        vmodule in prop::collection::vec((text(), any::<u32>()), 0..3),
    ) -> Logging {
        let vmodule = vmodule
            .into_iter()
            .map(|(file_pattern, verbosity)| Vmodule { file_pattern, verbosity });
        Logging {
            format, flush_frequency, verbosity,
            vmodule: vmodule.collect(),
            options: FormatOptions {
                text: OutputRouting { split_stream, info_buffer_size },
                json: OutputRouting::default(),
            },
        }
    }
}

prop_compose! {
    fn sections()(
        bit: i32, all: bool, localhost: bool, period in duration(), min in duration(),
        scheduler in text(), exclude in prop::collection::vec(text(), 0..3),
        name in text(), dsr: bool, interface in text(),
    ) -> (Iptables, Ipvs, Nftables, Winkernel, DetectLocal) {
        (
            Iptables {
                masquerade_bit: bit, masquerade_all: all, localhost_node_ports: localhost,
                sync_period: period, min_sync_period: min,
            },
            Ipvs {
                sync_period: min, min_sync_period: period, scheduler: scheduler.clone(),
                exclude_cidrs: exclude, strict_arp: all, tcp_timeout: period,
                tcp_fin_timeout: min, udp_timeout: period,
            },
            Nftables {
                masquerade_bit: bit, masquerade_all: all, sync_period: period,
                min_sync_period: min,
            },
            Winkernel {
                network_name: name.clone(), source_vip: name, enable_dsr: dsr,
                root_hns_endpoint_name: scheduler, forward_health_check_vip: dsr,
            },
            DetectLocal { bridge_interface: interface.clone(), interface_name_prefix: interface },
        )
    }
}

prop_compose! {
    fn configuration()(
        top in top(), logging in logging(), sections in sections(),
        hard_fail: bool, oom_score_adj: i32, config_sync_period in duration(),
        numbers in (any::<i32>(), any::<i32>(), -1e30..1e30_f64), liberal: bool,
        timeouts in (duration(), duration(), duration(), duration()), kubeconfig in text(),
    ) -> KubeProxyConfiguration {
        let (iptables, ipvs, nftables, winkernel, detect_local) = sections;
        let mut config = KubeProxyConfiguration {
            logging, iptables, ipvs, nftables, winkernel, detect_local, oom_score_adj,
            config_sync_period,
            bind_address_hard_fail: hard_fail, enable_profiling: hard_fail,
            windows_run_as_service: liberal,
            client_connection: ClientConnection {
                kubeconfig, burst: numbers.0, qps: numbers.2, ..ClientConnection::default()
            },
            conntrack: Conntrack {
                max_per_core: numbers.0, min: numbers.1, tcp_be_liberal: liberal,
                tcp_established_timeout: timeouts.0, tcp_close_wait_timeout: timeouts.1,
                udp_timeout: timeouts.2, udp_stream_timeout: timeouts.3,
            },
            ..top
        };
        config.fill_defaults();
        config
    }
}

proptest! {
    #[test]
    fn what_is_written_reads_back_to_the_same(config in configuration()) {
        let yaml = to_yaml(&config).unwrap();
        let read = document(&yaml).unwrap();
        prop_assert_eq!(read.warning, None, "{}", yaml);
        prop_assert_eq!(read.problems, vec![], "{}", yaml);
        prop_assert_eq!(read.config, config, "{}", yaml);
    }

    #[test]
    fn filling_in_defaults_twice_changes_nothing(config in configuration()) {
        let mut again = config.clone();
        again.fill_defaults();
        prop_assert_eq!(again, config);
    }
}

/// Fields of v1alpha1 as kube-proxy writes them, which sorts them by name.
const FIELDS: &str = "apiVersion bindAddress bindAddressHardFail clientConnection clusterCIDR
    configSyncPeriod conntrack detectLocal detectLocalMode enableProfiling featureGates
    healthzBindAddress hostnameOverride iptables ipvs kind logging metricsBindAddress mode nftables
    nodePortAddresses oomScoreAdj portRange showHiddenMetricsForVersion windowsRunAsService
    winkernel";

/// Fields of the sections, in the order of the sections.
const INNER_FIELDS: &str = "acceptContentTypes burst contentType kubeconfig qps
    maxPerCore min tcpBeLiberal tcpCloseWaitTimeout tcpEstablishedTimeout udpStreamTimeout
    udpTimeout
    bridgeInterface interfaceNamePrefix
    localhostNodePorts masqueradeAll masqueradeBit minSyncPeriod syncPeriod
    excludeCIDRs minSyncPeriod scheduler strictARP syncPeriod tcpFinTimeout tcpTimeout udpTimeout
    flushFrequency format options verbosity vmodule
    masqueradeAll masqueradeBit minSyncPeriod syncPeriod
    enableDSR forwardHealthCheckVip networkName rootHnsEndpointName sourceVip";

#[test]
fn i1_the_order_of_fields_is_that_of_kube_proxy() {
    let yaml = to_yaml(&KubeProxyConfiguration::default()).unwrap();
    let fields = |indent: usize| {
        yaml.lines()
            .filter(move |line| {
                line.len() - line.trim_start().len() == indent
                    && !line.trim_start().starts_with('-')
            })
            .map(|line| line.trim().split(':').next().unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(fields(0), FIELDS.split_whitespace().collect::<Vec<_>>());
    let inner: Vec<_> = INNER_FIELDS.split_whitespace().collect();
    assert_eq!(fields(2), inner);
}

#[test]
fn a_file_that_cannot_be_written_is_named() {
    let error = to_file(
        &KubeProxyConfiguration::default(),
        Path::new("/no/such/file"),
    )
    .unwrap_err()
    .to_string();
    assert_eq!(error, "--write-config-to /no/such/file: cannot be written");
}
