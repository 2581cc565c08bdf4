//! The arguments of `kpctl probe`.

use clap::Args;
use kplane_model::ServiceName;
use kplane_proto::v1 as pb;

use super::names::{node_name, service_name};

/// The end of the help text.
pub(super) const HELP: &str = "\
Each agent opens TCP connections through its node's own data path to the Service's ClusterIP, straight to
two of its endpoints, and to its node port on two other nodes, if it has one. Nothing is deployed and
nothing is sent. The table keeps the data path and the control path apart: a node whose agent does not answer
is Unknown, and what its neighbours have seen of it is named. Needs the right to create /kplane/probes.

Examples:
  kpctl probe                          default/kubernetes, from all nodes
  kpctl probe shop/web                 a Service of your own, best one with a node port
  kpctl probe shop/web:http --node node-1
  kpctl probe -o json | jq '.nodes[] | select(.verdict != \"Works\")'

Exit codes: 0 the data paths of all nodes work, 1 one does not, 6 all that is known works, and a node did not answer";

/// The question: where to connect to, and from where.
#[derive(Args, Debug)]
pub(crate) struct ProbeArgs {
    /// NAMESPACE/NAME, or NAMESPACE/NAME:PORT with the name or the number of a port of TCP; default/kubernetes if it is
    /// not given
    #[arg(value_name = "SERVICE[:PORT]")]
    service: Option<String>,
    /// Namespace of the Service, if SERVICE does not name it
    #[arg(short, long)]
    namespace: Option<String>,
    /// Only this node
    #[arg(long, value_name = "NODE", value_parser = node_name)]
    node: Option<String>,
    /// List every node
    #[arg(short, long)]
    pub(crate) all: bool,
}

impl ProbeArgs {
    /// Returns the question, or the error in the Service's name.
    pub(crate) fn request(&self) -> Result<(ServiceName, pb::ProbeRequest), clap::Error> {
        let service = self.service.as_deref().unwrap_or("default/kubernetes");
        let (service, port) = service.split_once(':').unwrap_or((service, ""));
        let name = service_name(service, self.namespace.as_deref())?;
        let request = pb::ProbeRequest {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
            port: port.to_owned(),
            node: self.node.clone().unwrap_or_default(),
        };
        Ok((name, request))
    }
}
