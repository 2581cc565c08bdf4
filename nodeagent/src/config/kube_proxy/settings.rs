//! Resolves a [`KubeProxyConfiguration`] into settings: reads every value and names every wrong one
//! (I7).
//!
//! As in kube-proxy, sections of modes that are not used may have any values.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use kplane_model::{Cidr, Family, IpvsScheduler, parse_ip};

use super::checker::Checker;
use super::detect;
use crate::sysctl;
use kplane_dataplane::backend;
use kplane_dataplane::plan::{NodeSettings, Reserved, loopback};
use kplane_kube_proxy_config::GoDuration;
use kplane_kube_proxy_config::Problem;
use kplane_kube_proxy_config::{self as types, KubeProxyConfiguration};

/// Most problems that are reported: a list may have thousands of wrong items.
const MAX_PROBLEMS: usize = 100;

/// Everything that the agent derives from a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The settings that shape the plans.
    pub node: NodeSettings,
    /// The backend that the mode asks for.
    pub kind: backend::Kind,
    /// The settings that the backend starts with.
    pub backend: backend::Settings,
    /// The address that answers health checks; `None` = none.
    pub healthz: Option<SocketAddr>,
    /// The address that serves metrics; `None` = none.
    pub metrics: Option<SocketAddr>,
    /// Whether a port that is taken ends the program.
    pub bind_address_hard_fail: bool,
    /// The value for `/proc/self/oom_score_adj`, -1000..=1000.
    pub oom_score_adj: i32,
    /// The longest time of a failure before the node counts as unhealthy (G2: twice as long).
    pub sync_period: Duration,
    /// Settings of connection tracking.
    pub conntrack: sysctl::ConntrackSettings,
    /// Settings of the log.
    pub log: LogSettings,
}

/// The format of log lines, and the lines to log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogSettings {
    /// Whether to write one JSON object a line instead of text.
    pub json: bool,
    /// The level, as kube-proxy counts: 0..=3 is normal, 4 and 5 explain, from 6 on everything.
    pub verbosity: u32,
}

/// The feature gate of node ports on loopback addresses, which is on by default from v1.38 on (K6).
pub(super) const LOCALHOST_GATE: &str = "KubeProxyNFTablesLocalhostNodePorts";

/// Resolves a configuration.
///
/// # Errors
/// Everything that is wrong, by field.
pub fn resolve(config: &KubeProxyConfiguration) -> Result<Settings, Vec<Problem>> {
    let mut check = Checker::default();
    check.mode(&config.mode);
    check.client(&config.client_connection);
    let log = check.logging(&config.logging);
    check.version(&config.show_hidden_metrics_for_version);
    let (masquerade_bit, masquerade_all, sync_period) = check.sections(config);
    let node_ip = check.node_ip(&config.bind_address);
    let detector = detect::detector(config, &mut check);
    let ipvs = match &*config.mode {
        "ipvs" => check.ipvs(&config.ipvs),
        // This is for `--backend ipvs`. Problems in this section are reported in mode ipvs only.
        _ => Checker::default().ipvs(&config.ipvs),
    };
    let (nodeport_addresses, nodeport_localhost) = check.nodeport_addresses(config);
    let settings = Settings {
        node: NodeSettings {
            cluster_cidrs: detector.cluster_cidrs,
            node_cidr: detector.node_cidr,
            masquerade_all,
            nodeport_addresses,
            // The configuration with its defaults does not say.
            nodeport_primary: false,
            nodeport_localhost,
            node_ip,
            last_known: [None; 2],
            reserved: Reserved::default(),
        },
        kind: backend::Kind::named(&config.mode).unwrap_or_default(),
        backend: backend::Settings {
            masquerade_bit,
            pod_interface: detector.pod_interface,
            localhost_nodeports: config.iptables.localhost_node_ports,
            refuse_loopback: config.feature_gates.get(LOCALHOST_GATE) != Some(&false),
            ipvs,
            userspace: check.userspace(config),
            ..backend::Settings::default()
        },
        healthz: check.address("healthzBindAddress", &config.healthz_bind_address),
        metrics: check.address("metricsBindAddress", &config.metrics_bind_address),
        bind_address_hard_fail: config.bind_address_hard_fail,
        oom_score_adj: check.in_range("oomScoreAdj", config.oom_score_adj, -1000, 1000),
        sync_period,
        conntrack: check.conntrack(&config.conntrack),
        log,
    };
    check.positive("configSyncPeriod", config.config_sync_period);
    let all = check.problems.len();
    if all == 0 {
        return Ok(settings);
    }
    check.problems.truncate(MAX_PROBLEMS);
    if all > MAX_PROBLEMS {
        let more = all - MAX_PROBLEMS;
        let more = format!("{more} more values are wrong");
        check.problems.push(Problem::general(more));
    }
    Err(check.problems)
}

impl Checker {
    /// Returns the settings of mode userspace. Zero stands for the default, as with kube-proxy until 1.25.
    fn userspace(&mut self, config: &KubeProxyConfiguration) -> backend::UserspaceSettings {
        let idle = config.udp_idle_timeout.unwrap_or(GoDuration::ZERO);
        if config.mode == "userspace" && idle.is_negative() {
            self.bad("udpIdleTimeout", idle, "must not be negative");
        }
        backend::UserspaceSettings {
            udp_idle: idle.to_std().filter(|idle| !idle.is_zero()),
            ..backend::UserspaceSettings::default()
        }
    }

    fn mode(&mut self, mode: &str) {
        let accepted = "must be nftables, iptables, ipvs, userspace or empty";
        match mode {
            "" | "nftables" | "iptables" | "ipvs" | "userspace" => {}
            "kernelspace" => self.bad("mode", mode, &format!("is for Windows: {accepted}")),
            _ => self.bad("mode", mode, accepted),
        }
    }

    fn client(&mut self, client: &types::ClientConnection) {
        self.in_range("clientConnection.burst", client.burst, 0, i32::MAX);
    }

    fn logging(&mut self, logging: &types::Logging) -> LogSettings {
        if !matches!(&*logging.format, "text" | "json") {
            self.bad("logging.format", &logging.format, "must be text or json");
        }
        LogSettings {
            json: logging.format == "json",
            verbosity: logging.verbosity,
        }
    }

    fn version(&mut self, version: &str) {
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        let is_version = |(major, minor)| is_number(major) && is_number(minor);
        if !version.is_empty() && !version.split_once('.').is_some_and(is_version) {
            let reason = "must be a version such as 1.35, or empty";
            self.bad("showHiddenMetricsForVersion", version, reason);
        }
    }

    /// Reads masquerade bit, masquerade all and sync period from the section of the mode.
    fn sections(&mut self, config: &KubeProxyConfiguration) -> (u8, bool, Duration) {
        let bit = |check: &mut Self, section: &str, bit| {
            let field = format!("{section}.masqueradeBit");
            u8::try_from(check.in_range(&field, bit, 0, 31)).unwrap_or_default()
        };
        let (iptables, ipvs, nftables) = (&config.iptables, &config.ipvs, &config.nftables);
        // kube-proxy checks this one in every mode.
        let iptables_bit = bit(self, "iptables", iptables.masquerade_bit);
        match &*config.mode {
            "nftables" => (
                bit(self, "nftables", nftables.masquerade_bit),
                nftables.masquerade_all,
                self.periods("nftables", nftables.sync_period, nftables.min_sync_period),
            ),
            "ipvs" => {
                let period = self.periods("ipvs", ipvs.sync_period, ipvs.min_sync_period);
                (iptables_bit, iptables.masquerade_all, period)
            }
            _ => (
                iptables_bit,
                iptables.masquerade_all,
                self.periods("iptables", iptables.sync_period, iptables.min_sync_period),
            ),
        }
    }

    fn periods(&mut self, section: &str, period: GoDuration, min: GoDuration) -> Duration {
        self.positive(&format!("{section}.syncPeriod"), period);
        let field = format!("{section}.minSyncPeriod");
        if min.is_negative() {
            self.bad(&field, min, "must be at least 0");
        } else if min > period && period > GoDuration::ZERO {
            let reason =
                format!("must not be greater than {section}.syncPeriod, which is {period}");
            self.bad(&field, min, &reason);
        }
        period.to_std().unwrap_or_default()
    }

    /// Reads the section of mode ipvs. kube-proxy counts whole seconds, and takes an empty
    /// scheduler for `rr` (D7, D8).
    fn ipvs(&mut self, ipvs: &types::Ipvs) -> backend::ipvs::IpvsSettings {
        let mut seconds = |field: &str, value| {
            let timeout = self.timeout(&format!("ipvs.{field}"), value);
            u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX)
        };
        let timeouts = backend::ipvs::Timeouts {
            tcp_s: seconds("tcpTimeout", ipvs.tcp_timeout),
            tcp_fin_s: seconds("tcpFinTimeout", ipvs.tcp_fin_timeout),
            udp_s: seconds("udpTimeout", ipvs.udp_timeout),
        };
        let cidrs = ipvs.exclude_cidrs.iter().enumerate();
        let exclude_cidrs = cidrs
            .filter_map(|(index, text)| self.cidr(&format!("ipvs.excludeCIDRs[{index}]"), text))
            .collect();
        backend::ipvs::IpvsSettings {
            scheduler: self.scheduler(&ipvs.scheduler),
            exclude_cidrs,
            strict_arp: ipvs.strict_arp,
            timeouts,
            ..backend::ipvs::IpvsSettings::default()
        }
    }

    fn scheduler(&mut self, name: &str) -> IpvsScheduler {
        if name.is_empty() {
            return IpvsScheduler::ROUND_ROBIN;
        }
        IpvsScheduler::parse(name).unwrap_or_else(|| {
            let reason = format!("must be one of {}, or empty for rr", IpvsScheduler::names());
            self.bad("ipvs.scheduler", name, &reason);
            IpvsScheduler::ROUND_ROBIN
        })
    }

    fn node_ip(&mut self, text: &str) -> Option<IpAddr> {
        match parse_ip(text) {
            Ok(ip) => Some(ip).filter(|ip| !ip.is_unspecified()),
            Err(_) => {
                let reason = "must be an IP address such as 0.0.0.0, 192.168.1.7 or fd00::7";
                self.bad("bindAddress", text, reason);
                None
            }
        }
    }

    /// Reads the node port addresses: ranges, and the families whose loopback addresses are among them, by the word
    /// `localhost` or by a range (KEP-6032; K1, K2, K5). No range stands for the node's own address, which `primary` adds
    /// to ranges ([`NodeSettings::nodeport_primary`]). In modes iptables and ipvs an empty list means all addresses (A21).
    fn nodeport_addresses(&mut self, config: &KubeProxyConfiguration) -> (Vec<Cidr>, [bool; 2]) {
        let everything = || Family::ALL.map(Cidr::everything);
        let texts = &config.node_port_addresses;
        let (mut cidrs, mut words) = (Vec::new(), HashSet::new());
        for (index, text) in texts.iter().enumerate() {
            let field = format!("nodePortAddresses[{index}]");
            match text.as_str() {
                word @ ("primary" | "localhost" | "all") => {
                    if !words.insert(word) {
                        self.bad(&field, word, "must be there once");
                    } else if word == "all" {
                        cidrs.extend(everything());
                    }
                }
                range => cidrs.extend(self.cidr(&field, range)),
            }
        }
        if texts.is_empty() && config.serves_all_by_default() {
            cidrs.extend(everything());
        }
        // The word asks for more than kube-proxy has; a range asks for what the mode's own field may refuse (C8).
        let refused = config.mode == "iptables" && !config.iptables.localhost_node_ports;
        let localhost = Family::ALL.map(|family| {
            let mut own = cidrs.iter().filter(|cidr| cidr.family() == family);
            let by_range = !refused && own.any(|cidr| cidr.first().is_loopback());
            words.contains("localhost") || by_range
        });
        if words.contains("localhost") && !words.contains("primary") {
            // With loopback addresses, no family is without a range.
            let lacking = |family: &Family| cidrs.iter().all(|cidr| cidr.family() != *family);
            let lacking: Vec<Family> = Family::ALL.into_iter().filter(lacking).collect();
            cidrs.extend(lacking.into_iter().map(loopback));
        }
        (cidrs, localhost)
    }

    fn conntrack(&mut self, conntrack: &types::Conntrack) -> sysctl::ConntrackSettings {
        let max = self.in_range("conntrack.maxPerCore", conntrack.max_per_core, 0, i32::MAX);
        let min = self.in_range("conntrack.min", conntrack.min, 0, i32::MAX);
        let mut timeout = |field: &str, value| self.timeout(&format!("conntrack.{field}"), value);
        sysctl::ConntrackSettings {
            max_per_core: u32::try_from(max).unwrap_or_default(),
            min: u32::try_from(min).unwrap_or_default(),
            tcp_established_timeout: timeout(
                "tcpEstablishedTimeout",
                conntrack.tcp_established_timeout,
            ),
            tcp_close_wait_timeout: timeout(
                "tcpCloseWaitTimeout",
                conntrack.tcp_close_wait_timeout,
            ),
            tcp_be_liberal: conntrack.tcp_be_liberal,
            udp_timeout: timeout("udpTimeout", conntrack.udp_timeout),
            udp_stream_timeout: timeout("udpStreamTimeout", conntrack.udp_stream_timeout),
        }
    }
}

#[cfg(test)]
mod tests;
