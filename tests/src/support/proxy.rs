//! kube-proxy and kplane as programs in each other's place: with the same configuration file and kubeconfig.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

/// Who programs nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Proxy {
    KubeProxy,
    Kplane,
}

impl Proxy {
    pub const BOTH: [Self; 2] = [Self::KubeProxy, Self::Kplane];

    pub fn name(self) -> &'static str {
        match self {
            Self::KubeProxy => "kube-proxy",
            Self::Kplane => "kplane",
        }
    }

    /// The command that serves a node; `program` is the path of kube-proxy, or of kplane's agent.
    pub fn command(self, program: &Path, kubeconfig: &Path, config: &Path, node: &str) -> Command {
        let mut command = Command::new(program);
        if self == Self::Kplane {
            command.arg("--standalone");
            command.args(["--status-bind-address", "", "--cache-dir", ""]);
            command.arg("--kubeconfig").arg(kubeconfig);
        }
        command.arg("--config").arg(config);
        command.args(["--hostname-override", node]);
        command
    }
}

/// A KubeProxyConfiguration. Limits of connection tracking stay as they are: they belong to the machine.
pub fn configuration(mode: &str, kubeconfig: &Path) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode,
        "clientConnection": {"kubeconfig": kubeconfig.display().to_string()},
        "conntrack": {
            "maxPerCore": 0, "min": 0,
            "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s",
        },
    })
}
