//! The clients that session affinity remembers, asked of all nodes: what `kpctl get affinity` shows.

use std::net::IpAddr;
use std::time::Duration;

use kplane_agents::fleet::label;
use kplane_agents::hub::Hub;
use kplane_agents::peers::Peers;
use kplane_desired_state::index::{PortView, ServiceDetail};
use kplane_model::{Family, ServiceName, parse_ip};
use kplane_proto::v1 as pb;
use tonic::Status;

use super::node_query;
use super::request::detail_for;

/// Maximum number of ServicePorts in a question.
const PORTS: usize = 32;
/// Maximum number of addresses of a ServicePort.
const ADDRESSES: usize = 64;
/// Maximum number of endpoints of a ServicePort.
const ENDPOINTS: usize = 256;
/// Maximum number of endpoints in a question: some 100 kB.
const ALL_ENDPOINTS: usize = 2_000;
/// Maximum number of clients in an answer.
const CLIENTS: usize = 2_000;
/// Time for all agents. Each reads for 3 s at most.
const WITHIN: Duration = Duration::from_millis(4_500);
/// Longest address, in bytes.
const ADDRESS: usize = 64;

/// Asks all agents, or that of one node, which clients of a Service they remember.
pub(super) async fn ask(
    hub: &Hub,
    peers: Option<&Peers>,
    request: &pb::AffinityRequest,
) -> Result<pb::AffinityAnswer, Status> {
    let node = request.node.as_str();
    let name = ServiceName::new(&request.namespace, &request.name);
    let client = client(&request.client)?;
    let detail = detail_for(hub, &name, node).await?;
    let ports = ports(&name, &detail, client)?;
    let endpoints = (ALL_ENDPOINTS / ports.len().max(1)).min(ENDPOINTS);
    let left_out: usize =
        ports.iter().map(|view| view.endpoints.len().saturating_sub(endpoints)).sum();
    let question = pb::Inspect {
        affinity: Some(pb::AffinityQuestion {
            ports: ports.iter().map(|view| port(view, endpoints)).collect(),
            client: client.map_or_else(String::new, |client| client.to_string()),
        }),
        ..pb::Inspect::default()
    };
    let answers = node_query::ask(hub, peers, question, node, WITHIN).await;
    Ok(pb::AffinityAnswer {
        endpoints_left_out: left_out as u64,
        ..put_together(&ports, &answers)
    })
}

fn invalid(text: impl Into<String>) -> Status {
    Status::invalid_argument(text)
}

fn client(text: &str) -> Result<Option<IpAddr>, Status> {
    if text.is_empty() {
        return Ok(None);
    }
    let ip = parse_ip(text).map_err(|_| {
        let text = label(text, ADDRESS);
        invalid(format!("{text:?} is no address, such as 10.244.1.9"))
    })?;
    Ok(Some(ip))
}

/// Returns the ports of a Service that may remember the client.
fn ports<'a>(
    name: &ServiceName,
    detail: &'a ServiceDetail,
    client: Option<IpAddr>,
) -> Result<Vec<&'a PortView>, Status> {
    let with: Vec<_> = detail
        .ports
        .iter()
        .filter(|view| view.port.affinity_timeout_s.is_some())
        .collect();
    if with.is_empty() {
        return Err(invalid(format!(
            "the Service {name} remembers no clients: its spec.sessionAffinity is not ClientIP, or it is not proxied"
        )));
    }
    let Some(client) = client else {
        return Ok(with.into_iter().take(PORTS).collect());
    };
    let family = Family::of(client);
    let of_family: Vec<_> = with
        .into_iter()
        .filter(|view| view.port.key.family == family)
        .take(PORTS)
        .collect();
    if of_family.is_empty() {
        Err(invalid(format!(
            "the Service {name} has no {family} addresses, so it cannot remember the client {client}"
        )))
    } else {
        Ok(of_family)
    }
}

/// Returns what an agent needs to find the clients of a ServicePort.
pub(super) fn port(view: &PortView, endpoints: usize) -> pb::AffinityPort {
    let port = &view.port;
    let addresses = [port.cluster_ip]
        .into_iter()
        .chain(port.external_ips.iter().copied())
        .chain(port.load_balancer_ips.iter().copied());
    let endpoints = view.endpoints.iter().take(endpoints);
    pb::AffinityPort {
        key: Some((&port.key).into()),
        addresses: addresses.take(ADDRESSES).map(|ip| ip.to_string()).collect(),
        port: port.port.into(),
        node_port: port.node_port.unwrap_or(0).into(),
        endpoints: endpoints.map(|of| of.addr.to_string()).collect(),
    }
}

fn put_together(ports: &[&PortView], answers: &node_query::Answers) -> pb::AffinityAnswer {
    let parts = answers.parts(|answer| answer.affinity.as_ref(), |known| &known.error);
    let mut all = pb::AffinityAnswer {
        nodes: Some(parts.asked),
        ..pb::AffinityAnswer::default()
    };
    let mut clients = Vec::new();
    for (node, affinity) in parts.reported {
        all.more = all.more.saturating_add(affinity.more);
        let known = affinity.clients.iter().filter_map(|known| {
            let port = ports.get(usize::try_from(known.port).ok()?)?;
            Some(pb::NodeClient {
                node: node.to_string(),
                key: Some((&port.port.key).into()),
                client: parse_ip(&known.client).ok()?.to_string(),
                endpoint: label(&known.endpoint, ADDRESS),
                expires_s: known.expires_s,
            })
        });
        clients.extend(known);
    }
    clients.sort_by(|a, b| (&a.client, &a.node).cmp(&(&b.client, &b.node)));
    let cut = clients.len().saturating_sub(CLIENTS) as u64;
    clients.truncate(CLIENTS);
    all.more = all.more.saturating_add(cut);
    all.clients = clients;
    all
}
