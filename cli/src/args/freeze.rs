//! The arguments of `kpctl freeze` and `kpctl thaw`.

use kplane_proto::v1 as pb;

/// The nodes of `freeze` and `thaw`.
#[derive(Clone, Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("nodes").required(true).args(["node", "zone", "all"])))]
pub(crate) struct FreezeArgs {
    /// The node; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Vec<String>,
    /// The nodes that are in this zone now
    #[arg(long, value_name = "ZONE")]
    pub(crate) zone: Option<String>,
    /// All nodes, also those that join later
    #[arg(long)]
    pub(crate) all: bool,
    /// Reason, for others and for the audit log
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) reason: String,
}

impl FreezeArgs {
    pub(crate) fn request(&self, thaw: bool) -> pb::FreezeRequest {
        pb::FreezeRequest {
            thaw,
            all: self.all,
            nodes: self.node.clone(),
            zone: self.zone.clone().unwrap_or_default(),
            reason: self.reason.clone(),
        }
    }
}
