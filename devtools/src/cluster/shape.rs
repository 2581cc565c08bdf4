//! The kinds of clusters that `cargo xtask cluster` starts, and their options.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use kplane_rig::cluster::{Cluster, Options, Programs};
use kplane_rig::netns::NetNs;
use kplane_rig::real::{self, Mode, NodePrograms, Proxy, RealCluster};
use kplane_rig::topology::NodeSpec;
use kplane_rig::userns;

/// Time for which deleted Pods are terminating, if they are simulated.
const POD_GRACE: Duration = Duration::from_secs(2);
/// Most nodes: this many have their own addresses.
const MOST_NODES: u8 = 254;
/// A folder that only real clusters have.
const AUTHORITY: &str = "authority";

/// Options of a cluster.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Shape {
    /// Nodes to begin with: node-1, node-2 and so on, in zones a, b and c
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(..=i64::from(MOST_NODES)))]
    pub(super) nodes: u8,
    /// Run real nodes: kubelet, containerd and Pods with containers, kube-scheduler and CoreDNS
    #[arg(long)]
    real: bool,
    /// Give Pods and Services both families of addresses
    #[arg(long, requires = "real")]
    dual_stack: bool,
    /// The program that serves Services
    #[arg(long, requires = "real", value_enum, default_value_t = ProxyName::KubeProxy)]
    proxy: ProxyName,
    /// kube-proxy's mode: nftables or iptables
    #[arg(long, requires = "real", default_value_t = Mode::Nftables)]
    proxy_mode: Mode,
    /// An archive of images that all nodes get; may be given more than once
    #[arg(long, requires = "real", value_name = "FILE")]
    image: Vec<PathBuf>,
}

/// The name of the program that serves Services.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ProxyName {
    /// Nothing: install something
    None,
    /// kube-proxy, as kubeadm installs it
    KubeProxy,
}

/// A cluster that runs.
pub(super) enum Running {
    Simulated(Box<Cluster>),
    Real(Box<RealCluster>),
}

impl Running {
    /// Returns the network namespace of the control plane.
    pub(super) fn ns(&self) -> &NetNs {
        match self {
            Self::Simulated(cluster) => cluster.ns(),
            Self::Real(cluster) => cluster.ns(),
        }
    }
}

impl Shape {
    /// Builds missing programs.
    pub(super) fn prepare(&self) -> Result<()> {
        if self.real {
            NodePrograms::ensure().map(drop)
        } else {
            Programs::ensure().map(drop)
        }
    }

    /// Returns the arguments that stand for these options.
    pub(super) fn arguments(&self) -> Vec<OsString> {
        let mut words = vec!["--nodes".to_owned(), self.nodes.to_string()];
        if self.real {
            let proxy = match self.proxy {
                ProxyName::None => "none",
                ProxyName::KubeProxy => "kube-proxy",
            };
            let mode = self.proxy_mode.to_string();
            words.extend(["--real", "--proxy", proxy, "--proxy-mode", &mode].map(str::to_owned));
        }
        if self.dual_stack {
            words.push("--dual-stack".to_owned());
        }
        let words = words.into_iter().map(OsString::from);
        let images = self.image.iter().flat_map(|image| ["--image".into(), image.into()]);
        words.chain(images).collect()
    }

    /// Enters the namespaces that this process needs; call it before any thread is started.
    pub(super) fn enter(&self) -> Result<()> {
        userns::enter().map(drop)
    }

    /// Starts the cluster.
    pub(super) fn start(&self, folder: &Path) -> Result<Running> {
        if self.real {
            let proxy = match self.proxy {
                ProxyName::None => Proxy::None,
                ProxyName::KubeProxy => Proxy::KubeProxy(self.proxy_mode),
            };
            let cluster = RealCluster::start(&real::Options {
                nodes: self.nodes,
                dual_stack: self.dual_stack,
                proxy,
                images: self.image.clone(),
                folder: Some(folder.to_owned()),
                ..real::Options::default()
            })?;
            return Ok(Running::Real(Box::new(cluster)));
        }
        let cluster = Cluster::start(&Options {
            folder: Some(folder.to_owned()),
            controllers: true,
            kubelet: Some(POD_GRACE),
            ..Options::default()
        })?;
        for number in 1..=self.nodes {
            let zone = ["a", "b", "c"][usize::from(number - 1) % 3];
            cluster.add_node(&NodeSpec::standard(number)?, zone)?;
        }
        Ok(Running::Simulated(Box::new(cluster)))
    }

    /// Describes Pods, for the message of a cluster that is up.
    pub(super) fn described(&self) -> &'static str {
        if self.real {
            "Pods are real: `cargo xtask cluster shell --node node-1` is a shell on a node"
        } else {
            "Pods with a spec.nodeName are simulated"
        }
    }
}

/// Returns the setting of `PATH` with the programs of the cluster in a folder.
pub(super) fn path(folder: &Path) -> Result<OsString> {
    let own = if folder.join(AUTHORITY).exists() {
        NodePrograms::ensure()?.path()
    } else {
        Programs::ensure()?.bin().into()
    };
    let path = env::var_os("PATH").unwrap_or_default();
    let all = env::split_paths(&own).chain(env::split_paths(&path));
    let mut setting = OsString::from("PATH=");
    setting.push(env::join_paths(all)?);
    Ok(setting)
}
