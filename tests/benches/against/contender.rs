//! Who is measured, and how each is started: as its own documentation has it, with its defaults.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use kplane_tests::netns::NetNs;
use kplane_tests::process::Process;

use crate::workload::node;

/// A way to serve Services on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Contender {
    /// kube-proxy in its mode nftables.
    KubeProxyNftables,
    /// kube-proxy in its mode iptables.
    KubeProxyIptables,
    /// One process: `kp-nodeagent --standalone`.
    KplaneStandalone,
    /// Two processes: `kp-controlplane` and `kp-nodeagent`.
    Kplane,
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
    pub(crate) const ALL: [Self; 4] = [
        Self::KubeProxyNftables,
        Self::KubeProxyIptables,
        Self::KplaneStandalone,
        Self::Kplane,
    ];

    /// As the table has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::KubeProxyNftables => "kube-proxy nftables",
            Self::KubeProxyIptables => "kube-proxy iptables",
            Self::KplaneStandalone => "kplane, one process",
            Self::Kplane => "kplane, two processes",
        }
    }

    pub(crate) fn is_kube_proxy(self) -> bool {
        matches!(self, Self::KubeProxyNftables | Self::KubeProxyIptables)
    }

    /// Starts it: the last process is the one on the node.
    pub(crate) fn start(self, place: &Place<'_>) -> Result<Vec<Process>> {
        match self {
            Self::KubeProxyNftables => Ok(vec![kube_proxy(place, "nftables")?]),
            Self::KubeProxyIptables => Ok(vec![kube_proxy(place, "iptables")?]),
            Self::KplaneStandalone => {
                let mut agent = Command::new(program("kp-nodeagent")?);
                agent.args(["--standalone", "--node-name", &node()]);
                agent.arg("--kubeconfig").arg(place.kubeconfig);
                Ok(vec![start(agent, place, "kp-nodeagent")?])
            }
            Self::Kplane => {
                let mut control_plane = Command::new(program("kp-controlplane")?);
                control_plane.arg("--kubeconfig").arg(place.kubeconfig);
                let mut agent = Command::new(program("kp-nodeagent")?);
                agent.args(["--node-name", &node()]);
                agent.args(["--control-plane", "http://127.0.0.1:7443"]);
                Ok(vec![
                    start(control_plane, place, "kp-controlplane")?,
                    start(agent, place, "kp-nodeagent")?,
                ])
            }
        }
    }
}

/// kube-proxy with its defaults, except for the limits of connection tracking, which belong to the
/// whole machine and must not be changed here.
fn kube_proxy(place: &Place<'_>, mode: &str) -> Result<Process> {
    let config = place.folder.join(format!("kube-proxy-{mode}.yaml"));
    let text = format!(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: {mode}\n\
         hostnameOverride: {}\nclusterCIDR: 10.128.0.0/9\nclientConnection:\n  kubeconfig: {}\n\
         conntrack: {{maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}}\n",
        node(),
        place.kubeconfig.display()
    );
    fs::write(&config, text).with_context(|| config.display().to_string())?;
    let mut command = Command::new(place.kube_proxy);
    command.arg("--config").arg(config);
    start(command, place, "kube-proxy")
}

/// Where this benchmark's own programs are: `target/release/deps/..` has them two levels up.
fn program(name: &str) -> Result<PathBuf> {
    let me = std::env::current_exe()?;
    let folder = me.ancestors().nth(2).context("a folder of programs")?;
    Ok(folder.join(name))
}

fn start(mut command: Command, place: &Place<'_>, name: &str) -> Result<Process> {
    let log = place.folder.join(format!("{name}.log"));
    let log = File::create(&log).with_context(|| log.display().to_string())?;
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    place.ns.command(command)
}
