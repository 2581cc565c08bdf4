//! The options of a real cluster.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Result, bail};
use kplane_model::{Cidr, Family};

/// The ranges of all Pods of [`crate::topology::NodeSpec::standard`].
const POD_RANGES: [&str; 2] = ["10.244.0.0/16", "fd44::/48"];
/// The ranges of cluster IPs.
const SERVICE_RANGES: [&str; 2] = ["10.96.0.0/16", "fd96::/112"];
/// The cluster IP of DNS.
const DNS: [u8; 4] = [10, 96, 0, 10];

/// The options for starting a real cluster.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of nodes: `node-1`, `node-2` and so on, in zones `a`, `b` and `c`.
    pub nodes: u8,
    /// Whether Pods and Services have both families, or IPv4 alone.
    pub dual_stack: bool,
    /// The program that serves Services. With [`Proxy::None`], CoreDNS is installed and does not become ready.
    pub proxy: Proxy,
    /// Whether kube-proxy in mode nftables serves node ports on loopback addresses, which Kubernetes' tests of them want
    /// (KEP-6032).
    pub localhost_node_ports: bool,
    /// Archives of images (OCI layout with the annotation `io.containerd.image.name`, or `docker save`) that
    /// all nodes get, besides the rig's own.
    pub images: Vec<PathBuf>,
    /// More flags for the API server.
    pub apiserver_flags: Vec<String>,
    /// More flags for kube-controller-manager, such as `--node-monitor-grace-period=20s`.
    pub controller_flags: Vec<String>,
    /// The folder of state and logs, which is kept. `None` takes a temporary folder.
    pub folder: Option<PathBuf>,
}

impl Default for Options {
    /// Returns the options for two nodes with IPv4 and kube-proxy.
    fn default() -> Self {
        Self {
            nodes: 2,
            dual_stack: false,
            proxy: Proxy::default(),
            localhost_node_ports: false,
            images: Vec::new(),
            apiserver_flags: Vec::new(),
            controller_flags: Vec::new(),
            folder: None,
        }
    }
}

impl Options {
    /// Returns the families of Pods and Services.
    pub(super) fn families(&self) -> &'static [Family] {
        if self.dual_stack { &Family::ALL } else { &[Family::V4] }
    }

    pub(super) fn service_ranges(&self) -> String {
        SERVICE_RANGES[..self.families().len()].join(",")
    }

    pub(super) fn pod_ranges(&self) -> Result<Vec<Cidr>> {
        let ranges = &POD_RANGES[..self.families().len()];
        ranges.iter().map(|range| Ok(range.parse()?)).collect()
    }

    pub(super) fn dns() -> IpAddr {
        DNS.into()
    }
}

/// The program that serves Services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proxy {
    /// Nothing: a test installs what it is about.
    None,
    /// kube-proxy as kubeadm installs it: DaemonSet and ConfigMap `kube-proxy` in `kube-system`.
    KubeProxy(Mode),
}

impl Default for Proxy {
    fn default() -> Self {
        Self::KubeProxy(Mode::Nftables)
    }
}

/// kube-proxy's mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// nf_tables, by `nft`.
    Nftables,
    /// iptables (over nf_tables).
    Iptables,
}

impl Mode {
    /// All modes.
    pub const ALL: [Self; 2] = [Self::Nftables, Self::Iptables];
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
        })
    }
}

impl FromStr for Mode {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match Self::ALL.into_iter().find(|mode| mode.to_string() == text) {
            Some(mode) => Ok(mode),
            None => bail!("the rig has no kube-proxy in mode {text:?}: nftables or iptables"),
        }
    }
}
