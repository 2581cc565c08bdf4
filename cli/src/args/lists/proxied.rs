//! The arguments of `kpctl get proxied`.

use clap::Args;
use kplane_model::ServiceName;
use kplane_proto::v1 as pb;

use crate::args::names::{node_name, service_name};

/// The end of the help text.
pub(super) const HELP: &str = "\
Connections and endpoints of a Service in the userspace proxies: on all nodes with backend userspace, and
elsewhere if an annotation such as kplane.io/data-path asks for it. Counts begin when the proxy begins to
serve the Service.

Examples:
  kpctl get proxied shop/web
  kpctl get proxied shop/web -o wide            with bytes, and all endpoints
  kpctl get proxied shop/web -o json | jq '.ports[].endpoints[] | select(.avoidedSeconds)'

Exit codes: 0 all nodes answered, 6 a node did not";

/// The question.
#[derive(Args, Debug)]
pub(crate) struct ProxiedArgs {
    /// NAMESPACE/NAME, or NAME in the namespace of -n, else in `default`
    #[arg(value_name = "SERVICE")]
    service: String,
    /// The namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// Only this node
    #[arg(long, value_name = "NODE", value_parser = node_name)]
    node: Option<String>,
}

impl ProxiedArgs {
    /// Returns the question, or the error in the Service's name.
    pub(crate) fn request(&self) -> Result<(ServiceName, pb::ProxiedRequest), clap::Error> {
        let name = service_name(&self.service, self.namespace.as_deref())?;
        let request = pb::ProxiedRequest {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
            node: self.node.clone().unwrap_or_default(),
        };
        Ok((name, request))
    }
}
