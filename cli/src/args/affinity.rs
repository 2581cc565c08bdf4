//! The arguments of `kpctl get affinity` and `kpctl forget-client`.

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

/// The end of the help text of `forget-client`.
pub(super) const FORGET_HELP: &str = "\
The client's next connection is balanced anew. Connections that are open go on. In mode ipvs the kernel
cannot forget one client, and the answer says so. Needs the right to delete /kplane/clients.

Examples:
  kpctl forget-client shop/web --client 10.244.1.9
  kpctl forget-client shop/web --client fd00::9 --node node-1

Exit codes: 0 no node remembers the client any more, 6 a node did not answer or could not forget it";

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

/// The order to forget a client.
#[derive(Args, Debug)]
pub(crate) struct ForgetArgs {
    /// NAMESPACE/NAME, or NAME in the namespace of -n, else in `default`
    #[arg(value_name = "SERVICE")]
    service: String,
    /// The namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// The client
    #[arg(long, value_name = "ADDRESS", required = true)]
    client: IpAddr,
    /// Only on this node
    #[arg(long, value_name = "NODE", value_parser = node_name)]
    node: Option<String>,
}

fn request(
    service: &str,
    namespace: Option<&str>,
    client: Option<IpAddr>,
    node: Option<&str>,
) -> Result<(ServiceName, pb::AffinityRequest), clap::Error> {
    let name = service_name(service, namespace)?;
    let request = pb::AffinityRequest {
        namespace: name.namespace.to_string(),
        name: name.name.to_string(),
        client: client.map_or_else(String::new, |client| client.to_string()),
        node: node.unwrap_or_default().to_owned(),
    };
    Ok((name, request))
}

impl AffinityArgs {
    /// Returns the question, or the error in the Service's name.
    pub(crate) fn request(&self) -> Result<(ServiceName, pb::AffinityRequest), clap::Error> {
        let (namespace, node) = (self.namespace.as_deref(), self.node.as_deref());
        request(&self.service, namespace, self.client, node)
    }
}

impl ForgetArgs {
    /// Returns the order, or the error in the Service's name.
    pub(crate) fn request(&self) -> Result<(ServiceName, pb::AffinityRequest), clap::Error> {
        let (namespace, node) = (self.namespace.as_deref(), self.node.as_deref());
        request(&self.service, namespace, Some(self.client), node)
    }
}
