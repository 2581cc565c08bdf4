//! Flags that are accepted so that command lines of kube-proxy go on working.

use super::set::{decimal, feature_gates, number, period, quantity, switch, text, vmodule};
use super::{Kind, Row, row, value, values};

pub(super) const UNUSED: &[Row] = &[
    values("feature-gates", "KEY=BOOL", "")
        .help("Kubernetes feature gates")
        .fields(&["featureGates"])
        .set(feature_gates),
    row("profiling", Kind::Switch, "")
        .help("Serve profiles beside the metrics")
        .fields(&["enableProfiling"])
        .set(|c, v| switch(&mut c.enable_profiling, v)),
    value(
        "kube-api-content-type",
        "TYPE",
        "application/vnd.kubernetes.protobuf",
    )
    .help("Encoding of the Kubernetes API")
    .fields(&["clientConnection.contentType"])
    .set(|c, v| text(&mut c.client_connection.content_type, v)),
    value("kube-api-qps", "N", "5")
        .help("Requests a second to the Kubernetes API")
        .fields(&["clientConnection.qps"])
        .set(|c, v| decimal(&mut c.client_connection.qps, v)),
    value("kube-api-burst", "N", "10")
        .help("Requests at once to the Kubernetes API")
        .fields(&["clientConnection.burst"])
        .set(|c, v| number(&mut c.client_connection.burst, v)),
    value("config-sync-period", "DURATION", "15m0s")
        .help("How often everything is listed again")
        .fields(&["configSyncPeriod"])
        .set(|c, v| period(&mut c.config_sync_period, v)),
    value("show-hidden-metrics-for-version", "VERSION", "")
        .help("Show metrics that were hidden in this version")
        .fields(&["showHiddenMetricsForVersion"])
        .set(|c, v| text(&mut c.show_hidden_metrics_for_version, v)),
    value("iptables-min-sync-period", "DURATION", "1s")
        .help("Changes are programmed at once, without a pause")
        .fields(&["iptables.minSyncPeriod", "nftables.minSyncPeriod"])
        .set(|c, v| {
            period(&mut c.iptables.min_sync_period, v)?;
            period(&mut c.nftables.min_sync_period, v)
        }),
    value("ipvs-min-sync-period", "DURATION", "0s")
        .help("Changes are programmed at once, without a pause")
        .fields(&["ipvs.minSyncPeriod"])
        .set(|c, v| period(&mut c.ipvs.min_sync_period, v)),
    value("log-flush-frequency", "DURATION", "5s")
        .help("Log lines are never held back")
        .fields(&["logging.flushFrequency"])
        .set(|c, v| period(&mut c.logging.flush_frequency, v))
        .beside_file(),
    values("vmodule", "FILE=LEVEL", "")
        .help("Verbosity of source files: RUST_LOG does that here")
        .fields(&["logging.vmodule"])
        .set(vmodule)
        .beside_file(),
    row("log-text-split-stream", Kind::Switch, "")
        .help("Log lines go to standard error")
        .fields(&["logging.options.text.splitStream"])
        .set(|c, v| switch(&mut c.logging.options.text.split_stream, v))
        .beside_file(),
    value("log-text-info-buffer-size", "SIZE", "0")
        .help("Log lines are never held back")
        .fields(&["logging.options.text.infoBufferSize"])
        .set(|c, v| quantity(&mut c.logging.options.text.info_buffer_size, v))
        .beside_file(),
    row("log-json-split-stream", Kind::Switch, "")
        .help("Log lines go to standard error")
        .fields(&["logging.options.json.splitStream"])
        .set(|c, v| switch(&mut c.logging.options.json.split_stream, v))
        .beside_file(),
    value("log-json-info-buffer-size", "SIZE", "0")
        .help("Log lines are never held back")
        .fields(&["logging.options.json.infoBufferSize"])
        .set(|c, v| quantity(&mut c.logging.options.json.info_buffer_size, v))
        .beside_file(),
];

/// Flags with a port and no address. Their meaning depends on other flags, see
/// [`crate::config::kube_proxy::KubeProxyFlags`].
pub(super) const DEPRECATED: &[Row] = &[
    value("healthz-port", "PORT", "10256").help("Use --healthz-bind-address"),
    value("metrics-port", "PORT", "10249").help("Use --metrics-bind-address"),
];

pub(super) const WINDOWS: &[Row] = &[
    value("network-name", "NAME", "")
        .fields(&["winkernel.networkName"])
        .set(|c, v| text(&mut c.winkernel.network_name, v)),
    value("source-vip", "IP", "")
        .fields(&["winkernel.sourceVip"])
        .set(|c, v| text(&mut c.winkernel.source_vip, v)),
    row("enable-dsr", Kind::Switch, "")
        .fields(&["winkernel.enableDSR"])
        .set(|c, v| switch(&mut c.winkernel.enable_dsr, v)),
    value("root-hnsendpoint-name", "NAME", "")
        .fields(&["winkernel.rootHnsEndpointName"])
        .set(|c, v| text(&mut c.winkernel.root_hns_endpoint_name, v)),
    row("forward-healthcheck-vip", Kind::Switch, "")
        .fields(&["winkernel.forwardHealthCheckVip"])
        .set(|c, v| switch(&mut c.winkernel.forward_health_check_vip, v)),
    row("windows-service", Kind::Switch, "")
        .fields(&["windowsRunAsService"])
        .set(|c, v| switch(&mut c.windows_run_as_service, v)),
];
