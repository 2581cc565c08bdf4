//! Endpoints that the userspace proxies of nodes avoid, as the agents report them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use kplane_desired_state::index::PortView;
use kplane_model::{Endpoint, EndpointAddr, NodeName, Reason, ServiceName, Severity, nodes_agree};
use kplane_proto::v1 as pb;

use super::Finding;

/// Maximum number of endpoints with a finding of their own.
const NAMED: usize = 20;

/// Returns a finding for each endpoint of a Service that nodes avoid, those of most nodes first. `reported` is what each
/// connected agent reports. Only endpoints that the Service has count.
pub(crate) fn avoided<'a>(
    service: &ServiceName,
    ports: &[PortView],
    reported: impl Iterator<Item = (&'a NodeName, &'a [pb::AvoidedEndpoint])>,
) -> Vec<Finding> {
    let mut found = BTreeMap::<(usize, EndpointAddr), BTreeSet<&NodeName>>::new();
    for (node, avoided) in reported {
        for one in avoided {
            if let Some(place) = place(ports, one) {
                found.entry(place).or_default().insert(node);
            }
        }
    }
    let mut found: Vec<_> = found.into_iter().collect();
    found.sort_by_key(|(_, nodes)| Reverse(nodes.len()));
    let more = found.get(NAMED..).unwrap_or_default();
    let more = (!more.is_empty()).then(|| {
        let is_any = more.iter().any(|(_, nodes)| nodes_agree(nodes.len()));
        let text = format!("{} more endpoints are avoided", more.len());
        let fix = format!("kpctl get proxied {service} names them");
        Finding::new(Reason::EndpointAvoided, severity(is_any), text, fix)
    });
    found
        .iter()
        .take(NAMED)
        .map(|((port, address), nodes)| finding(service, &ports[*port], *address, nodes))
        .chain(more)
        .collect()
}

/// Returns the index of the ServicePort that an agent means, and its endpoint, if there are both.
fn place(ports: &[PortView], reported: &pb::AvoidedEndpoint) -> Option<(usize, EndpointAddr)> {
    let key = reported.key.as_ref()?;
    let at: std::net::SocketAddr = reported.address.parse().ok()?;
    let (ip, port) = (at.ip(), at.port());
    let index = ports.iter().position(|view| pb::ServiceKey::from(&view.port.key) == *key)?;
    let address = EndpointAddr { ip, port };
    endpoint(&ports[index], address).map(|_| (index, address))
}

fn endpoint(port: &PortView, address: EndpointAddr) -> Option<&Endpoint> {
    port.endpoints.iter().find(|endpoint| endpoint.addr == address)
}

const fn severity(agree: bool) -> Severity {
    if agree { Severity::Warning } else { Severity::Info }
}

fn finding(
    service: &ServiceName,
    view: &PortView,
    address: EndpointAddr,
    nodes: &BTreeSet<&NodeName>,
) -> Finding {
    let key = &view.port.key;
    let port = match &*key.port_name {
        "" => format!("{} {}", key.protocol, key.family),
        name => format!("{name}/{} {}", key.protocol, key.family),
    };
    let there = endpoint(view, address)
        .and_then(|endpoint| endpoint.node.as_deref())
        .map_or_else(String::new, |node| format!(" on {node}"));
    let agree = nodes_agree(nodes.len());
    let (text, fix) = if agree {
        let text = format!(
            "the proxies of {} nodes avoid the endpoint {address} of {port}{there}: connections from each of them failed \
             three times in a row",
            nodes.len()
        );
        let fix = format!(
            "check the Pod with this address (kubectl -n {} get pods -o wide), and what filters packets to it; kpctl get \
             proxied {service} shows how connections fail",
            service.namespace
        );
        (text, fix)
    } else {
        let node = nodes.first().map_or("", |node| &***node);
        let text = format!(
            "the proxy of {node} avoids the endpoint {address} of {port}{there}: connections from there failed three times \
             in a row, and no other node reports the same"
        );
        let fix = format!(
            "check the network between the node and the endpoint: kpctl get proxied {service} shows whether connections of \
             other nodes reach it"
        );
        (text, fix)
    };
    let nodes = nodes.iter().map(|node| NodeName::clone(node));
    Finding::new(Reason::EndpointAvoided, severity(agree), text, fix).on(nodes.collect())
}
