//! Who is measured, and how each is started: as its own documentation has it, with its defaults.

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use kplane_tests::netns::NetNs;
use kplane_tests::process::Process;

use crate::objects::node;

/// All pods of the cluster, kube-proxy's `clusterCIDR`.
pub(crate) const PODS: &str = "10.128.0.0/9";
/// Where the system has the programs of iptables, and what their names begin with.
const SYSTEM: &str = "/usr/sbin";
const BASES: [&str; 2] = ["iptables", "ip6tables"];

/// A way to serve Services on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Contender {
    /// kube-proxy in its mode nftables.
    KubeProxyNftables,
    /// kube-proxy in its mode iptables, above nf_tables.
    KubeProxyIptables,
    /// The same with x_tables.
    KubeProxyIptablesLegacy,
    /// One process: `kp-nodeagent --standalone`.
    KplaneStandalone,
    /// Two processes: `kp-controlplane` and `kp-nodeagent`.
    Kplane,
    /// One process that programs iptables, above nf_tables.
    KplaneIptables,
    /// The same with x_tables.
    KplaneIptablesLegacy,
    /// One process: the userspace proxy behind rules.
    KplaneUserspace,
}

/// Where a contender runs.
pub(crate) struct Place<'a> {
    pub(crate) ns: &'a NetNs,
    /// Reaches the API server from there.
    pub(crate) kubeconfig: &'a Path,
    /// For configuration and logs.
    pub(crate) folder: &'a Path,
    /// kube-proxy.
    pub(crate) kube_proxy: &'a Path,
}

impl Contender {
    pub(crate) const ALL: [Self; 8] = [
        Self::KubeProxyNftables,
        Self::KubeProxyIptables,
        Self::KubeProxyIptablesLegacy,
        Self::KplaneStandalone,
        Self::Kplane,
        Self::KplaneIptables,
        Self::KplaneIptablesLegacy,
        Self::KplaneUserspace,
    ];

    /// As the table has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::KubeProxyNftables => "kube-proxy nftables",
            Self::KubeProxyIptables => "kube-proxy iptables-nft",
            Self::KubeProxyIptablesLegacy => "kube-proxy iptables-legacy",
            Self::KplaneStandalone => "kplane, one process",
            Self::Kplane => "kplane, two processes",
            Self::KplaneIptables => "kplane iptables-nft",
            Self::KplaneIptablesLegacy => "kplane iptables-legacy",
            Self::KplaneUserspace => "kplane userspace, captured",
        }
    }

    pub(crate) fn is_kube_proxy(self) -> bool {
        matches!(
            self,
            Self::KubeProxyNftables | Self::KubeProxyIptables | Self::KubeProxyIptablesLegacy
        )
    }

    /// The kind of iptables that the node has.
    fn iptables(self) -> &'static str {
        if self.is_legacy() { "legacy" } else { "nft" }
    }

    /// Whether its rules are in x_tables.
    pub(crate) fn is_legacy(self) -> bool {
        matches!(
            self,
            Self::KubeProxyIptablesLegacy | Self::KplaneIptablesLegacy
        )
    }

    /// The mode in the sense of kube-proxy.
    fn mode(self) -> &'static str {
        match self {
            Self::KubeProxyNftables | Self::KplaneStandalone | Self::Kplane => "nftables",
            Self::KubeProxyIptables
            | Self::KubeProxyIptablesLegacy
            | Self::KplaneIptables
            | Self::KplaneIptablesLegacy => "iptables",
            Self::KplaneUserspace => "userspace",
        }
    }

    /// Whom to compare it with: who uses the same of the kernel.
    pub(crate) fn rivals(self, other: Self) -> bool {
        (self.mode(), self.iptables()) == (other.mode(), other.iptables())
    }

    /// Starts it: the last process is the one on the node.
    pub(crate) fn start(self, place: &Place<'_>) -> Result<Vec<Process>> {
        if self.mode() == "iptables" {
            tell_kind(place, self.iptables())?;
        }
        match self {
            Self::KubeProxyNftables | Self::KubeProxyIptables | Self::KubeProxyIptablesLegacy => {
                Ok(vec![kube_proxy(place, self)?])
            }
            Self::KplaneStandalone
            | Self::KplaneIptables
            | Self::KplaneIptablesLegacy
            | Self::KplaneUserspace => {
                let mut agent = agent(self, place)?;
                agent.arg("--standalone");
                agent.arg("--kubeconfig").arg(place.kubeconfig);
                Ok(vec![start(agent, place, "kp-nodeagent")?])
            }
            Self::Kplane => {
                let mut control_plane = Command::new(crate::program("kp-controlplane")?);
                control_plane.arg("--kubeconfig").arg(place.kubeconfig);
                let mut agent = agent(self, place)?;
                agent.args(["--control-plane", "http://127.0.0.1:7465"]);
                Ok(vec![
                    start(control_plane, place, "kp-controlplane")?,
                    start(agent, place, "kp-nodeagent")?,
                ])
            }
        }
    }
}

fn agent(contender: Contender, place: &Place<'_>) -> Result<Command> {
    let mut agent = Command::new(crate::program("kp-nodeagent")?);
    agent.args(["--node-name", &node(), "--cluster-cidr", PODS]);
    agent.args(["--backend", contender.mode()]);
    agent.arg("--cache-dir").arg(place.folder.join("cache"));
    Ok(agent)
}

/// Puts into the node's namespace what tells the kind of iptables there: what kubelet does.
fn tell_kind(place: &Place<'_>, kind: &str) -> Result<()> {
    for base in BASES {
        let mut command = Command::new(Path::new(SYSTEM).join(format!("{base}-{kind}")));
        command.args(["-t", "mangle", "-N", "KUBE-IPTABLES-HINT"]);
        place.ns.output(command)?;
    }
    Ok(())
}

/// A folder in which programs of this kind have their plain names, which are those that kube-proxy
/// calls: in its image a script sees to that.
fn plain_names(place: &Place<'_>, kind: &str) -> Result<PathBuf> {
    let folder = place.folder.join(kind);
    if folder.is_dir() {
        return Ok(folder);
    }
    fs::create_dir(&folder)?;
    for base in BASES {
        for verb in ["", "-save", "-restore"] {
            let real = Path::new(SYSTEM).join(format!("{base}-{kind}{verb}"));
            symlink(&real, folder.join(format!("{base}{verb}")))?;
        }
    }
    Ok(folder)
}

/// kube-proxy with its defaults, except for the limits of connection tracking, which belong to the
/// whole machine and must not be changed here.
fn kube_proxy(place: &Place<'_>, contender: Contender) -> Result<Process> {
    let mode = contender.mode();
    let config = place.folder.join(format!("kube-proxy-{mode}.yaml"));
    let text = format!(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: {mode}\n\
         hostnameOverride: {}\nclusterCIDR: {PODS}\nclientConnection:\n  kubeconfig: {}\n\
         conntrack: {{maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}}\n",
        node(),
        place.kubeconfig.display()
    );
    fs::write(&config, text).with_context(|| config.display().to_string())?;
    let mut command = Command::new(place.kube_proxy);
    command.arg("--config").arg(config);
    if mode == "iptables" {
        let path = env::var_os("PATH").unwrap_or_default();
        let first = plain_names(place, contender.iptables())?;
        let path = env::join_paths(std::iter::once(first).chain(env::split_paths(&path)))?;
        command.env("PATH", path);
    }
    start(command, place, "kube-proxy")
}

fn start(mut command: Command, place: &Place<'_>, name: &str) -> Result<Process> {
    let log = place.folder.join(format!("{name}.log"));
    let log = File::create(&log).with_context(|| log.display().to_string())?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    place.ns.command(command)
}
