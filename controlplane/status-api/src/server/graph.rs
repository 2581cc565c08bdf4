//! The question to all nodes who talked to whom through Services in the last hour, for `kpctl get graph`.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::Hash;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use kplane_agents::fleet::label;
use kplane_agents::hub::{Hub, IndexHandle};
use kplane_agents::peers::Peers;
use kplane_desired_state::index::Selection;
use kplane_model::{Family, NodeName, ServiceKey, ServiceName, parse_ip, proxy_address};
use kplane_proto::ranking::by_turns;
use kplane_proto::v1 as pb;
use prost::Message as _;
use tonic::Status;

use super::flows::{BYTES, Names, endpoint_names, share};
use super::node_query;
use super::request::{MAX_NAME, bounded_names};

/// Maximum number of Services in a question.
const SERVICES: usize = 32;
/// Maximum number of edges in an answer.
const EDGES: usize = 10_000;
/// Maximum number of nodes with partial counts that are named.
const PARTIAL: usize = 1_000;
/// Longest time to look back, in seconds.
const LONGEST_S: u32 = 3_600;
/// Time by which a node may have counted for less than was asked for: agents count by the minute.
const SLACK_S: u64 = 60;
/// Number of Services whose endpoints are looked up at once, so that nothing else waits for long.
const AT_ONCE: usize = 100;
/// Time for all agents. None reads a kernel's table for the answer.
const WITHIN: Duration = Duration::from_secs(4);

/// Asks all agents who talked to whom.
pub(super) async fn ask(
    hub: &Hub,
    peers: Option<&Peers>,
    request: &pb::GraphRequest,
) -> Result<pb::GraphAnswer, Status> {
    let since_s = match request.since_s {
        0 => LONGEST_S,
        since_s => since_s.min(LONGEST_S),
    };
    check(request)?;
    let most = share(hub, peers);
    let question = pb::Inspect {
        edges: Some(pb::EdgesQuestion {
            since_s,
            namespace: request.namespace.clone(),
            services: request.services.clone(),
            most: u32::try_from(most).unwrap_or(u32::MAX),
        }),
        ..pb::Inspect::default()
    };
    let answers = node_query::ask(hub, peers, question, "", WITHIN).await;
    let parts = answers.parts(|answer| answer.edges.as_ref(), |of| &of.error);
    let mut sums = Sums::default();
    for (node, reported) in &parts.reported {
        sums.add(node, reported, most, since_s.into());
    }
    let edges = sums.largest();
    let clients = edges.iter().filter_map(|(key, _)| key.client);
    let names = Names::of(hub, clients).await?;
    let endpoints = endpoints(hub.index(), &edges).await?;
    let mut answer = Builder {
        ages: std::mem::take(&mut sums.ages),
        ..Builder::default()
    };
    for (key, edge) in &edges {
        answer.add(key, edge, &names, &endpoints);
    }
    Ok(pb::GraphAnswer {
        clients: answer.clients.values,
        ports: answer.ports.values,
        endpoints: answer.endpoints.values,
        edges: answer.edges,
        more: sums.more.saturating_add(answer.more),
        more_failed: sums.more_failed.saturating_add(answer.more_failed),
        partial: sums.partial,
        knows_pods: names.knows_pods(),
        nodes: Some(parts.asked),
    })
}

/// Returns what a request does, for the audit log.
pub(super) fn audited(request: &pb::GraphRequest) -> String {
    let of = |text: &str| label(text, MAX_NAME);
    let services: Vec<String> =
        request.services.iter().take(SERVICES).map(|name| of(name)).collect();
    let which = match (services.as_slice(), request.namespace.as_str()) {
        ([], "") => "all Services".to_owned(),
        ([], namespace) => format!("Services of {}", of(namespace)),
        (services, _) => services.join(", "),
    };
    format!("read who talked to {which} on all nodes")
}

fn check(request: &pb::GraphRequest) -> Result<(), Status> {
    bounded_names(&[&request.namespace])?;
    if request.services.len() > SERVICES {
        return Err(Status::invalid_argument(format!(
            "{} Services are named, and {SERVICES} at most may be: without names, all Services are in the answer",
            request.services.len()
        )));
    }
    for service in &request.services {
        let parts = service.split_once('/');
        let (namespace, name) = parts
            .ok_or_else(|| Status::invalid_argument("a Service is named as NAMESPACE/NAME"))?;
        bounded_names(&[namespace, name])?;
    }
    Ok(())
}

/// The identity of an edge.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct EdgeId {
    port: ServiceKey,
    /// `None` = clients for which agents had no room.
    client: Option<IpAddr>,
    endpoint: SocketAddr,
}

/// The sums of all agents' answers.
#[derive(Debug, Default)]
struct Sums {
    /// The edges; their indexes are not set.
    edges: HashMap<EdgeId, pb::GraphEdge>,
    more: u64,
    more_failed: u64,
    partial: Vec<pb::GraphNode>,
    /// Time since the first connection of each client, in seconds.
    ages: HashMap<IpAddr, u64>,
}

impl Sums {
    /// Adds what an agent says, as far as it makes sense: `most` edges at most.
    fn add(&mut self, node: &NodeName, reported: &pb::Edges, most: usize, asked_s: u64) {
        let seconds = u64::from(reported.covered_s);
        self.more = self.more.saturating_add(reported.more);
        self.more_failed = self.more_failed.saturating_add(reported.more_failed);
        if (seconds + SLACK_S < asked_s || reported.lost > 0) && self.partial.len() < PARTIAL {
            self.partial.push(pb::GraphNode {
                node: node.to_string(),
                seconds,
                lost: reported.lost,
            });
        }
        let ports: Vec<Option<ServiceKey>> = reported
            .ports
            .iter()
            .take(most)
            .map(|key| key.clone().try_into().ok())
            .collect();
        for edge in reported.edges.iter().take(most) {
            let Some(id) = read(edge, &ports) else {
                continue;
            };
            if let Some(client) = id.client {
                let age_s = self.ages.entry(client).or_default();
                *age_s = edge.age_s.max(*age_s);
            }
            let sum = self.edges.entry(id).or_default();
            for (sum, more) in [
                (&mut sum.connections, edge.begun),
                (&mut sum.failed, edge.failed),
                (&mut sum.reset, edge.reset),
                (&mut sum.bytes_to_endpoint, edge.bytes_to_endpoint),
                (&mut sum.bytes_to_client, edge.bytes_to_client),
                (&mut sum.per_million_s, per_million_s(edge.begun, seconds)),
            ] {
                *sum = sum.saturating_add(more);
            }
            sum.seconds = sum.seconds.max(seconds);
        }
    }

    /// Returns those with the most failures, and those with the most connections; the others are only counted.
    fn largest(&mut self) -> Vec<(EdgeId, pb::GraphEdge)> {
        let mut edges: Vec<_> = std::mem::take(&mut self.edges).into_iter().collect();
        edges.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        by_turns(
            &mut edges,
            |(_, edge)| edge.connections,
            |(_, edge)| edge.failed,
        );
        for (_, edge) in edges.iter().skip(EDGES) {
            self.more = self.more.saturating_add(edge.connections);
            self.more_failed = self.more_failed.saturating_add(edge.failed);
        }
        edges.truncate(EDGES);
        edges
    }
}

/// Returns a rate, rounded up.
fn per_million_s(connections: u64, seconds: u64) -> u64 {
    let rate = (u128::from(connections) * 1_000_000).div_ceil(seconds.max(1).into());
    u64::try_from(rate).unwrap_or(u64::MAX)
}

fn read(edge: &pb::Edge, ports: &[Option<ServiceKey>]) -> Option<EdgeId> {
    let port = ports.get(usize::try_from(edge.port).ok()?)?;
    Some(EdgeId {
        port: port.clone()?,
        client: match edge.client.as_str() {
            "" => None,
            text => Some(parse_ip(text).ok()?),
        },
        endpoint: edge.endpoint.parse().ok()?,
    })
}

/// Names of endpoints: the Pod and the node.
type Endpoints = HashMap<(ServiceKey, SocketAddr), (String, String)>;

/// Looks up the endpoints of edges.
async fn endpoints(
    index: &IndexHandle,
    edges: &[(EdgeId, pb::GraphEdge)],
) -> Result<Endpoints, Status> {
    let services: BTreeSet<&ServiceName> = edges.iter().map(|(id, _)| &id.port.service).collect();
    let services: Vec<ServiceName> = services.into_iter().cloned().collect();
    let known: HashSet<_> = edges.iter().map(|(id, _)| (&id.port, id.endpoint)).collect();
    let mut found = Endpoints::new();
    for some in services.chunks(AT_ONCE) {
        let mut selection = Selection {
            among: Some(some.iter().cloned().collect()),
            ..Selection::default()
        };
        loop {
            let wanted = selection.clone();
            let page = index.look(move |index| index.ports(&wanted)).await?;
            for view in &page.ports {
                let key = &view.port.key;
                for endpoint in &view.endpoints {
                    let at = SocketAddr::new(endpoint.addr.ip, endpoint.addr.port);
                    if known.contains(&(key, at)) {
                        let names = endpoint_names(endpoint, &key.service.namespace);
                        found.insert((key.clone(), at), names);
                    }
                }
            }
            selection.after = page.ports.last().map(|view| view.port.key.clone());
            if !page.more || selection.after.is_none() {
                break;
            }
        }
    }
    Ok(found)
}

/// Values that have numbers.
#[derive(Debug)]
struct Numbered<K, V> {
    numbers: HashMap<K, u32>,
    values: Vec<V>,
}

impl<K, V> Default for Numbered<K, V> {
    fn default() -> Self {
        Self {
            numbers: HashMap::new(),
            values: Vec::new(),
        }
    }
}

impl<K: Clone + Eq + Hash, V: prost::Message> Numbered<K, V> {
    /// Returns the number of a value, and adds its size if it is new.
    fn number(&mut self, key: &K, bytes: &mut usize, value: impl FnOnce() -> V) -> u32 {
        if let Some(number) = self.numbers.get(key) {
            return *number;
        }
        let number = u32::try_from(self.values.len()).unwrap_or(u32::MAX);
        let value = value();
        *bytes += value.encoded_len() + 4;
        self.numbers.insert(key.clone(), number);
        self.values.push(value);
        number
    }
}

/// An answer, as far as there is room in a message.
#[derive(Debug, Default)]
struct Builder {
    clients: Numbered<Option<IpAddr>, pb::GraphClient>,
    ports: Numbered<ServiceKey, pb::ServiceKey>,
    endpoints: Numbered<(ServiceName, SocketAddr), pb::GraphEndpoint>,
    edges: Vec<pb::GraphEdge>,
    bytes: usize,
    more: u64,
    more_failed: u64,
    ages: HashMap<IpAddr, u64>,
}

impl Builder {
    fn add(&mut self, id: &EdgeId, edge: &pb::GraphEdge, names: &Names, endpoints: &Endpoints) {
        if self.bytes > BYTES {
            self.more = self.more.saturating_add(edge.connections);
            self.more_failed = self.more_failed.saturating_add(edge.failed);
            return;
        }
        let (bytes, ages) = (&mut self.bytes, &self.ages);
        let client = self.clients.number(&id.client, bytes, || {
            let age_s = |ip| ages.get(&ip).copied().unwrap_or_default();
            let named = id.client.map(|ip| (ip.to_string(), names.get(ip, age_s(ip))));
            named.map_or_else(pb::GraphClient::default, |(address, named)| {
                pb::GraphClient {
                    address,
                    kind: named.kind.into(),
                    name: named.name,
                }
            })
        });
        let port = self.ports.number(&id.port, bytes, || (&id.port).into());
        let at = (id.port.service.clone(), id.endpoint);
        let endpoint = self.endpoints.number(&at, bytes, || {
            let names = endpoints.get(&(id.port.clone(), id.endpoint));
            let (pod, node) = names.cloned().unwrap_or_default();
            pb::GraphEndpoint {
                address: id.endpoint.to_string(),
                pod,
                node,
                proxy: id.endpoint.ip() == proxy_address(Family::of(id.endpoint.ip())),
            }
        });
        let edge = pb::GraphEdge {
            client,
            port,
            endpoint,
            ..*edge
        };
        *bytes += edge.encoded_len() + 4;
        self.edges.push(edge);
    }
}

#[cfg(test)]
mod tests;
