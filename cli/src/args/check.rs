//! The arguments of `kpctl check`.

use std::path::PathBuf;

use super::migrate::TargetArgs;

/// Options of the checks.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CheckArgs {
    /// Before an installation: what this cluster offers, and what kplane would do differently
    #[arg(long)]
    pub(crate) pre: bool,
    /// With --pre: check the kernel of this machine as well, with the program kp-nodeagent
    #[arg(long, requires = "pre")]
    pub(crate) local: bool,
    /// With --local: the program [default: kp-nodeagent beside kpctl, or else in PATH]
    #[arg(long, value_name = "PROGRAM", requires = "local")]
    pub(crate) agent: Option<PathBuf>,
    /// With --local: do not ask any cluster
    #[arg(long, requires = "local")]
    pub(crate) no_cluster: bool,
    #[command(flatten)]
    pub(crate) target: TargetArgs,
}
