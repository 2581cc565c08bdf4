//! Flags that have an effect.

use super::set::{list, number, period, switch, text, verbosity};
use super::{Kind, Row, row};

pub(super) const NODE: &[Row] = &[
    row(
        "hostname-override",
        Kind::Value("NAME"),
        "",
        &["hostnameOverride"],
        "Name of the node, as in its Node object [default: $NODE_NAME, or the host's name]",
        |c, v| match v {
            // An empty value has no effect, as in kube-proxy.
            "" => Ok(()),
            name => text(&mut c.hostname_override, name),
        },
    )
    .alias("node-name")
    .beside_file(),
    row(
        "bind-address",
        Kind::Value("IP"),
        "0.0.0.0",
        &["bindAddress"],
        "The node's primary address; 0.0.0.0 or :: for that of its Node object",
        |c, v| text(&mut c.bind_address, v),
    ),
    row(
        "oom-score-adj",
        Kind::Value("-1000..1000"),
        "-999",
        &["oomScoreAdj"],
        "How early the kernel ends this program when memory runs out",
        |c, v| number(&mut c.oom_score_adj, v),
    ),
];

pub(super) const API: &[Row] = &[
    row(
        "kubeconfig",
        Kind::Value("FILE"),
        "",
        &["clientConnection.kubeconfig"],
        "Address of the Kubernetes API and credentials for it [default: those of the pod]",
        |c, v| text(&mut c.client_connection.kubeconfig, v),
    )
    .beside_file(),
    row(
        "master",
        Kind::Value("URL"),
        "",
        &[],
        "Another address of the Kubernetes API than the kubeconfig's",
        |_, _| Ok(()),
    )
    .beside_file(),
];

pub(super) const RULES: &[Row] = &[
    row(
        "proxy-mode",
        Kind::Value("MODE"),
        "",
        &["mode"],
        "nftables, iptables, ipvs or userspace; empty means nftables",
        |c, v| text(&mut c.mode, v),
    ),
    row(
        "nodeport-addresses",
        Kind::List("CIDR"),
        "primary",
        &["nodePortAddresses"],
        "Addresses of the node that serve node ports: ranges, `primary` for the node's address, or \
         `all` (default of iptables and ipvs); `localhost` beside them adds loopback addresses",
        |c, v| list(&mut c.node_port_addresses, v),
    ),
    row(
        "masquerade-all",
        Kind::Switch,
        "",
        &["iptables.masqueradeAll", "nftables.masqueradeAll"],
        "Masquerade all traffic to ClusterIPs",
        |c, v| {
            switch(&mut c.iptables.masquerade_all, v)?;
            switch(&mut c.nftables.masquerade_all, v)
        },
    ),
    row(
        "iptables-masquerade-bit",
        Kind::Value("0-31"),
        "14",
        &["iptables.masqueradeBit", "nftables.masqueradeBit"],
        "Bit of the packet mark that asks for masquerading",
        |c, v| {
            number(&mut c.iptables.masquerade_bit, v)?;
            number(&mut c.nftables.masquerade_bit, v)
        },
    )
    .alias("masquerade-bit"),
    row(
        "iptables-localhost-nodeports",
        Kind::Switch,
        "true",
        &["iptables.localhostNodePorts"],
        "Mode iptables: serve node ports on 127.0.0.1 too",
        |c, v| switch(&mut c.iptables.localhost_node_ports, v),
    ),
    row(
        "iptables-sync-period",
        Kind::Value("DURATION"),
        "30s",
        &["iptables.syncPeriod", "nftables.syncPeriod"],
        "Health checks fail when a change is not programmed within twice this time",
        |c, v| {
            period(&mut c.iptables.sync_period, v)?;
            period(&mut c.nftables.sync_period, v)
        },
    ),
    row(
        "ipvs-scheduler",
        Kind::Value("NAME"),
        "",
        &["ipvs.scheduler"],
        "How virtual servers spread connections (mode ipvs); empty means rr",
        |c, v| text(&mut c.ipvs.scheduler, v),
    ),
    row(
        "ipvs-sync-period",
        Kind::Value("DURATION"),
        "30s",
        &["ipvs.syncPeriod"],
        "A node counts as unhealthy when changes fail for twice as long (mode ipvs)",
        |c, v| period(&mut c.ipvs.sync_period, v),
    ),
    row(
        "ipvs-exclude-cidrs",
        Kind::List("CIDR"),
        "",
        &["ipvs.excludeCIDRs"],
        "Virtual servers on these addresses are never removed (mode ipvs)",
        |c, v| list(&mut c.ipvs.exclude_cidrs, v),
    ),
    row(
        "ipvs-strict-arp",
        Kind::Switch,
        "",
        &["ipvs.strictARP"],
        "Answer ARP only for addresses of the requested device (mode ipvs)",
        |c, v| switch(&mut c.ipvs.strict_arp, v),
    ),
    row(
        "ipvs-tcp-timeout",
        Kind::Value("DURATION"),
        "0s",
        &["ipvs.tcpTimeout"],
        "Time after which idle TCP connections are forgotten; 0s keeps the kernel's value (mode \
         ipvs)",
        |c, v| period(&mut c.ipvs.tcp_timeout, v),
    ),
    row(
        "ipvs-tcpfin-timeout",
        Kind::Value("DURATION"),
        "0s",
        &["ipvs.tcpFinTimeout"],
        "Time after a FIN after which TCP connections are forgotten; 0s keeps the kernel's value \
         (mode ipvs)",
        |c, v| period(&mut c.ipvs.tcp_fin_timeout, v),
    ),
    row(
        "ipvs-udp-timeout",
        Kind::Value("DURATION"),
        "0s",
        &["ipvs.udpTimeout"],
        "Time after which UDP flows are forgotten; 0s keeps the kernel's value (mode ipvs)",
        |c, v| period(&mut c.ipvs.udp_timeout, v),
    ),
];

pub(super) const DETECT: &[Row] = &[
    row(
        "detect-local-mode",
        Kind::Value("MODE"),
        "ClusterCIDR",
        &["detectLocalMode"],
        "By ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix",
        |c, v| text(&mut c.detect_local_mode, v),
    ),
    row(
        "cluster-cidr",
        Kind::List("CIDR"),
        "",
        &["clusterCIDR"],
        "Address ranges of the cluster's pods, for ClusterCIDR",
        |c, v| text(&mut c.cluster_cidr, v),
    ),
    row(
        "pod-bridge-interface",
        Kind::Value("NAME"),
        "",
        &["detectLocal.bridgeInterface"],
        "Bridge of the node's pods, for BridgeInterface",
        |c, v| text(&mut c.detect_local.bridge_interface, v),
    ),
    row(
        "pod-interface-name-prefix",
        Kind::Value("PREFIX"),
        "",
        &["detectLocal.interfaceNamePrefix"],
        "Beginning of the names of pods' interfaces, for InterfaceNamePrefix",
        |c, v| text(&mut c.detect_local.interface_name_prefix, v),
    ),
];

pub(super) const SERVERS: &[Row] = &[
    row(
        "healthz-bind-address",
        Kind::Value("IP:PORT"),
        "0.0.0.0:10256",
        &["healthzBindAddress"],
        "Where /healthz and /livez are served; empty for nowhere",
        |c, v| text(&mut c.healthz_bind_address, v),
    ),
    row(
        "metrics-bind-address",
        Kind::Value("IP:PORT"),
        "127.0.0.1:10249",
        &["metricsBindAddress"],
        "Where metrics are served; empty for nowhere",
        |c, v| text(&mut c.metrics_bind_address, v),
    ),
    row(
        "bind-address-hard-fail",
        Kind::Switch,
        "",
        &["bindAddressHardFail"],
        "Exit when a port is taken, instead of trying again",
        |c, v| switch(&mut c.bind_address_hard_fail, v),
    ),
];

pub(super) const CONNTRACK: &[Row] = &[
    row(
        "conntrack-max-per-core",
        Kind::Value("N"),
        "32768",
        &["conntrack.maxPerCore"],
        "Connections for each core; 0 leaves the limit as it is",
        |c, v| number(&mut c.conntrack.max_per_core, v),
    ),
    row(
        "conntrack-min",
        Kind::Value("N"),
        "131072",
        &["conntrack.min"],
        "Least number of connections, however few cores there are",
        |c, v| number(&mut c.conntrack.min, v),
    ),
    row(
        "conntrack-tcp-timeout-established",
        Kind::Value("DURATION"),
        "24h0m0s",
        &["conntrack.tcpEstablishedTimeout"],
        "For idle TCP connections; 0 leaves it as it is",
        |c, v| period(&mut c.conntrack.tcp_established_timeout, v),
    ),
    row(
        "conntrack-tcp-timeout-close-wait",
        Kind::Value("DURATION"),
        "1h0m0s",
        &["conntrack.tcpCloseWaitTimeout"],
        "For half-closed TCP connections; 0 leaves it as it is",
        |c, v| period(&mut c.conntrack.tcp_close_wait_timeout, v),
    ),
    row(
        "conntrack-tcp-be-liberal",
        Kind::Switch,
        "",
        &["conntrack.tcpBeLiberal"],
        "TCP packets outside of the window are not invalid",
        |c, v| switch(&mut c.conntrack.tcp_be_liberal, v),
    ),
    row(
        "conntrack-udp-timeout",
        Kind::Value("DURATION"),
        "0s",
        &["conntrack.udpTimeout"],
        "For UDP without an answer; 0 leaves it as it is",
        |c, v| period(&mut c.conntrack.udp_timeout, v),
    ),
    row(
        "conntrack-udp-timeout-stream",
        Kind::Value("DURATION"),
        "0s",
        &["conntrack.udpStreamTimeout"],
        "For UDP with an answer; 0 leaves it as it is",
        |c, v| period(&mut c.conntrack.udp_stream_timeout, v),
    ),
];

pub(super) const LOGGING: &[Row] = &[
    row(
        "v",
        Kind::Verbosity,
        "0",
        &["logging.verbosity"],
        "How much is logged: -v (4) explains, -vv (6) is everything",
        |c, v| verbosity(&mut c.logging.verbosity, v),
    )
    .beside_file(),
    row(
        "logging-format",
        Kind::Value("FORMAT"),
        "text",
        &["logging.format"],
        "How log lines look: text, or json for one object a line",
        |c, v| text(&mut c.logging.format, v),
    )
    .alias("log-format")
    .beside_file(),
];
