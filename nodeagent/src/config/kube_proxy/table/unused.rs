//! Flags that are accepted so that command lines of kube-proxy go on working.

use super::set::{decimal, feature_gates, number, period, quantity, switch, text, vmodule};
use super::{Kind, Row, row};

pub(super) const UNUSED: &[Row] = &[
    row(
        "feature-gates",
        Kind::List("KEY=BOOL"),
        "",
        &["featureGates"],
        "Kubernetes feature gates",
        feature_gates,
    ),
    row(
        "profiling",
        Kind::Switch,
        "",
        &["enableProfiling"],
        "Serve profiles beside the metrics",
        |c, v| switch(&mut c.enable_profiling, v),
    ),
    row(
        "kube-api-content-type",
        Kind::Value("TYPE"),
        "application/vnd.kubernetes.protobuf",
        &["clientConnection.contentType"],
        "Encoding of the Kubernetes API",
        |c, v| text(&mut c.client_connection.content_type, v),
    ),
    row(
        "kube-api-qps",
        Kind::Value("N"),
        "5",
        &["clientConnection.qps"],
        "Requests a second to the Kubernetes API",
        |c, v| decimal(&mut c.client_connection.qps, v),
    ),
    row(
        "kube-api-burst",
        Kind::Value("N"),
        "10",
        &["clientConnection.burst"],
        "Requests at once to the Kubernetes API",
        |c, v| number(&mut c.client_connection.burst, v),
    ),
    row(
        "config-sync-period",
        Kind::Value("DURATION"),
        "15m0s",
        &["configSyncPeriod"],
        "How often everything is listed again",
        |c, v| period(&mut c.config_sync_period, v),
    ),
    row(
        "show-hidden-metrics-for-version",
        Kind::Value("VERSION"),
        "",
        &["showHiddenMetricsForVersion"],
        "Show metrics that were hidden in this version",
        |c, v| text(&mut c.show_hidden_metrics_for_version, v),
    ),
    row(
        "iptables-min-sync-period",
        Kind::Value("DURATION"),
        "1s",
        &["iptables.minSyncPeriod", "nftables.minSyncPeriod"],
        "Changes are programmed at once, without a pause",
        |c, v| {
            period(&mut c.iptables.min_sync_period, v)?;
            period(&mut c.nftables.min_sync_period, v)
        },
    ),
    row(
        "ipvs-min-sync-period",
        Kind::Value("DURATION"),
        "0s",
        &["ipvs.minSyncPeriod"],
        "Changes are programmed at once, without a pause",
        |c, v| period(&mut c.ipvs.min_sync_period, v),
    ),
    row(
        "log-flush-frequency",
        Kind::Value("DURATION"),
        "5s",
        &["logging.flushFrequency"],
        "Log lines are never held back",
        |c, v| period(&mut c.logging.flush_frequency, v),
    )
    .beside_file(),
    row(
        "vmodule",
        Kind::List("FILE=LEVEL"),
        "",
        &["logging.vmodule"],
        "Verbosity of source files: RUST_LOG does that here",
        vmodule,
    )
    .beside_file(),
    row(
        "log-text-split-stream",
        Kind::Switch,
        "",
        &["logging.options.text.splitStream"],
        "Log lines go to standard error",
        |c, v| switch(&mut c.logging.options.text.split_stream, v),
    )
    .beside_file(),
    row(
        "log-text-info-buffer-size",
        Kind::Value("SIZE"),
        "0",
        &["logging.options.text.infoBufferSize"],
        "Log lines are never held back",
        |c, v| quantity(&mut c.logging.options.text.info_buffer_size, v),
    )
    .beside_file(),
    row(
        "log-json-split-stream",
        Kind::Switch,
        "",
        &["logging.options.json.splitStream"],
        "Log lines go to standard error",
        |c, v| switch(&mut c.logging.options.json.split_stream, v),
    )
    .beside_file(),
    row(
        "log-json-info-buffer-size",
        Kind::Value("SIZE"),
        "0",
        &["logging.options.json.infoBufferSize"],
        "Log lines are never held back",
        |c, v| quantity(&mut c.logging.options.json.info_buffer_size, v),
    )
    .beside_file(),
];

/// Flags with a port and no address. Their meaning depends on other flags, see
/// [`crate::config::kube_proxy::KubeProxyFlags`].
pub(super) const DEPRECATED: &[Row] = &[
    row(
        "healthz-port",
        Kind::Value("PORT"),
        "10256",
        &[],
        "Use --healthz-bind-address",
        |_, _| Ok(()),
    ),
    row(
        "metrics-port",
        Kind::Value("PORT"),
        "10249",
        &[],
        "Use --metrics-bind-address",
        |_, _| Ok(()),
    ),
];

pub(super) const WINDOWS: &[Row] = &[
    row(
        "network-name",
        Kind::Value("NAME"),
        "",
        &["winkernel.networkName"],
        "",
        |c, v| text(&mut c.winkernel.network_name, v),
    ),
    row(
        "source-vip",
        Kind::Value("IP"),
        "",
        &["winkernel.sourceVip"],
        "",
        |c, v| text(&mut c.winkernel.source_vip, v),
    ),
    row(
        "enable-dsr",
        Kind::Switch,
        "",
        &["winkernel.enableDSR"],
        "",
        |c, v| switch(&mut c.winkernel.enable_dsr, v),
    ),
    row(
        "root-hnsendpoint-name",
        Kind::Value("NAME"),
        "",
        &["winkernel.rootHnsEndpointName"],
        "",
        |c, v| text(&mut c.winkernel.root_hns_endpoint_name, v),
    ),
    row(
        "forward-healthcheck-vip",
        Kind::Switch,
        "",
        &["winkernel.forwardHealthCheckVip"],
        "",
        |c, v| switch(&mut c.winkernel.forward_health_check_vip, v),
    ),
    row(
        "windows-service",
        Kind::Switch,
        "",
        &["windowsRunAsService"],
        "",
        |c, v| switch(&mut c.windows_run_as_service, v),
    ),
];
