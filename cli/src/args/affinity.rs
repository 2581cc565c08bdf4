//! The arguments of `kpctl get affinity`.

use std::net::IpAddr;

use clap::Args;
use kplane_model::ServiceName;
use kplane_proto::v1 as pb;

use super::names::{node_name, service_name};

/// The end of the help text of `get affinity`.
pub(super) const GET_HELP: &str = "\
Nodes remember clients of Services with sessionAffinity ClientIP, each node for the connections that it
handles. In mode iptables the kernel does not say for how long. Needs the right to get /kplane/clients.

Examples:
  kpctl get affinity shop/web
  kpctl get affinity shop/web --client 10.244.1.9
  kpctl get affinity shop/web --node node-1 -o json | jq '.clients[].endpoint'

Exit codes: 0 all nodes answered, 6 a node did not";

/// The question: who is remembered.
#[derive(Args, Debug)]
pub(crate) struct AffinityArgs {
    /// NAMESPACE/NAME, or NAME in the namespace of -n, else in `default`
    #[arg(value_name = "SERVICE")]
    service: String,
    /// The namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// Only this client
    #[arg(long, value_name = "ADDRESS")]
    client: Option<IpAddr>,
    /// Only this node
    #[arg(long, value_name = "NODE", value_parser = node_name)]
    node: Option<String>,
}

impl AffinityArgs {
    /// Returns the question, or the error in the Service's name.
    pub(crate) fn request(&self) -> Result<(ServiceName, pb::AffinityRequest), clap::Error> {
        let name = service_name(&self.service, self.namespace.as_deref())?;
        let client = self.client.map_or_else(String::new, |client| client.to_string());
        let request = pb::AffinityRequest {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
            client,
            node: self.node.clone().unwrap_or_default(),
        };
        Ok((name, request))
    }
}
