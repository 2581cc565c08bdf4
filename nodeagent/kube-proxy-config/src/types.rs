//! `KubeProxyConfiguration` of `kubeproxy.config.k8s.io/v1alpha1`: every field, with kube-proxy's
//! defaults. The agent's `config::kube_proxy::settings` defines what the fields mean to it.
//!
//! A value of `Default` is complete: kube-proxy fills in defaults for absent fields and, for most,
//! also for empty texts and zeros ([`KubeProxyConfiguration::fill_defaults`]).

use std::collections::BTreeMap;
use std::net::IpAddr;

use kplane_model::{HEALTHZ_PORT, METRICS_PORT, parse_ip};
use serde::{Deserialize, Serialize};

use super::address::{default_hosts, with_port};
use super::duration::{self, GoDuration};
use super::quantity::Quantity;

/// The only version that kube-proxy reads.
pub const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";

/// The kind of the file.
pub const KIND: &str = "KubeProxyConfiguration";

const CONTENT_TYPE: &str = "application/vnd.kubernetes.protobuf";
const QPS: f64 = 5.0;
const BURST: i32 = 10;
const MASQUERADE_BIT: i32 = 14;
const OOM_SCORE_ADJ: i32 = -999;
const MAX_PER_CORE: i32 = 32 * 1024;
const MIN_ENTRIES: i32 = 128 * 1024;
const SYNC_PERIOD: GoDuration = GoDuration::from_secs(30);
const MIN_SYNC_PERIOD: GoDuration = GoDuration::from_secs(1);
const CONFIG_SYNC_PERIOD: GoDuration = GoDuration::from_secs(15 * 60);
const FLUSH_FREQUENCY: GoDuration = GoDuration::from_secs(5);
const TCP_ESTABLISHED: GoDuration = GoDuration::from_secs(24 * 3_600);
const TCP_CLOSE_WAIT: GoDuration = GoDuration::from_secs(3_600);

/// The whole configuration of kube-proxy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default = "KubeProxyConfiguration::unsaid")]
pub struct KubeProxyConfiguration {
    /// [`API_VERSION`].
    pub api_version: String,
    /// [`KIND`].
    pub kind: String,
    /// The feature gates by name.
    pub feature_gates: BTreeMap<String, bool>,
    /// The connection to the Kubernetes API.
    pub client_connection: ClientConnection,
    /// The settings of the log.
    pub logging: Logging,
    /// Name of the node; empty = the host's name.
    pub hostname_override: String,
    /// The node's primary address; `0.0.0.0` and `::` = the Node object's.
    pub bind_address: String,
    /// IP and port of the health checks; empty (flags only) = none.
    pub healthz_bind_address: String,
    /// IP and port of the metrics; empty (flags only) = none.
    pub metrics_bind_address: String,
    /// Whether a port that is taken ends the program.
    pub bind_address_hard_fail: bool,
    /// Whether to serve profiles next to the metrics.
    pub enable_profiling: bool,
    /// The version whose hidden metrics to show.
    pub show_hidden_metrics_for_version: String,
    /// `iptables`, `ipvs`, `nftables` or empty.
    pub mode: String,
    /// Settings of mode `iptables`; masquerading of mode `ipvs` as well.
    pub iptables: Iptables,
    /// Settings of mode `ipvs`.
    pub ipvs: Ipvs,
    /// Settings of mode `nftables`.
    pub nftables: Nftables,
    /// Settings for Windows.
    pub winkernel: Winkernel,
    /// `ClusterCIDR`, `NodeCIDR`, `BridgeInterface`, `InterfaceNamePrefix`; empty = `ClusterCIDR`.
    pub detect_local_mode: String,
    /// Interfaces for `detect_local_mode`.
    pub detect_local: DetectLocal,
    /// Ranges of pods, separated by commas; kube-proxy takes one of each family at most.
    #[serde(rename = "clusterCIDR")]
    pub cluster_cidr: String,
    /// Ranges of the node's addresses that serve node ports, or `primary` alone (A21).
    pub node_port_addresses: Vec<String>,
    /// The value for `/proc/self/oom_score_adj`, -1000..=1000.
    pub oom_score_adj: i32,
    /// Settings of connection tracking (F6).
    pub conntrack: Conntrack,
    /// Interval at which informers list everything again.
    pub config_sync_period: GoDuration,
    /// A field that kube-proxy itself does not use.
    pub port_range: String,
    /// A field that kube-proxy had until 1.25, for mode `userspace`: time without a datagram after which a UDP flow ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub udp_idle_timeout: Option<GoDuration>,
    /// Whether to run as a Windows service.
    pub windows_run_as_service: bool,
}

/// The connection to the Kubernetes API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "kube-proxy's names, without meaning to us")]
pub struct ClientConnection {
    pub kubeconfig: String,
    pub accept_content_types: String,
    pub content_type: String,
    pub qps: f64,
    pub burst: i32,
}

/// The settings of the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Logging {
    /// `text` or `json`.
    pub format: String,
    /// A field that is not used: lines are written at once.
    #[serde(deserialize_with = "duration::or_nanoseconds")]
    pub flush_frequency: GoDuration,
    /// The verbosity; 0 is the lowest.
    pub verbosity: u32,
    /// A field that is not used: verbosity of single source files.
    pub vmodule: Vec<Vmodule>,
    /// A field that is not used: streams and buffers.
    pub options: FormatOptions,
}

/// Verbosity of some source files.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "kube-proxy's names, without meaning to us")]
pub struct Vmodule {
    pub file_pattern: String,
    pub verbosity: u32,
}

/// Options of each log format.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "kube-proxy's names, without meaning to us")]
pub struct FormatOptions {
    pub text: OutputRouting,
    pub json: OutputRouting,
}

/// The destination of log lines.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "kube-proxy's names, without meaning to us")]
pub struct OutputRouting {
    pub split_stream: bool,
    pub info_buffer_size: Quantity,
}

/// Settings of mode `iptables`; masquerading of mode `ipvs` as well.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Iptables {
    /// Bit of the packet mark that asks for masquerading, 0..=31.
    pub masquerade_bit: i32,
    /// Whether to masquerade all traffic to ClusterIPs (A17).
    pub masquerade_all: bool,
    /// Whether node ports are served on 127.0.0.1, in mode iptables only.
    pub localhost_node_ports: bool,
    /// The sync period; must be positive.
    pub sync_period: GoDuration,
    /// The least time between two syncs, 0..=`sync_period`.
    pub min_sync_period: GoDuration,
}

/// Settings of mode `ipvs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "kube-proxy's names, without meaning to us")]
pub struct Ipvs {
    pub sync_period: GoDuration,
    pub min_sync_period: GoDuration,
    pub scheduler: String,
    #[serde(rename = "excludeCIDRs")]
    pub exclude_cidrs: Vec<String>,
    #[serde(rename = "strictARP")]
    pub strict_arp: bool,
    pub tcp_timeout: GoDuration,
    pub tcp_fin_timeout: GoDuration,
    pub udp_timeout: GoDuration,
}

/// Settings of mode `nftables`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Nftables {
    /// Bit of the packet mark that asks for masquerading, 0..=31.
    pub masquerade_bit: i32,
    /// Whether to masquerade all traffic to ClusterIPs (A17).
    pub masquerade_all: bool,
    /// The sync period; must be positive.
    pub sync_period: GoDuration,
    /// The least time between two syncs, 0..=`sync_period`.
    pub min_sync_period: GoDuration,
}

/// Settings for Windows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "kube-proxy's names, without meaning to us")]
pub struct Winkernel {
    pub network_name: String,
    pub source_vip: String,
    #[serde(rename = "enableDSR")]
    pub enable_dsr: bool,
    pub root_hns_endpoint_name: String,
    pub forward_health_check_vip: bool,
}

/// Interfaces for `detectLocalMode`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DetectLocal {
    /// The interface for `BridgeInterface`.
    pub bridge_interface: String,
    /// The prefix for `InterfaceNamePrefix`.
    pub interface_name_prefix: String,
}

/// Settings of connection tracking (F6).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conntrack {
    /// Connections for each core; 0 = keep the kernel's limit.
    pub max_per_core: i32,
    /// Least number of connections.
    pub min: i32,
    /// The timeout of established TCP connections; 0 = keep the kernel's value, also for all fields
    /// below.
    pub tcp_established_timeout: GoDuration,
    /// The timeout of half-closed TCP connections.
    pub tcp_close_wait_timeout: GoDuration,
    /// Whether packets outside of the TCP window are not INVALID.
    pub tcp_be_liberal: bool,
    /// The timeout of UDP flows without an answer.
    pub udp_timeout: GoDuration,
    /// The timeout of UDP flows with an answer.
    pub udp_stream_timeout: GoDuration,
}

// === defaults ===

impl Default for KubeProxyConfiguration {
    fn default() -> Self {
        let mut config = Self::unsaid();
        config.fill_defaults();
        config
    }
}

impl KubeProxyConfiguration {
    /// Returns the configuration of an empty file: fields that depend on others are empty.
    fn unsaid() -> Self {
        Self {
            api_version: API_VERSION.to_owned(),
            kind: KIND.to_owned(),
            feature_gates: BTreeMap::new(),
            client_connection: ClientConnection::default(),
            logging: Logging::default(),
            hostname_override: String::new(),
            bind_address: String::new(),
            healthz_bind_address: String::new(),
            metrics_bind_address: String::new(),
            bind_address_hard_fail: false,
            enable_profiling: false,
            show_hidden_metrics_for_version: String::new(),
            mode: String::new(),
            iptables: Iptables::default(),
            ipvs: Ipvs::default(),
            nftables: Nftables::default(),
            winkernel: Winkernel::default(),
            detect_local_mode: String::new(),
            detect_local: DetectLocal::default(),
            cluster_cidr: String::new(),
            node_port_addresses: Vec::new(),
            oom_score_adj: OOM_SCORE_ADJ,
            conntrack: Conntrack::default(),
            config_sync_period: CONFIG_SYNC_PERIOD,
            port_range: String::new(),
            udp_idle_timeout: None,
            windows_run_as_service: false,
        }
    }

    /// Returns whether the mode serves node ports on all addresses if the list of them is empty (A21).
    pub fn serves_all_by_default(&self) -> bool {
        matches!(&*self.mode, "iptables" | "ipvs")
    }

    /// Fills in the default of the node port addresses. A list that means all addresses stays
    /// empty.
    pub fn fill_node_port_addresses(&mut self) {
        if self.node_port_addresses.is_empty() && !self.serves_all_by_default() {
            self.node_port_addresses = vec!["primary".to_owned()];
        }
    }

    /// Replaces empty texts and zeros of a file as kube-proxy does. A second call changes nothing.
    pub fn fill_defaults(&mut self) {
        let or = |text: &mut String, default: &str| {
            if text.is_empty() {
                default.clone_into(text);
            }
        };
        or(&mut self.bind_address, "0.0.0.0");
        self.fill_addresses();
        or(&mut self.detect_local_mode, "ClusterCIDR");
        self.fill_node_port_addresses();
        or(&mut self.client_connection.content_type, CONTENT_TYPE);
        if self.client_connection.qps == 0.0 {
            self.client_connection.qps = QPS;
        }
        if self.client_connection.burst == 0 {
            self.client_connection.burst = BURST;
        }
        or(&mut self.logging.format, "text");
        let periods = [
            (&mut self.logging.flush_frequency, FLUSH_FREQUENCY),
            (&mut self.config_sync_period, CONFIG_SYNC_PERIOD),
            (&mut self.iptables.sync_period, SYNC_PERIOD),
            (&mut self.iptables.min_sync_period, MIN_SYNC_PERIOD),
            (&mut self.ipvs.sync_period, SYNC_PERIOD),
            (&mut self.nftables.sync_period, SYNC_PERIOD),
            (&mut self.nftables.min_sync_period, MIN_SYNC_PERIOD),
        ];
        for (period, default) in periods {
            if *period == GoDuration::ZERO {
                *period = default;
            }
        }
    }

    /// Fills in the addresses: health checks on every address and metrics on loopback, of the
    /// family of `bindAddress`.
    pub fn fill_addresses(&mut self) {
        let v6 = matches!(parse_ip(&self.bind_address), Ok(IpAddr::V6(_)));
        let (everywhere, loopback) = default_hosts(v6);
        for (address, host, port) in [
            (&mut self.healthz_bind_address, everywhere, HEALTHZ_PORT),
            (&mut self.metrics_bind_address, loopback, METRICS_PORT),
        ] {
            if address.is_empty() {
                host.clone_into(address);
            }
            *address = with_port(address, port);
        }
    }
}

impl Default for ClientConnection {
    fn default() -> Self {
        Self {
            kubeconfig: String::new(),
            accept_content_types: String::new(),
            content_type: CONTENT_TYPE.to_owned(),
            qps: QPS,
            burst: BURST,
        }
    }
}

impl Default for Logging {
    fn default() -> Self {
        Self {
            format: "text".to_owned(),
            flush_frequency: FLUSH_FREQUENCY,
            verbosity: 0,
            vmodule: Vec::new(),
            options: FormatOptions::default(),
        }
    }
}

impl Default for Iptables {
    fn default() -> Self {
        Self {
            masquerade_bit: MASQUERADE_BIT,
            masquerade_all: false,
            localhost_node_ports: true,
            sync_period: SYNC_PERIOD,
            min_sync_period: MIN_SYNC_PERIOD,
        }
    }
}

impl Default for Ipvs {
    fn default() -> Self {
        Self {
            sync_period: SYNC_PERIOD,
            min_sync_period: GoDuration::ZERO,
            scheduler: String::new(),
            exclude_cidrs: Vec::new(),
            strict_arp: false,
            tcp_timeout: GoDuration::ZERO,
            tcp_fin_timeout: GoDuration::ZERO,
            udp_timeout: GoDuration::ZERO,
        }
    }
}

impl Default for Nftables {
    fn default() -> Self {
        Self {
            masquerade_bit: MASQUERADE_BIT,
            masquerade_all: false,
            sync_period: SYNC_PERIOD,
            min_sync_period: MIN_SYNC_PERIOD,
        }
    }
}

impl Default for Conntrack {
    fn default() -> Self {
        Self {
            max_per_core: MAX_PER_CORE,
            min: MIN_ENTRIES,
            tcp_established_timeout: TCP_ESTABLISHED,
            tcp_close_wait_timeout: TCP_CLOSE_WAIT,
            tcp_be_liberal: false,
            udp_timeout: GoDuration::ZERO,
            udp_stream_timeout: GoDuration::ZERO,
        }
    }
}
