//! Answers to questions about session affinity, in the wire format.

use std::net::IpAddr;

use kplane_dataplane::backend::{AffinityClient, AffinityPort, Kind, Proxy};
use kplane_model::{EndpointAddr, parse_ip};
use kplane_proto::v1 as pb;

/// Maximum number of ServicePorts in a question.
const PORTS: usize = 32;
/// Maximum number of addresses of a ServicePort.
const ADDRESSES: usize = 64;
/// Maximum number of endpoints of a ServicePort.
const ENDPOINTS: usize = 256;

/// Reads the clients that a question means. Blocks.
pub(crate) fn answer(
    backend: &str,
    proxy: Option<&dyn Proxy>,
    question: &pb::AffinityQuestion,
) -> pb::Affinity {
    let answered = try_answer(backend, proxy, question);
    answered.unwrap_or_else(|error| pb::Affinity {
        error,
        ..pb::Affinity::default()
    })
}

fn try_answer(
    backend: &str,
    proxy: Option<&dyn Proxy>,
    question: &pb::AffinityQuestion,
) -> Result<pb::Affinity, String> {
    let unknown = || "the agent does not understand the question".to_owned();
    let kind = Kind::named(backend).ok_or_else(unknown)?;
    let ports: Vec<AffinityPort> = question
        .ports
        .iter()
        .take(PORTS)
        .map(port)
        .collect::<Option<_>>()
        .ok_or_else(unknown)?;
    let client = match question.client.as_str() {
        "" => None,
        text => Some(parse_ip(text).map_err(|_| unknown())?),
    };
    let known = kind.remembered(proxy, &ports, client)?;
    Ok(pb::Affinity {
        clients: known.clients.iter().map(wire).collect(),
        more: known.more,
        error: String::new(),
    })
}

/// Reads what the control plane says about a ServicePort.
pub(super) fn port(port: &pb::AffinityPort) -> Option<AffinityPort> {
    let addresses = port.addresses.iter().take(ADDRESSES).map(|ip| parse_ip(ip).ok());
    let endpoints = port.endpoints.iter().take(ENDPOINTS).map(|at| {
        let at = at.parse::<std::net::SocketAddr>().ok();
        at.map(EndpointAddr::from)
    });
    Some(AffinityPort {
        key: port.key.clone()?.try_into().ok()?,
        addresses: addresses.collect::<Option<Vec<IpAddr>>>()?,
        port: u16::try_from(port.port).ok()?,
        node_port: Some(u16::try_from(port.node_port).ok()?).filter(|port| *port > 0),
        endpoints: endpoints.collect::<Option<_>>()?,
    })
}

fn wire(client: &AffinityClient) -> pb::RememberedClient {
    pb::RememberedClient {
        port: u32::try_from(client.port).unwrap_or(u32::MAX),
        client: client.client.to_string(),
        endpoint: client.endpoint.map_or_else(String::new, |at| at.to_string()),
        expires_s: client.expires.map(|expires| expires.as_secs()),
    }
}
