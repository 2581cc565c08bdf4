//! The arguments of `kpctl uninstall`.

use std::time::Duration;

use super::migrate::TargetArgs;
use super::parse_timeout;

/// The image of agents of this version.
pub(crate) const IMAGE: &str = concat!("ghcr.io/kplane/kp-nodeagent:", env!("CARGO_PKG_VERSION"));

/// Options for the removal of kplane.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct UninstallArgs {
    /// Do not ask
    #[arg(short, long)]
    pub(crate) yes: bool,
    /// Remove kplane although it still serves nodes that kube-proxy keeps off: their Services stop
    /// working
    #[arg(long)]
    pub(crate) force: bool,
    /// Image whose kp-nodeagent removes the rules, if the agents' DaemonSet is gone already
    #[arg(long, value_name = "IMAGE", default_value = IMAGE)]
    pub(crate) image: String,
    /// Longest time for one node
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = parse_timeout)]
    pub(crate) node_timeout: Duration,
    #[command(flatten)]
    pub(crate) target: TargetArgs,
}
