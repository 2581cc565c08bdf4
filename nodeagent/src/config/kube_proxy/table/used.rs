//! Flags that have an effect.

use super::set::{list, number, period, switch, text, verbosity};
use super::{Kind, Row, row, value, values};

pub(super) const NODE: &[Row] = &[
    value("hostname-override", "NAME", "")
        .help("Name of the node, as in its Node object [default: $NODE_NAME, or the host's name]")
        .fields(&["hostnameOverride"])
        .set(|c, v| match v {
            // An empty value has no effect, as in kube-proxy.
            "" => Ok(()),
            name => text(&mut c.hostname_override, name),
        })
        .alias("node-name")
        .beside_file(),
    value("bind-address", "IP", "0.0.0.0")
        .help("The node's primary address; 0.0.0.0 or :: for that of its Node object")
        .fields(&["bindAddress"])
        .set(|c, v| text(&mut c.bind_address, v)),
    value("oom-score-adj", "-1000..1000", "-999")
        .help("How early the kernel ends this program when memory runs out")
        .fields(&["oomScoreAdj"])
        .set(|c, v| number(&mut c.oom_score_adj, v)),
];

pub(super) const API: &[Row] = &[
    value("kubeconfig", "FILE", "")
        .help("Address of the Kubernetes API and credentials for it [default: those of the pod]")
        .fields(&["clientConnection.kubeconfig"])
        .set(|c, v| text(&mut c.client_connection.kubeconfig, v))
        .beside_file(),
    value("master", "URL", "")
        .help("Another address of the Kubernetes API than the kubeconfig's")
        .beside_file(),
];

const NODE_PORTS: &str = "Addresses of the node that serve node ports: ranges, `primary` for the node's address, or \
    `all` (default of iptables and ipvs); `localhost` beside them adds loopback addresses";
const IDLE_TCP: &str =
    "Time after which idle TCP connections are forgotten; 0s keeps the kernel's value (mode ipvs)";
const ENDED_TCP: &str = "Time after a FIN after which TCP connections are forgotten; 0s keeps the kernel's value (mode ipvs)";

pub(super) const RULES: &[Row] = &[
    value("proxy-mode", "MODE", "")
        .help("nftables, iptables, ipvs or userspace; empty means nftables")
        .fields(&["mode"])
        .set(|c, v| text(&mut c.mode, v)),
    values("nodeport-addresses", "CIDR", "primary")
        .help(NODE_PORTS)
        .fields(&["nodePortAddresses"])
        .set(|c, v| list(&mut c.node_port_addresses, v)),
    row("masquerade-all", Kind::Switch, "")
        .help("Masquerade all traffic to ClusterIPs")
        .fields(&["iptables.masqueradeAll", "nftables.masqueradeAll"])
        .set(|c, v| {
            switch(&mut c.iptables.masquerade_all, v)?;
            switch(&mut c.nftables.masquerade_all, v)
        }),
    value("iptables-masquerade-bit", "0-31", "14")
        .help("Bit of the packet mark that asks for masquerading")
        .fields(&["iptables.masqueradeBit", "nftables.masqueradeBit"])
        .set(|c, v| {
            number(&mut c.iptables.masquerade_bit, v)?;
            number(&mut c.nftables.masquerade_bit, v)
        })
        .alias("masquerade-bit"),
    row("iptables-localhost-nodeports", Kind::Switch, "true")
        .help("Mode iptables: serve node ports on 127.0.0.1 too")
        .fields(&["iptables.localhostNodePorts"])
        .set(|c, v| switch(&mut c.iptables.localhost_node_ports, v)),
    value("iptables-sync-period", "DURATION", "30s")
        .help("Health checks fail when a change is not programmed within twice this time")
        .fields(&["iptables.syncPeriod", "nftables.syncPeriod"])
        .set(|c, v| {
            period(&mut c.iptables.sync_period, v)?;
            period(&mut c.nftables.sync_period, v)
        }),
    value("ipvs-scheduler", "NAME", "")
        .help("How virtual servers spread connections (mode ipvs); empty means rr")
        .fields(&["ipvs.scheduler"])
        .set(|c, v| text(&mut c.ipvs.scheduler, v)),
    value("ipvs-sync-period", "DURATION", "30s")
        .help("A node counts as unhealthy when changes fail for twice as long (mode ipvs)")
        .fields(&["ipvs.syncPeriod"])
        .set(|c, v| period(&mut c.ipvs.sync_period, v)),
    values("ipvs-exclude-cidrs", "CIDR", "")
        .help("Virtual servers on these addresses are never removed (mode ipvs)")
        .fields(&["ipvs.excludeCIDRs"])
        .set(|c, v| list(&mut c.ipvs.exclude_cidrs, v)),
    row("ipvs-strict-arp", Kind::Switch, "")
        .help("Answer ARP only for addresses of the requested device (mode ipvs)")
        .fields(&["ipvs.strictARP"])
        .set(|c, v| switch(&mut c.ipvs.strict_arp, v)),
    value("ipvs-tcp-timeout", "DURATION", "0s")
        .help(IDLE_TCP)
        .fields(&["ipvs.tcpTimeout"])
        .set(|c, v| period(&mut c.ipvs.tcp_timeout, v)),
    value("ipvs-tcpfin-timeout", "DURATION", "0s")
        .help(ENDED_TCP)
        .fields(&["ipvs.tcpFinTimeout"])
        .set(|c, v| period(&mut c.ipvs.tcp_fin_timeout, v)),
    value("ipvs-udp-timeout", "DURATION", "0s")
        .help("Time after which UDP flows are forgotten; 0s keeps the kernel's value (mode ipvs)")
        .fields(&["ipvs.udpTimeout"])
        .set(|c, v| period(&mut c.ipvs.udp_timeout, v)),
];

pub(super) const DETECT: &[Row] = &[
    value("detect-local-mode", "MODE", "ClusterCIDR")
        .help("By ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix")
        .fields(&["detectLocalMode"])
        .set(|c, v| text(&mut c.detect_local_mode, v)),
    values("cluster-cidr", "CIDR", "")
        .help("Address ranges of the cluster's pods, for ClusterCIDR")
        .fields(&["clusterCIDR"])
        .set(|c, v| text(&mut c.cluster_cidr, v)),
    value("pod-bridge-interface", "NAME", "")
        .help("Bridge of the node's pods, for BridgeInterface")
        .fields(&["detectLocal.bridgeInterface"])
        .set(|c, v| text(&mut c.detect_local.bridge_interface, v)),
    value("pod-interface-name-prefix", "PREFIX", "")
        .help("Beginning of the names of pods' interfaces, for InterfaceNamePrefix")
        .fields(&["detectLocal.interfaceNamePrefix"])
        .set(|c, v| text(&mut c.detect_local.interface_name_prefix, v)),
];

pub(super) const SERVERS: &[Row] = &[
    value("healthz-bind-address", "IP:PORT", "0.0.0.0:10256")
        .help("Where /healthz and /livez are served; empty for nowhere")
        .fields(&["healthzBindAddress"])
        .set(|c, v| text(&mut c.healthz_bind_address, v)),
    value("metrics-bind-address", "IP:PORT", "127.0.0.1:10249")
        .help("Where metrics are served; empty for nowhere")
        .fields(&["metricsBindAddress"])
        .set(|c, v| text(&mut c.metrics_bind_address, v)),
    row("bind-address-hard-fail", Kind::Switch, "")
        .help("Exit when a port is taken, instead of trying again")
        .fields(&["bindAddressHardFail"])
        .set(|c, v| switch(&mut c.bind_address_hard_fail, v)),
];

pub(super) const CONNTRACK: &[Row] = &[
    value("conntrack-max-per-core", "N", "32768")
        .help("Connections for each core; 0 leaves the limit as it is")
        .fields(&["conntrack.maxPerCore"])
        .set(|c, v| number(&mut c.conntrack.max_per_core, v)),
    value("conntrack-min", "N", "131072")
        .help("Least number of connections, however few cores there are")
        .fields(&["conntrack.min"])
        .set(|c, v| number(&mut c.conntrack.min, v)),
    value("conntrack-tcp-timeout-established", "DURATION", "24h0m0s")
        .help("For idle TCP connections; 0 leaves it as it is")
        .fields(&["conntrack.tcpEstablishedTimeout"])
        .set(|c, v| period(&mut c.conntrack.tcp_established_timeout, v)),
    value("conntrack-tcp-timeout-close-wait", "DURATION", "1h0m0s")
        .help("For half-closed TCP connections; 0 leaves it as it is")
        .fields(&["conntrack.tcpCloseWaitTimeout"])
        .set(|c, v| period(&mut c.conntrack.tcp_close_wait_timeout, v)),
    row("conntrack-tcp-be-liberal", Kind::Switch, "")
        .help("TCP packets outside of the window are not invalid")
        .fields(&["conntrack.tcpBeLiberal"])
        .set(|c, v| switch(&mut c.conntrack.tcp_be_liberal, v)),
    value("conntrack-udp-timeout", "DURATION", "0s")
        .help("For UDP without an answer; 0 leaves it as it is")
        .fields(&["conntrack.udpTimeout"])
        .set(|c, v| period(&mut c.conntrack.udp_timeout, v)),
    value("conntrack-udp-timeout-stream", "DURATION", "0s")
        .help("For UDP with an answer; 0 leaves it as it is")
        .fields(&["conntrack.udpStreamTimeout"])
        .set(|c, v| period(&mut c.conntrack.udp_stream_timeout, v)),
];

pub(super) const LOGGING: &[Row] = &[
    row("v", Kind::Verbosity, "0")
        .help("How much is logged: -v (4) explains, -vv (6) is everything")
        .fields(&["logging.verbosity"])
        .set(|c, v| verbosity(&mut c.logging.verbosity, v))
        .beside_file(),
    value("logging-format", "FORMAT", "text")
        .help("How log lines look: text, or json for one object a line")
        .fields(&["logging.format"])
        .set(|c, v| text(&mut c.logging.format, v))
        .alias("log-format")
        .beside_file(),
];
