//! The arguments of `kpctl why`.

use std::net::{IpAddr, SocketAddr};

use clap::Args;
use clap::error::ErrorKind;
use kplane_model::{ServiceName, parse_ip};
use kplane_proto::v1 as pb;

use super::error;
use super::names::service_name;

/// The end of the help text.
pub(super) const HELP: &str = "\
Shows which rule matches, which endpoints the node that handles the packet chooses, why it does not
choose each of the rest, whose address the endpoint sees, whether NetworkPolicies deny the way, and
whether the kernel holds this state.

Of a Pod or an address with a port it shows whether NetworkPolicies allow the connection: which rule
does, or which policies isolate the Pod. Name an endpoint, since policies see the address behind the
Service. For scripts: -o jsonpath={.allowed}. Needs the right to get /kplane/policies; of a packet to a
Service, the answer leaves NetworkPolicies out without it.

Examples:
  kpctl why shop/web --from pod/shop/client-1            a Pod; its node is looked up
  kpctl why shop/web:http --from pod --via node-2        any Pod on node-2
  kpctl why shop/web --from node/node-1
  kpctl why shop/web --from outside/192.0.2.7 --via node-1 --to 203.0.113.1:80
  kpctl why shop/web --from outside --via node-1 --to 172.18.0.2:30080
  kpctl why shop/web --from node/node-1 --try             node-1 connects, and says what came back
  kpctl why pod/shop/db-0:5432 --from pod/shop/web-1      NetworkPolicies of both
  kpctl why 10.244.1.7:53/udp --from 192.0.2.7";

/// The question: a Service, a sender, and the node that handles the packet; or the two ends of a connection.
#[derive(Args, Debug)]
pub(crate) struct WhyArgs {
    /// NAMESPACE/NAME, or NAMESPACE/NAME:PORT with the name or the number of a port; the first port if there is none.
    /// To ask about NetworkPolicies: pod/NAMESPACE/NAME:PORT or ADDRESS:PORT, with /udp or /sctp behind it for other
    /// protocols than TCP
    #[arg(value_name = "SERVICE[:PORT]")]
    service: String,
    /// Namespace of the Service, if SERVICE does not name it
    #[arg(short, long)]
    namespace: Option<String>,
    /// Sender: pod/NAMESPACE/NAME (needs a kubeconfig, nodes that enforce NetworkPolicies, or --via), pod, node/NAME,
    /// outside, or outside/ADDRESS; for NetworkPolicies pod/NAMESPACE/NAME or ADDRESS
    #[arg(long, value_name = "SENDER", value_parser = parse_sender)]
    pub(crate) from: SenderArg,
    /// Node that handles the packet: the one that a client outside has reached, or on which the Pod runs
    #[arg(long, value_name = "NODE")]
    pub(crate) via: Option<String>,
    /// Destination, such as 203.0.113.1:80, or a node's address and node port. If it is not given: the ClusterIP; from
    /// outside the load balancer's address, an external one, or the node port
    #[arg(long, value_name = "ADDRESS:PORT")]
    to: Option<String>,
    /// Let the node's agent open TCP connections, through the Service and to its endpoints, and say what came back. From
    /// outside to an address of the node, the agent of another node connects.
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
    /// The Pod or machine with this address: for NetworkPolicies.
    Address(IpAddr),
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
        _ => parse_ip(text).map(SenderArg::Address).map_err(|_| {
            "expected pod/NAMESPACE/NAME, pod, node/NAME, outside, outside/ADDRESS or ADDRESS"
                .to_owned()
        }),
    }
}

/// Returns the Pod (as NAMESPACE/NAME) or the address, the port and the protocol that a text names; `None` if it names a
/// Service.
fn parse_end(text: &str) -> Option<Result<(String, u16, pb::Protocol), String>> {
    let (place, protocol) = match text.rsplit_once('/') {
        Some((place, "tcp" | "TCP")) => (place, pb::Protocol::Tcp),
        Some((place, "udp" | "UDP")) => (place, pb::Protocol::Udp),
        Some((place, "sctp" | "SCTP")) => (place, pb::Protocol::Sctp),
        _ => (text, pb::Protocol::Tcp),
    };
    let wants = |what: &str| Some(Err(format!("{text:?} has no port: write {what}:PORT")));
    if let Some(pod) = place.strip_prefix("pod/")
        && pod.contains('/')
    {
        let port = pod.rsplit_once(':').map(|(pod, port)| (pod, port.parse()));
        return match port {
            Some((pod, Ok(port))) => Some(Ok((pod.to_owned(), port, protocol))),
            _ => wants(&format!("pod/{}", pod.split(':').next().unwrap_or(pod))),
        };
    }
    if let Ok(at) = place.parse::<SocketAddr>() {
        return Some(Ok((at.ip().to_string(), at.port(), protocol)));
    }
    match parse_ip(place) {
        Ok(IpAddr::V6(ip)) => wants(&format!("[{ip}]")),
        Ok(ip) => wants(&ip.to_string()),
        Err(_) => None,
    }
}

impl WhyArgs {
    /// Returns the connection that NetworkPolicies shall judge; `None` if the question is about a Service.
    pub(crate) fn connection(&self) -> Result<Option<pb::JudgeConnectionRequest>, clap::Error> {
        let Some(end) = parse_end(&self.service) else {
            return Ok(None);
        };
        let (to, port, protocol) = end.map_err(|text| error(ErrorKind::ValueValidation, &text))?;
        if self.via.is_some() || self.to.is_some() || self.tries {
            let text = "--via, --to and --try are about Services; NetworkPolicies judge a Pod or an address alike anywhere";
            return Err(error(ErrorKind::ArgumentConflict, text));
        }
        let from = match &self.from {
            SenderArg::NamedPod { namespace, name } => format!("{namespace}/{name}"),
            SenderArg::Address(address) => address.to_string(),
            SenderArg::Outside(address) if !address.is_empty() => address.clone(),
            SenderArg::Pod | SenderArg::Node(_) | SenderArg::Outside(_) => {
                let text = "NetworkPolicies judge single Pods and addresses: --from pod/NAMESPACE/NAME or --from ADDRESS";
                return Err(error(ErrorKind::ValueValidation, text));
            }
        };
        Ok(Some(pb::JudgeConnectionRequest {
            from,
            to,
            protocol: protocol.into(),
            port: port.into(),
        }))
    }

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
            SenderArg::Address(address) => {
                let text =
                    format!("to a Service, say who has the address: pod, or outside/{address}");
                return Err(error(ErrorKind::ValueValidation, &text));
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
        assert_eq!(
            parse_sender("10.0.0.7"),
            Ok(SenderArg::Address([10, 0, 0, 7].into()))
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
    #[test]
    fn ends_of_connections_are_no_services() {
        let (tcp, udp) = (pb::Protocol::Tcp, pb::Protocol::Udp);
        for (text, end) in [
            ("pod/shop/db-0:5432", ("shop/db-0", 5432, tcp)),
            ("pod/shop/dns:53/udp", ("shop/dns", 53, udp)),
            ("10.0.0.7:80", ("10.0.0.7", 80, tcp)),
            ("[fd00::7]:53/UDP", ("fd00::7", 53, udp)),
        ] {
            let (of, port, protocol) = parse_end(text).unwrap().unwrap();
            assert_eq!((of.as_str(), port, protocol), end, "{text}");
        }
        for service in ["shop/web", "web:http", "pod/web:80", "service/shop/web:80"] {
            assert_eq!(parse_end(service), None, "{service}");
        }
        for (text, hint) in [
            ("pod/shop/db-0", "pod/shop/db-0:PORT"),
            ("pod/shop/db-0:http", "pod/shop/db-0:PORT"),
            ("10.0.0.7/udp", "10.0.0.7:PORT"),
            ("fd00::7", "[fd00::7]:PORT"),
        ] {
            let error = parse_end(text).unwrap().unwrap_err();
            assert!(error.ends_with(hint), "{error}");
        }
    }
}
