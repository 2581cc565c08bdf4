//! A node inside the machine that reaches the API server outside, and the proxies on it.

use std::env;
use std::fs::{self, File};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::client::{Probe, Protocol};
use kplane_tests::cluster::{Api, objects};
use kplane_tests::link::Route;
use kplane_tests::netns::NetNs;
use kplane_tests::process::Process;
use kplane_tests::support::ipvs;
use kplane_tests::support::proxy::{Proxy, configuration};
use kplane_tests::sysctl;
use kplane_tests::topology::{NodeSpec, Topology};
use kplane_tests::wait::eventually;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::vm::{KUBE_PROXY, KUBECONFIG, MACHINE, NODE_AGENT};

/// For anything that happens here, on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
/// Longer than kube-proxy's `minSyncPeriod`.
const STEADY: Duration = Duration::from_secs(2);
/// The node's link out of the machine, and both its ends.
const LINK: &str = "uplink";
const OURS: [u8; 4] = [172, 29, 0, 1];
const THEIRS: [u8; 4] = [172, 29, 0, 2];
/// Everywhere else than the fabric.
const API_SERVER: &str = "192.0.2.0/24";
pub(crate) const TARGET: u16 = 8080;

/// A cluster of one node whose API server is outside.
pub(crate) struct Node {
    pub(crate) topology: Topology,
    pub(crate) api: Api,
    folder: TempDir,
}

impl Node {
    /// With pods `a`, `b` and `asks`, of which the first two serve.
    pub(crate) fn new() -> Result<Self> {
        let mut topology = Topology::standard(1)?;
        for (name, number) in [("a", 1), ("b", 2), ("asks", 9)] {
            let ips = [
                format!("10.244.1.{number}"),
                format!("fd44:0:0:1::{number}"),
            ];
            let ips = ips.iter().map(|ip| Ok(ip.parse()?)).collect::<Result<Vec<IpAddr>>>()?;
            let pod = topology.add_pod("node-1", name, &ips)?;
            pod.serve(Protocol::Tcp, TARGET)?;
            pod.serve(Protocol::Udp, TARGET)?;
        }
        let machine = MACHINE.get().context("set when this program starts")?;
        let node = topology.node("node-1")?.ns();
        let outside = machine.netlink()?;
        outside.veth("node", node, LINK)?;
        outside.add_address("node", IpAddr::from(OURS), 30)?;
        outside.up("node")?;
        let inside = node.netlink()?;
        inside.up(LINK)?;
        inside.add_address(LINK, IpAddr::from(THEIRS), 30)?;
        inside.add_route(&Route::to(API_SERVER.parse()?).via(IpAddr::from(OURS)))?;
        machine.sysctl(sysctl::FORWARDING)?;
        ipvs::run(
            machine,
            "iptables-nft -t nat -A POSTROUTING -o eth0 -j MASQUERADE",
        )?;
        let kubeconfig = setting(KUBECONFIG)?;
        Ok(Self {
            topology,
            api: Api::open(machine, &kubeconfig)?,
            folder: tempfile::tempdir()?,
        })
    }

    pub(crate) fn ns(&self) -> Result<&NetNs> {
        Ok(self.topology.node("node-1")?.ns())
    }

    pub(crate) fn pod(&self, name: &str) -> Result<&NetNs> {
        Ok(self.topology.pod(name)?.ns())
    }

    /// Writes the node itself.
    pub(crate) fn register(&self) -> Result<()> {
        let NodeSpec {
            name,
            ips,
            pod_cidrs,
        } = NodeSpec::standard(1)?;
        self.api.apply(&objects::node(&name, &pod_cidrs, "a"))?;
        let status = objects::node_status(&ips);
        self.api.patch_status("Node", &name, &status).map(drop)
    }

    /// Starts a proxy in mode ipvs.
    pub(crate) fn start(&self, proxy: Proxy) -> Result<Process> {
        let config = self.folder.path().join("config.json");
        let kubeconfig = setting(KUBECONFIG)?;
        let mut text = configuration("ipvs", &kubeconfig);
        text["clusterCIDR"] = json!("10.244.0.0/16,fd44::/32");
        fs::write(&config, text.to_string())?;
        let program = match proxy {
            Proxy::KubeProxy => setting(KUBE_PROXY)?,
            Proxy::Kplane => setting(NODE_AGENT)?,
        };
        let mut command = proxy.command(&program, &kubeconfig, &config, "node-1");
        let log = File::create(self.log())?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.ns()?.command(command)
    }

    /// Has kplane remove what both have left.
    pub(crate) fn clean_up(&self) -> Result<()> {
        let mut command = Command::new(setting(NODE_AGENT)?);
        command.args(["--cleanup-kube-proxy", "--cache-dir", ""]);
        self.ns()?.output(command)?;
        ipvs::ensure_nothing(self.ns()?)
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// The end of what the last proxy said.
    pub(crate) fn last_words(&self) -> String {
        /// Lines that say enough.
        const LINES: usize = 15;
        let text = fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }

    /// Waits until a Service answers: one that the proxy on this node cannot have known before.
    pub(crate) fn serves(&self, service: &str, number: u8) -> Result<()> {
        self.api.apply(&self::service(service, number, &[]))?;
        self.api.apply(&slice(service, 4, &["10.244.1.1"]))?;
        self.api.apply(&slice(service, 6, &["fd44:0:0:1::1"]))?;
        for to in [
            format!("10.96.1.{number}:80"),
            format!("[fd96::1:{number:x}]:80"),
        ] {
            let probe = Probe::tcp(to.parse()?).timeout(Duration::from_secs(5));
            let asks = self.pod("asks")?;
            eventually(PATIENCE, service, || probe.reply(asks))
                .with_context(|| self.last_words())?;
        }
        self.steady()
    }

    /// Waits until the kernel's state stays the same: kube-proxy writes rules after servers.
    fn steady(&self) -> Result<()> {
        let ns = self.ns()?;
        let mut before = Vec::new();
        eventually(PATIENCE, "nothing changes any more", || {
            std::thread::sleep(STEADY);
            let now = ipvs::everything(ns)?;
            let changed = before != now;
            before = now;
            ensure!(!changed, "it changes");
            Ok::<_, anyhow::Error>(())
        })
    }
}

/// A Service with a ClusterIP of each family and fields besides.
pub(crate) fn service(name: &str, number: u8, more: &[(&str, Value)]) -> Value {
    let mut spec = json!({
        "ipFamilyPolicy": "PreferDualStack",
        "clusterIP": format!("10.96.1.{number}"),
        "clusterIPs": [format!("10.96.1.{number}"), format!("fd96::1:{number:x}")],
        "ports": [
            {"name": "tcp", "port": 80, "targetPort": TARGET, "protocol": "TCP"},
            {"name": "udp", "port": 80, "targetPort": TARGET, "protocol": "UDP"},
        ],
    });
    for (field, value) in more {
        spec[*field] = value.clone();
    }
    objects::service("default", name, spec)
}

/// Its endpoints of one family.
pub(crate) fn slice(service: &str, family: u8, ips: &[&str]) -> Value {
    let endpoints = ips.iter().map(|ip| objects::endpoint(ip, "node-1"));
    let name = format!("{service}-{family}");
    let mut slice = objects::slice("default", &name, service, endpoints);
    slice["addressType"] = json!(format!("IPv{family}"));
    slice["ports"] = json!([
        {"name": "tcp", "protocol": "TCP", "port": TARGET},
        {"name": "udp", "protocol": "UDP", "port": TARGET},
    ]);
    slice
}

fn setting(name: &str) -> Result<PathBuf> {
    let value = env::var_os(name).with_context(|| format!("{name} is not set"))?;
    Ok(Path::new(&value).to_owned())
}
