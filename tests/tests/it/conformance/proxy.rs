//! The two programs that are compared, each with the same configuration file and kubeconfig.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::OnceLock;

use anyhow::{Context as _, Result};
use kplane_tests::cluster;
use kplane_tests::netns::NetNs;
use kplane_tests::privilege;
use kplane_tests::process::Process;
use kplane_tests::product::Product;
use serde_json::{Value, json};

use crate::conformance::api::{Api, log};
use kplane_tests::support::Setup;
use kplane_tests::support::proxy::{Proxy, configuration};
use kplane_tests::support::under_test::UnderTest;

/// How both program the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Nftables,
    Iptables,
}

impl Mode {
    /// As the configuration file has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
        }
    }

    /// Of iptables the kind that distributions have now.
    pub(crate) fn under_test(self) -> UnderTest {
        match self {
            Self::Nftables => UnderTest::Nftables,
            Self::Iptables => UnderTest::IptablesNft,
        }
    }
}

/// What a round's configuration file says beside the addresses of the API server.
#[derive(Clone, Debug)]
pub(crate) struct Configuration {
    pub(crate) mode: Mode,
    pub(crate) setup: Setup,
    /// kplane has kube-proxy's lists instead of trees.
    pub(crate) compat: bool,
    /// `nodePortAddresses`; empty is the default.
    pub(crate) node_port_addresses: Vec<&'static str>,
}

/// kplane's programs, built before the first test.
static PRODUCT: OnceLock<Product> = OnceLock::new();

/// Builds all programs, as far as they are not there, before the machine's network is left: Go may have to
/// download. Returns whether that is possible here.
pub(crate) fn prepare() -> Result<bool> {
    if privilege::available(cluster::Programs::ensure())?.is_none() {
        return Ok(false);
    }
    let product = Product::build()?;
    PRODUCT.get_or_init(|| product);
    Ok(true)
}

/// The agent's program.
pub(crate) fn node_agent() -> Result<&'static Path> {
    let product = PRODUCT.get().context("built before the first test")?;
    Ok(&product.node_agent)
}

/// Starts one of them on a node; its log beside it.
pub(crate) fn start(
    proxy: Proxy,
    api: &Api,
    (ns, node): (&NetNs, &str),
    configuration: &Configuration,
) -> Result<(Process, PathBuf)> {
    let cluster = api.cluster();
    let name = format!("{}-{node}-{}", proxy.name(), configuration.name());
    let config = cluster.folder().join(format!("{name}.json"));
    let text = configuration.file(&cluster.kubeconfig());
    fs::write(&config, text.to_string())?;
    let program = match proxy {
        Proxy::KubeProxy => cluster.programs().bin().join("kube-proxy"),
        Proxy::Kplane => node_agent()?.to_owned(),
    };
    let mut command = proxy.command(&program, &cluster.kubeconfig(), &config, node);
    if configuration.compat && proxy == Proxy::Kplane {
        command.args(["--iptables-layout", "compat"]);
    }
    let (path, file) = log(cluster.folder(), &name)?;
    command.stdout(file.try_clone()?).stderr(file);
    command.stdin(Stdio::null());
    Ok((ns.command(command)?, path))
}

impl Configuration {
    /// For people and for files.
    pub(crate) fn name(&self) -> String {
        let compat = if self.compat { "Compat" } else { "" };
        format!("{:?}{compat}", self.setup)
    }

    /// What the configuration file says.
    fn file(&self, kubeconfig: &Path) -> Value {
        let mut file = configuration(self.mode.name(), kubeconfig);
        let all = [Setup::MasqueradeAll, Setup::MasqueradeAllNoPodRanges];
        file[self.mode.name()] = json!({
            "masqueradeAll": all.contains(&self.setup), "minSyncPeriod": "100ms",
        });
        file["detectLocalMode"] = json!("ClusterCIDR");
        file["nodePortAddresses"] = json!(self.node_port_addresses);
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
