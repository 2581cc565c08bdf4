//! The question to all nodes who is connected to a Service, for `kpctl get flows`.

mod names;

use std::cmp::Reverse;
use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use kplane_agents::fleet::label;
use kplane_agents::hub::Hub;
use kplane_agents::peers::Peers;
use kplane_desired_state::index::{PortView, ServiceDetail};
use kplane_model::{NodeName, PodName, ServiceName, parse_ip};
use kplane_proto::v1 as pb;
use prost::Message as _;
use tonic::Status;

use self::names::Named;
pub(super) use self::names::{Names, endpoint_names};
use super::policy_index::{ask_if_enforced, no_pod};
use super::request::{MAX_NAME, detail_for, unknown_node};
use super::{affinity, node_query};

/// Maximum number of ServicePorts in a question.
const PORTS: usize = 32;
/// Maximum number of addresses of clients, and of endpoints, in a question. More are not selected by agents.
const ADDRESSES: usize = 32;
/// Maximum number of groups in an answer.
const FLOWS: usize = 5_000;
/// Maximum number of groups that one agent may name.
const OF_AGENT: usize = 1_000;
/// Number of groups that all agents together are asked for: some 13 MB at most.
const OF_ALL: usize = 64_000;
/// Minimum number of groups that one agent is asked for.
const LEAST: usize = 10;
/// Time for all agents. Each reads for 4 s at most.
const WITHIN: Duration = Duration::from_millis(5_500);
/// Maximum size of an answer's flows or edges, in bytes: a message has less than 4 MiB.
pub(super) const BYTES: usize = 7 << 19;
/// Longest text that names a client or an endpoint, in bytes.
const MAX_END: usize = 2 * MAX_NAME + 5;

/// The answer of a control plane that watches no Pods.
const NO_PODS: &str = "the control plane does not know Pods, because nodes enforce no NetworkPolicies: name the client's \
     address, which kubectl get pod -o wide shows";

/// The answer if no node has ranges of addresses for Pods.
const NO_RANGES: &str = "the control plane cannot tell which clients are outside, because no Node has podCIDRs: ask without \
     \"outside\"";

/// Asks all agents, or that of one node, who is connected to a Service.
pub(super) async fn ask(
    hub: &Hub,
    peers: Option<&Peers>,
    request: &pb::FlowsRequest,
) -> Result<pb::FlowsAnswer, Status> {
    let node = request.node.as_str();
    let name = ServiceName::new(&request.namespace, &request.name);
    let detail = detail_for(hub, &name, node).await?;
    if detail.ports.is_empty() {
        return Err(Status::invalid_argument(format!(
            "nodes lead no connections to the Service {name}: kpctl describe service {name} says why. Clients of a headless \
             Service connect to its Pods themselves"
        )));
    }
    let ports: Vec<&PortView> = detail.ports.iter().take(PORTS).collect();
    let wanted = Selection::of(hub, request, &name, &detail).await?;
    let most = match node {
        "" => share(hub, peers),
        _ => OF_AGENT,
    };
    let question = pb::Inspect {
        connected: Some(wanted.question(&ports, most)),
        ..pb::Inspect::default()
    };
    let answers = node_query::ask(hub, peers, question, node, WITHIN).await;
    let parts = answers.parts(|answer| answer.connected.as_ref(), |of| &of.error);
    let (mut found, mut more) = (Vec::new(), 0_u64);
    for (node, of) in &parts.reported {
        more = more.saturating_add(of.more);
        let groups = of.groups.iter().take(OF_AGENT);
        found.extend(groups.filter_map(|group| ReportedGroup::read(node, group, ports.len())));
    }
    let names = Names::of(hub, found.iter().map(|found| found.client)).await?;
    if wanted.outside && !names.knows_outside() {
        return Err(Status::failed_precondition(NO_RANGES));
    }
    found.retain(|found| wanted.covers(found, &names));
    found.sort_by_key(|found| Reverse(found.connections));
    let flows = found.iter().filter_map(|found| {
        let flow = found.wire(ports.get(found.port)?, &name, &names);
        Some((flow, found.connections))
    });
    let (flows, rest) = fitting(flows);
    // Agents left out what they could not select, too.
    let (more, unchecked) = if wanted.is_of_agents() {
        (rest.saturating_add(more), 0)
    } else {
        (rest, more)
    };
    Ok(pb::FlowsAnswer {
        flows,
        more,
        unchecked,
        has_endpoints: has_endpoints(&detail),
        knows_pods: names.knows_pods(),
        ports_left_out: detail.ports.len().saturating_sub(PORTS) as u64,
        nodes: Some(parts.asked),
    })
}

/// Returns the ends that a request names, for the audit log.
pub(super) fn ends(request: &pb::FlowsRequest) -> String {
    [("from", &request.from), ("to", &request.to)]
        .into_iter()
        .filter(|(_, end)| !end.is_empty())
        .map(|(word, end)| format!(", {word} {}", label(end, MAX_END)))
        .collect()
}

/// Returns the flows that fit into an answer, and the number of connections of the others.
fn fitting(flows: impl Iterator<Item = (pb::NodeFlow, u64)>) -> (Vec<pb::NodeFlow>, u64) {
    let (mut fit, mut bytes, mut rest) = (Vec::new(), 0, 0_u64);
    for (flow, connections) in flows {
        bytes += flow.encoded_len() + 4;
        if fit.len() == FLOWS || bytes > BYTES {
            rest = rest.saturating_add(connections);
        } else {
            fit.push(flow);
        }
    }
    (fit, rest)
}

/// Returns how many groups each agent is asked for, if all are. A replica that has just started knows the Nodes before their
/// agents.
pub(super) fn share(hub: &Hub, peers: Option<&Peers>) -> usize {
    let replicas = peers.map_or(0, Peers::known) + 1;
    let agents = hub
        .agents()
        .count()
        .saturating_mul(replicas)
        .max(hub.store().nodes().len())
        .max(1);
    (OF_ALL / agents).clamp(LEAST, OF_AGENT)
}

fn has_endpoints(detail: &ServiceDetail) -> bool {
    detail
        .ports
        .iter()
        .flat_map(|port| &port.endpoints)
        .any(|endpoint| endpoint.ready || endpoint.is_draining())
}

/// One end of connections, as people name it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    Any,
    Address(IpAddr),
    Pod(PodName),
    Node(String),
    Outside,
}

impl End {
    fn read(text: &str) -> Option<Self> {
        if text.len() > MAX_END {
            return None;
        }
        let parts: Vec<&str> = text.split('/').collect();
        match parts.as_slice() {
            [""] => Some(Self::Any),
            ["outside"] => Some(Self::Outside),
            ["pod", namespace, name] if !namespace.is_empty() && !name.is_empty() => {
                Some(Self::Pod(PodName::new(namespace, name)))
            }
            ["node", name] if !name.is_empty() => Some(Self::Node((*name).to_owned())),
            _ => parse_ip(text).ok().map(Self::Address),
        }
    }
}

/// The connections that a request means.
#[derive(Debug, Default)]
struct Selection {
    /// Addresses of clients, and of endpoints; `None` = all.
    clients: Option<HashSet<IpAddr>>,
    endpoints: Option<HashSet<IpAddr>>,
    /// Only clients that are neither Pods nor nodes.
    outside: bool,
}

impl Selection {
    async fn of(
        hub: &Hub,
        request: &pb::FlowsRequest,
        name: &ServiceName,
        detail: &ServiceDetail,
    ) -> Result<Self, Status> {
        let read = |text: &str, what: &str| {
            let invalid = || {
                let text = label(text, MAX_NAME);
                Status::invalid_argument(format!("{text:?} is none of: {what}"))
            };
            End::read(text).ok_or_else(invalid)
        };
        let clients = "an address, pod/NAMESPACE/NAME, node/NAME, outside";
        let endpoints = "an address, pod/NAMESPACE/NAME, node/NAME";
        let from = read(&request.from, clients)?;
        let to = read(&request.to, endpoints)?;
        Ok(Self {
            outside: from == End::Outside,
            clients: clients_of(hub, from).await?,
            endpoints: endpoints_of(to, name, detail)
                .map_err(|text| Status::invalid_argument(format!("{text}: {endpoints}")))?,
        })
    }

    /// Returns whether agents can select these connections.
    fn is_of_agents(&self) -> bool {
        let few =
            |of: &Option<HashSet<IpAddr>>| of.as_ref().is_none_or(|all| all.len() <= ADDRESSES);
        !self.outside && few(&self.clients) && few(&self.endpoints)
    }

    fn question(&self, ports: &[&PortView], most: usize) -> pb::ConnectedQuestion {
        let addresses = |of: &Option<HashSet<IpAddr>>| {
            of.as_ref()
                .filter(|all| all.len() <= ADDRESSES)
                .into_iter()
                .flatten()
                .map(ToString::to_string)
                .collect()
        };
        pb::ConnectedQuestion {
            ports: ports.iter().map(|view| affinity::port(view, 0)).collect(),
            clients: addresses(&self.clients),
            endpoints: addresses(&self.endpoints),
            most: u32::try_from(most).unwrap_or(u32::MAX),
        }
    }

    fn covers(&self, found: &ReportedGroup<'_>, names: &Names) -> bool {
        let has =
            |of: &Option<HashSet<IpAddr>>, ip| of.as_ref().is_none_or(|all| all.contains(&ip));
        let is_outside = || names.get(found.client, found.age_s()).kind == pb::ClientKind::Outside;
        has(&self.clients, found.client)
            && has(&self.endpoints, found.endpoint.ip())
            && (!self.outside || is_outside())
    }
}

/// Returns the addresses of clients; `None` = all.
async fn clients_of(hub: &Hub, from: End) -> Result<Option<HashSet<IpAddr>>, Status> {
    let addresses: HashSet<IpAddr> = match from {
        End::Any | End::Outside => return Ok(None),
        End::Address(ip) => [ip].into(),
        End::Node(name) => {
            let nodes = hub.store().nodes();
            let node = nodes.get(&*name).ok_or_else(|| unknown_node(&name))?;
            node.addresses.iter().copied().collect()
        }
        End::Pod(pod) => {
            let unknown = no_pod(&pod);
            let found = ask_if_enforced(hub.index(), move |policies, _| {
                policies.addresses_of(&pod).collect::<HashSet<IpAddr>>()
            })
            .await?
            .ok_or_else(|| Status::failed_precondition(NO_PODS))?;
            if found.is_empty() {
                return Err(unknown);
            }
            found
        }
    };
    Ok(Some(addresses))
}

/// Returns the addresses of endpoints; `None` = all.
fn endpoints_of(
    to: End,
    name: &ServiceName,
    detail: &ServiceDetail,
) -> Result<Option<HashSet<IpAddr>>, String> {
    let all = detail.ports.iter().flat_map(|port| &port.endpoints);
    let addresses: HashSet<IpAddr> = match &to {
        End::Any => return Ok(None),
        End::Outside => return Err("\"outside\" names no endpoint".to_owned()),
        End::Address(ip) => return Ok(Some([*ip].into())),
        End::Node(node) => all
            .filter(|endpoint| endpoint.node.as_deref() == Some(node))
            .map(|endpoint| endpoint.addr.ip)
            .collect(),
        End::Pod(pod) if pod.namespace != name.namespace => HashSet::new(),
        End::Pod(pod) => all
            .filter(|endpoint| endpoint.pod.as_deref() == Some(&*pod.name))
            .map(|endpoint| endpoint.addr.ip)
            .collect(),
    };
    match (addresses.is_empty(), to) {
        (false, _) => Ok(Some(addresses)),
        (true, End::Node(node)) => Err(format!("{name} has no endpoint on node {node}")),
        (true, End::Pod(pod)) => Err(format!("the Pod {pod} is no endpoint of {name}")),
        (true, _) => Err(format!("{name} has no such endpoint")),
    }
}

/// A group of an agent's answer.
#[derive(Debug)]
struct ReportedGroup<'a> {
    node: &'a NodeName,
    port: usize,
    client: IpAddr,
    endpoint: SocketAddr,
    connections: u64,
    group: &'a pb::ConnectedGroup,
}

impl<'a> ReportedGroup<'a> {
    /// Reads what an agent says, if it makes sense.
    fn read(node: &'a NodeName, group: &'a pb::ConnectedGroup, ports: usize) -> Option<Self> {
        let port = usize::try_from(group.port).ok()?;
        let counts = [
            group.established,
            group.unreplied,
            group.handshake,
            group.closing,
        ];
        let connections = counts.into_iter().fold(0, u64::saturating_add);
        (port < ports && connections > 0).then_some(Self {
            node,
            port,
            client: parse_ip(&group.client).ok()?,
            endpoint: group.endpoint.parse().ok()?,
            connections,
            group,
        })
    }

    /// Returns the age of the oldest connection in seconds; 0 = not known.
    fn age_s(&self) -> u64 {
        self.group.oldest_s.unwrap_or_default()
    }

    fn wire(&self, port: &PortView, of: &ServiceName, names: &Names) -> pb::NodeFlow {
        let Named { kind, name } = names.get(self.client, self.age_s());
        let at = |endpoint: &&kplane_model::Endpoint| {
            let addr = endpoint.addr;
            SocketAddr::new(addr.ip, addr.port) == self.endpoint
        };
        let endpoint = port.endpoints.iter().find(at);
        let named = endpoint.map(|endpoint| endpoint_names(endpoint, &of.namespace));
        let (endpoint_pod, endpoint_node) = named.unwrap_or_default();
        pb::NodeFlow {
            node: self.node.to_string(),
            key: Some((&port.port.key).into()),
            client_kind: kind.into(),
            client_name: name,
            endpoint_pod,
            endpoint_node,
            group: Some(pb::ConnectedGroup {
                port: 0,
                client: self.client.to_string(),
                endpoint: self.endpoint.to_string(),
                ..*self.group
            }),
        }
    }
}

#[cfg(test)]
mod tests;
