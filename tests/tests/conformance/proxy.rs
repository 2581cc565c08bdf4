//! The two programs that are compared, each with the same configuration file and kubeconfig.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use kplane_tests::netns::NetNs;
use kplane_tests::process::Process;
use serde_json::{Value, json};

use crate::api::{Api, log};
use crate::support::Setup;

/// Who programs the nodes of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Proxy {
    KubeProxy,
    Kplane,
}

impl Proxy {
    pub(crate) const BOTH: [Self; 2] = [Self::KubeProxy, Self::Kplane];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::KubeProxy => "kube-proxy",
            Self::Kplane => "kplane",
        }
    }
}

/// What a round's configuration file says beside the addresses of the API server.
#[derive(Clone, Debug)]
pub(crate) struct Configuration {
    pub(crate) setup: Setup,
    /// `nodePortAddresses`; empty is the default.
    pub(crate) node_port_addresses: Vec<&'static str>,
}

/// Both programs, found or built.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    kube_proxy: PathBuf,
    agent: PathBuf,
}

impl Programs {
    /// kube-proxy from the folder of the cluster's programs; the agent that lies beside this test.
    pub(crate) fn find(bin: &Path) -> Result<Self> {
        let test = env::current_exe()?;
        let folder = test.parent().and_then(Path::parent);
        let agent = folder
            .context("no folder of programs")?
            .join("kp-nodeagent");
        ensure!(
            agent.is_file(),
            "{} is missing: cargo build --workspace --bins",
            agent.display()
        );
        let kube_proxy = bin.join("kube-proxy");
        Ok(Self { kube_proxy, agent })
    }

    /// Starts one of them on a node; its log beside it.
    pub(crate) fn start(
        &self,
        proxy: Proxy,
        api: &Api,
        (ns, node): (&NetNs, &str),
        configuration: &Configuration,
    ) -> Result<(Process, PathBuf)> {
        let name = format!("{}-{node}-{:?}", proxy.name(), configuration.setup);
        let config = api.folder().join(format!("{name}.json"));
        let text = configuration.file(&api.kubeconfig());
        fs::write(&config, text.to_string())?;
        let mut command = match proxy {
            Proxy::KubeProxy => Command::new(&self.kube_proxy),
            Proxy::Kplane => {
                let mut agent = Command::new(&self.agent);
                agent
                    .arg("--standalone")
                    .args(["--status-bind-address", ""]);
                agent.arg("--kubeconfig").arg(api.kubeconfig());
                agent
            }
        };
        command.arg("--config").arg(&config);
        command.args(["--hostname-override", node]);
        let (path, file) = log(api.folder(), &name)?;
        command.stdout(file.try_clone()?).stderr(file);
        command.stdin(Stdio::null());
        Ok((ns.command(command)?, path))
    }
}

impl Configuration {
    /// A KubeProxyConfiguration. Limits of connection tracking stay as they are: they belong to the
    /// machine.
    fn file(&self, kubeconfig: &Path) -> Value {
        let mut file = json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clientConnection": {"kubeconfig": kubeconfig.display().to_string()},
            "conntrack": {
                "maxPerCore": 0, "min": 0,
                "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s",
            },
            "nftables": {
                "masqueradeAll": matches!(
                    self.setup,
                    Setup::MasqueradeAll | Setup::MasqueradeAllNoPodRanges
                ),
                "minSyncPeriod": "100ms",
            },
            "detectLocalMode": "ClusterCIDR",
            "nodePortAddresses": self.node_port_addresses,
        });
        match self.setup {
            Setup::PodRanges | Setup::MasqueradeAll => {
                file["clusterCIDR"] = json!("10.244.0.0/16,fd44::/32");
            }
            Setup::NoPodRanges | Setup::MasqueradeAllNoPodRanges => {}
            Setup::NodeRanges => file["detectLocalMode"] = json!("NodeCIDR"),
            Setup::PodInterfaces => {
                file["detectLocalMode"] = json!("InterfaceNamePrefix");
                file["detectLocal"] = json!({"interfaceNamePrefix": "pod"});
            }
        }
        file
    }
}
