//! The arguments of the commands that read the control plane's record: `history service` and `diff`.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, Subcommand};
use kplane_model::ServiceName;
use kplane_proto::v1 as pb;

use super::error;
use super::lists::ServiceArgs;
use super::names::service_name;

/// What `history` is about: all publications, or one Service.
#[derive(Args, Debug)]
pub(crate) struct HistoryArgs {
    #[command(subcommand)]
    pub(crate) of: Option<HistoryCommand>,
}

/// Objects with a history.
#[derive(Debug, Subcommand)]
pub(crate) enum HistoryCommand {
    /// Show what changed in a Service, which object caused it, and when each node had it
    #[command(
        visible_alias = "svc",
        alias = "services",
        after_help = "\
The control plane records changes in memory, newest first, and begins anew when it starts. A node has
a change when its kernel holds it. Text shows local times and ages; -o json has times in UTC.

Examples:
  kpctl history service shop/web
  kpctl history service shop/web --node node-7
  kpctl history svc web -n shop --limit 100 -o json | jq '.changes[].causes'"
    )]
    Service(ServiceHistoryArgs),
}

/// A Service, and the part of its history to show.
#[derive(Args, Debug)]
pub(crate) struct ServiceHistoryArgs {
    #[command(flatten)]
    service: ServiceArgs,
    /// Only when this node had each change
    #[arg(
        long,
        value_name = "NODE",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) node: String,
    /// Most changes to show, 200 at most
    #[arg(long, value_name = "NUMBER", default_value = "20")]
    limit: u32,
}

impl ServiceHistoryArgs {
    /// Returns the Service and the question.
    pub(crate) fn request(&self) -> Result<(ServiceName, pb::ServiceHistoryRequest), clap::Error> {
        let name = self.service.name()?;
        let request = pb::ServiceHistoryRequest {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
            node: self.node.clone(),
            limit: self.limit,
        };
        Ok((name, request))
    }
}

/// The node to compare with its desired state.
#[derive(Args, Debug)]
pub(crate) struct DiffArgs {
    #[arg(value_name = "node/NAME")]
    node: String,
}

impl DiffArgs {
    /// Returns the question.
    pub(crate) fn request(&self) -> Result<pb::DiffRequest, clap::Error> {
        let kernel_of = node_name(&self.node)?;
        Ok(pb::DiffRequest { kernel_of })
    }
}

fn node_name(text: &str) -> Result<String, clap::Error> {
    let name = text.strip_prefix("node/").unwrap_or(text);
    if name.is_empty() {
        return Err(error(ErrorKind::InvalidValue, "expected node/NAME"));
    }
    Ok(name.to_owned())
}

/// What goes into a bundle.
#[derive(Args, Debug)]
pub(crate) struct BundleArgs {
    /// File to write; it must not exist. kplane-bundle-TIME.tar.gz unless given
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Replace each IP address by a name that is the same within this bundle only
    #[arg(long)]
    pub(crate) hash_addresses: bool,
    /// Also describe this Service, NAMESPACE/NAME; may be given several times
    #[arg(long = "service", value_name = "SERVICE")]
    services: Vec<String>,
}

impl BundleArgs {
    /// Returns the Services that are asked for.
    pub(crate) fn services(&self) -> Result<Vec<ServiceName>, clap::Error> {
        self.services.iter().map(|name| service_name(name, None)).collect()
    }
}
