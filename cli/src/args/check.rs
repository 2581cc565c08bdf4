//! The arguments of `kpctl check`.

use std::path::PathBuf;
use std::time::Duration;

use super::migrate::TargetArgs;
use super::parse_timeout;

/// Options of the checks.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CheckArgs {
    /// Before an installation: what this cluster offers, and what kplane would do differently
    #[arg(long)]
    pub(crate) pre: bool,
    /// With --pre: check the kernel of this machine as well, with the program kp-nodeagent
    #[arg(long, requires = "pre")]
    pub(crate) local: bool,
    /// With --pre: check every node, by a Pod on each that is removed afterwards
    #[arg(long, requires = "pre", conflicts_with = "local")]
    pub(crate) nodes: bool,
    /// With --nodes: the agent's image [default: that of this version; where kube-proxy has a configuration, the one with
    /// iptables]
    #[arg(long, value_name = "IMAGE", requires = "nodes")]
    pub(crate) image: Option<String>,
    /// With --nodes: longest time to wait for the Pods of 50 nodes
    #[arg(
        long,
        value_name = "DURATION",
        requires = "nodes",
        default_value = "60s"
    )]
    #[arg(value_parser = parse_timeout)]
    pub(crate) node_timeout: Duration,
    /// With --local: the program [default: kp-nodeagent beside kpctl, or else in PATH]
    #[arg(long, value_name = "PROGRAM", requires = "local")]
    pub(crate) agent: Option<PathBuf>,
    /// With --local: do not ask any cluster
    #[arg(long, requires = "local")]
    pub(crate) no_cluster: bool,
    #[command(flatten)]
    pub(crate) target: TargetArgs,
}
