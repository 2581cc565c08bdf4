//! The arguments of `kpctl get flows`.

use clap::Args;
use kplane_model::{ServiceName, parse_ip};
use kplane_proto::v1 as pb;

use super::names::{node_name, service_name};

/// The end of the help text.
pub(super) const HELP: &str = "\
Every node's agent reads the connections that its rules lead through the Service, in the kernel's
connection tracking, in the table of IPVS, and of its userspace proxy. Connections of one client to one
endpoint are one line. Clients are named: Pods if nodes enforce NetworkPolicies, and nodes. Bytes and ages
are shown where kernels keep them (net.netfilter.nf_conntrack_acct, nf_conntrack_timestamp). Connections to
a Pod's own address are not of the Service. Needs the right to get /kplane/clients.

STATE: established; handshake = not established yet; unreplied = nothing came back from the endpoint;
closing = one side has closed.

Examples:
  kpctl get flows shop/web                          who is connected?
  kpctl get flows service/shop/web -w               the same, every 2 s
  kpctl get flows shop/web --from pod/shop/cart-1
  kpctl get flows shop/web --from outside --node node-1
  kpctl get flows shop/web --to pod/shop/web-1 -o wide
  kpctl get flows shop/web -o json | jq '.flows[] | select(.unreplied > 0) | .endpoint'

Exit codes: 0 all nodes answered, 6 a node did not";

/// The question: who is connected.
#[derive(Args, Debug)]
pub(crate) struct FlowsArgs {
    /// NAMESPACE/NAME, or NAME in the namespace of -n, else in `default`
    #[arg(value_name = "SERVICE")]
    service: String,
    /// The namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// Only these clients: ADDRESS, pod/NAMESPACE/NAME, node/NAME, or outside
    #[arg(long, value_name = "CLIENT", value_parser = client)]
    from: Option<String>,
    /// Only these endpoints: ADDRESS, pod/NAMESPACE/NAME, or node/NAME for those on a node
    #[arg(long, value_name = "ENDPOINT", value_parser = endpoint)]
    to: Option<String>,
    /// Only connections that this node leads
    #[arg(long, value_name = "NODE", value_parser = node_name)]
    node: Option<String>,
    /// Ask again every 2 s, until Ctrl-C
    #[arg(short, long)]
    pub(crate) watch: bool,
}

fn client(text: &str) -> Result<String, String> {
    match text {
        "outside" => Ok(text.to_owned()),
        text => endpoint(text).map_err(|error| error + ", or outside"),
    }
}

fn endpoint(text: &str) -> Result<String, String> {
    let parts: Vec<&str> = text.split('/').collect();
    let is_known = match parts.as_slice() {
        ["pod", namespace, name] => !namespace.is_empty() && !name.is_empty(),
        ["node", name] => !name.is_empty(),
        _ => parse_ip(text).is_ok(),
    };
    if is_known {
        Ok(text.to_owned())
    } else {
        Err("expected an address, pod/NAMESPACE/NAME, node/NAME".to_owned())
    }
}

impl FlowsArgs {
    /// Returns the question, or the error in the Service's name.
    pub(crate) fn request(&self) -> Result<(ServiceName, pb::FlowsRequest), clap::Error> {
        let name = service_name(&self.service, self.namespace.as_deref())?;
        let text = |of: &Option<String>| of.clone().unwrap_or_default();
        let request = pb::FlowsRequest {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
            node: text(&self.node),
            from: text(&self.from),
            to: text(&self.to),
        };
        Ok((name, request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_read_as_people_write_them() {
        for text in ["10.0.0.7", "fd00::7", "pod/shop/web-1", "node/n1"] {
            assert_eq!(client(text).as_deref(), Ok(text));
            assert_eq!(endpoint(text).as_deref(), Ok(text));
        }
        assert!(client("outside").is_ok() && endpoint("outside").is_err());
        for wrong in ["", "web", "pod/web", "pod//web", "node/", "10.0.0.0/8"] {
            assert!(client(wrong).is_err(), "{wrong}");
        }
    }
}
