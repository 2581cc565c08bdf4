//! The arguments of `kpctl why`.

use clap::Args;
use clap::error::ErrorKind;
use kplane_model::ServiceName;
use kplane_proto::v1 as pb;

use super::error;
use super::names::service_name;

/// The end of the help text.
pub(super) const HELP: &str = "\
Shows which rule matches, which endpoints the node that handles the packet chooses, why it does not
choose each of the rest, whose address the endpoint sees, and whether the kernel holds this state.

Examples:
  kpctl why shop/web --from pod/shop/client-1            a Pod; its node is looked up
  kpctl why shop/web:http --from pod --via node-2        any Pod on node-2
  kpctl why shop/web --from node/node-1
  kpctl why shop/web --from outside/192.0.2.7 --via node-1 --to 203.0.113.1:80
  kpctl why shop/web --from outside --via node-1 --to 172.18.0.2:30080
  kpctl why shop/web --from node/node-1 --try             node-1 connects, and says what came back";

/// The question: a Service, a sender, and the node that handles the packet.
#[derive(Args, Debug)]
pub(crate) struct WhyArgs {
    /// NAMESPACE/NAME, or NAMESPACE/NAME:PORT with the name or the number of a port; the first port if there is none
    #[arg(value_name = "SERVICE[:PORT]")]
    service: String,
    /// Namespace of the Service, if SERVICE does not name it
    #[arg(short, long)]
    namespace: Option<String>,
    /// Sender: pod/NAMESPACE/NAME (needs a kubeconfig, or --via), pod, node/NAME, outside, or outside/ADDRESS
    #[arg(long, value_name = "SENDER", value_parser = parse_sender)]
    pub(crate) from: SenderArg,
    /// Node that handles the packet: the one that a client outside has reached, or on which the Pod runs
    #[arg(long, value_name = "NODE")]
    pub(crate) via: Option<String>,
    /// Destination, such as 203.0.113.1:80, or a node's address and node port. If it is not given: the ClusterIP; from
    /// outside the load balancer's address, an external one, or the node port
    #[arg(long, value_name = "ADDRESS:PORT")]
    to: Option<String>,
    /// Let the node's agent open TCP connections, through the Service and to its endpoints, and say what came back.
    /// Needs the right to create /kplane/probes
    #[arg(long = "try")]
    pub(crate) tries: bool,
}

/// The sender of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SenderArg {
    /// A Pod with this name; its node and address are looked up.
    NamedPod { namespace: String, name: String },
    /// Any Pod on the node.
    Pod,
    /// A program on this node.
    Node(String),
    /// A client outside of the cluster, with its address; empty if that is not given.
    Outside(String),
}

fn parse_sender(text: &str) -> Result<SenderArg, String> {
    let parts: Vec<&str> = text.split('/').collect();
    match parts.as_slice() {
        ["pod", namespace, name] if !namespace.is_empty() && !name.is_empty() => {
            Ok(SenderArg::NamedPod {
                namespace: (*namespace).to_owned(),
                name: (*name).to_owned(),
            })
        }
        ["pod"] => Ok(SenderArg::Pod),
        ["node", name] if !name.is_empty() => Ok(SenderArg::Node((*name).to_owned())),
        ["outside"] => Ok(SenderArg::Outside(String::new())),
        ["outside", address] if !address.is_empty() => {
            Ok(SenderArg::Outside((*address).to_owned()))
        }
        _ => Err(
            "expected pod/NAMESPACE/NAME, pod, node/NAME, outside or outside/ADDRESS".to_owned(),
        ),
    }
}

impl WhyArgs {
    /// Returns the question. The node and the address of a named Pod are added by the caller.
    pub(crate) fn request(&self) -> Result<(ServiceName, pb::ExplainRequest), clap::Error> {
        let (service, port) = match self.service.split_once(':') {
            Some((service, port)) => (service, port),
            None => (self.service.as_str(), ""),
        };
        let name = service_name(service, self.namespace.as_deref())?;
        let mut request = pb::ExplainRequest {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
            port: port.to_owned(),
            to: self.to.clone().unwrap_or_default(),
            node: self.via.clone().unwrap_or_default(),
            ..pb::ExplainRequest::default()
        };
        let sender = match &self.from {
            SenderArg::NamedPod { .. } | SenderArg::Pod => pb::PacketSender::Pod,
            SenderArg::Node(node) => {
                if self.via.as_ref().is_some_and(|via| via != node) {
                    let text = "a node handles its own packets: leave --via out";
                    return Err(error(ErrorKind::ArgumentConflict, text));
                }
                request.node.clone_from(node);
                pb::PacketSender::Node
            }
            SenderArg::Outside(address) => {
                request.sender_address.clone_from(address);
                pb::PacketSender::Outside
            }
        };
        request.sender = sender.into();
        Ok((name, request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn senders_are_read_as_people_write_them() {
        let named = SenderArg::NamedPod {
            namespace: "shop".to_owned(),
            name: "web-1".to_owned(),
        };
        assert_eq!(parse_sender("pod/shop/web-1"), Ok(named));
        assert_eq!(parse_sender("pod"), Ok(SenderArg::Pod));
        assert_eq!(
            parse_sender("node/n1"),
            Ok(SenderArg::Node("n1".to_owned()))
        );
        assert_eq!(
            parse_sender("outside/fd00::1"),
            Ok(SenderArg::Outside("fd00::1".to_owned()))
        );
        for wrong in [
            "",
            "pod/",
            "pod/web",
            "node",
            "node/",
            "outside/",
            "inside",
            "pod/a/b/c",
        ] {
            assert!(parse_sender(wrong).is_err(), "{wrong}");
        }
    }
}
