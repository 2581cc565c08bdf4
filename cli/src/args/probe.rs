//! The arguments of `kpctl probe`.

use clap::Args;
use kplane_model::ServiceName;
use kplane_proto::v1 as pb;

use super::names::{node_name, service_name};

/// The end of the help text.
pub(super) const HELP: &str = "\
Each agent opens TCP connections through its node's own data path to the Service's ClusterIP, straight to
two of its endpoints, and to its node port on two other nodes, if it has one. Nothing is deployed and
nothing is sent. With --dns each agent asks DNS for a name, over UDP, in the same ways. The table keeps
the data path and the control path apart: a node whose agent does not answer is Unknown, and what its
neighbours have seen of it is named. Needs the right to create /kplane/probes.

Examples:
  kpctl probe                          default/kubernetes, from all nodes
  kpctl probe shop/web                 a Service of your own, best one with a node port
  kpctl probe shop/web:http --node node-1
  kpctl probe --dns                    the cluster's DNS, kube-system/kube-dns
  kpctl probe --dns=kubernetes.default.svc.corp.example kube-system/coredns
  kpctl probe -o json | jq '.nodes[] | select(.verdict != \"Works\")'

Exit codes: 0 the data paths of all nodes work, 1 one does not, 6 all that is known works, and a node did not answer";

/// The name that every cluster with the usual domain has.
const NAME: &str = "kubernetes.default.svc.cluster.local";
/// The Services that are probed if none is named.
const CANARY: &str = "default/kubernetes";
const DNS: (&str, &str) = ("kube-system", "kube-dns");

/// Returns the question of `kpctl probe --dns`.
pub(crate) fn of_dns() -> (ServiceName, pb::ProbeRequest) {
    let (namespace, name) = DNS;
    let request = pb::ProbeRequest {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        dns_name: NAME.to_owned(),
        ..pb::ProbeRequest::default()
    };
    (ServiceName::new(namespace, name), request)
}

/// The question: where to connect to, and from where.
#[derive(Args, Debug)]
pub(crate) struct ProbeArgs {
    /// NAMESPACE/NAME, or NAMESPACE/NAME:PORT with the name or the number of a port; default/kubernetes if it is not given,
    /// and kube-system/kube-dns with --dns
    #[arg(value_name = "SERVICE[:PORT]")]
    service: Option<String>,
    /// Namespace of the Service, if SERVICE does not name it
    #[arg(short, long)]
    namespace: Option<String>,
    /// Ask the Service for a name by DNS; without NAME for kubernetes.default.svc.cluster.local
    #[arg(
        long,
        value_name = "NAME",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = NAME
    )]
    dns: Option<String>,
    /// Only this node
    #[arg(long, value_name = "NODE", value_parser = node_name)]
    node: Option<String>,
    /// List every node
    #[arg(short, long)]
    pub(crate) all: bool,
}

impl ProbeArgs {
    /// Returns whether DNS is asked.
    pub(crate) fn asks_dns(&self) -> bool {
        self.dns.is_some()
    }

    /// Returns the question, or the error in the Service's name.
    pub(crate) fn request(&self) -> Result<(ServiceName, pb::ProbeRequest), clap::Error> {
        let usual = match self.dns {
            None => CANARY.to_owned(),
            Some(_) => format!("{}/{}", DNS.0, DNS.1),
        };
        let service = self.service.as_deref().unwrap_or(&usual);
        let (service, port) = service.split_once(':').unwrap_or((service, ""));
        let name = service_name(service, self.namespace.as_deref())?;
        let request = pb::ProbeRequest {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
            port: port.to_owned(),
            node: self.node.clone().unwrap_or_default(),
            dns_name: self.dns.clone().unwrap_or_default(),
            ..pb::ProbeRequest::default()
        };
        Ok((name, request))
    }
}
