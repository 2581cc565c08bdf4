//! Connections that all agents try: what `kpctl probe` shows. Each goes through its node's own data path to a Service, and
//! straight to the Service's endpoints, so that the answer says which of both is broken. Where DNS is probed, agents ask
//! for a name instead of connecting.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use kplane_agents::fleet::label;
use kplane_agents::hub::Hub;
use kplane_agents::node_query::Timeouts;
use kplane_agents::peers::Peers;
use kplane_desired_state::index::{PortView, ServiceDetail};
use kplane_model::{Family, NodeFacts, NodeName, Protocol, ServiceName};
use kplane_proto::v1 as pb;
use tonic::Status;

use super::attempts;
use super::node_query::{self, Agents, Answers};
use super::pages::{Node, Snapshot};
use super::request::{bounded_names, detail_for};

/// The Service that every cluster has, and the one that most clusters have for DNS.
const CANARY: (&str, &str) = ("default", "kubernetes");
const DNS: (&str, &str) = ("kube-system", "kube-dns");
/// Endpoints of a family that each agent tries.
const ENDPOINTS: usize = 2;
/// Neighbours whose node port each agent tries.
const NEIGHBOURS: usize = 2;
/// Maximum number of nodes in an answer.
const NODES: usize = 10_000;
/// Nodes whose failed connections are named.
const DETAILED: usize = 1_000;
/// Failed connections of a node that are named.
const FAILED: usize = 4;
/// Time for agents. Each waits for a second, and may have other questions to answer first.
const PATIENCE: Timeouts = Timeouts {
    each: Duration::from_secs(5),
    within: Duration::from_secs(25),
};
/// Longest text of an agent that is shown, in bytes.
const TEXT: usize = 200;

/// What an agent tries.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Try {
    /// The Service, through the data path.
    Service(SocketAddr),
    /// An endpoint of the family, straight.
    Endpoint(SocketAddr),
    /// The Service's node port on a neighbour.
    NodePort(NodeName, SocketAddr),
}

impl Try {
    fn address(&self) -> SocketAddr {
        match self {
            Self::Service(at) | Self::Endpoint(at) | Self::NodePort(_, at) => *at,
        }
    }

    fn failed(&self, attempt: &pb::Attempt) -> pb::ProbedConnection {
        let (kind, node) = match self {
            Self::Service(_) => ("ClusterIP", ""),
            Self::Endpoint(_) => ("endpoint", ""),
            Self::NodePort(node, _) => ("node port", &**node),
        };
        pb::ProbedConnection {
            kind: kind.to_owned(),
            node: node.to_owned(),
            attempt: Some(pb::Attempt {
                address: self.address().to_string(),
                outcome: attempt.outcome,
                took_us: attempt.took_us,
                error: label(&attempt.error, TEXT),
            }),
        }
    }
}

/// How agents try.
#[derive(Clone, Copy, Debug)]
enum Means<'a> {
    /// They open connections.
    Tcp,
    /// They ask for the address of this name.
    Dns(&'a str),
}

impl<'a> Means<'a> {
    fn of(request: &'a pb::ProbeRequest) -> Result<Self, Status> {
        let name = request.dns_name.as_str();
        let is_plain =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        match name {
            "" => Ok(Self::Tcp),
            name if name.bytes().all(is_plain) => Ok(Self::Dns(name)),
            name => Err(Status::invalid_argument(format!(
                "DNS cannot be asked for {name:?}: a name has letters, digits, hyphens and dots"
            ))),
        }
    }

    /// Returns the Service that is probed if none is named.
    fn service(self) -> ServiceName {
        let (namespace, name) = match self {
            Self::Tcp => CANARY,
            Self::Dns(_) => DNS,
        };
        ServiceName::new(namespace, name)
    }

    fn protocol(self) -> Protocol {
        match self {
            Self::Tcp => Protocol::Tcp,
            Self::Dns(_) => Protocol::Udp,
        }
    }

    fn question(self, tries: &[Try]) -> pb::Inspect {
        let addresses = tries.iter().map(|one| one.address().to_string()).collect();
        match self {
            Self::Tcp => pb::Inspect {
                attempts: addresses,
                ..pb::Inspect::default()
            },
            Self::Dns(name) => pb::Inspect {
                dns: Some(pb::DnsQuestion {
                    name: name.to_owned(),
                    servers: addresses,
                }),
                ..pb::Inspect::default()
            },
        }
    }
}

/// Lets the agents of all nodes, or of one, probe a Service.
pub(super) async fn probe(
    hub: &Hub,
    peers: Option<&Peers>,
    request: &pb::ProbeRequest,
) -> Result<pb::ProbeReport, Status> {
    bounded_names(&[&request.port, &request.dns_name])?;
    let way = Means::of(request)?;
    let name = match request.name.as_str() {
        "" => way.service(),
        name => ServiceName::new(&request.namespace, name),
    };
    let node = request.node.as_str();
    let detail = detail_for(hub, &name, node).await?;
    let views = views(&name, &detail, &request.port, way.protocol())?;
    let (facts, others) = (hub.store().nodes(), node_query::others(peers).await);
    let snapshot = Snapshot::with(hub, &others);
    let all: Vec<NodeName> = snapshot.nodes().map(|(of, _)| of.clone()).collect();
    let plan = |of: &NodeName| plan(&views, of, &all, &facts);
    let question = |of: &NodeName| Arc::new(way.question(&plan(of)));
    let wanted = |of: &NodeName, _: &Node<'_>| node.is_empty() || **of == *node;
    let agents = Agents {
        hub,
        peers,
        others: &others,
    };
    let answers = agents.ask(question, wanted, PATIENCE).await;
    let mut report = report(answers, plan);
    report.key = views.first().map(|view| (&view.port.key).into());
    let node_port = views.iter().find_map(|view| view.port.node_port);
    report.node_port = node_port.unwrap_or(0).into();
    report.dns_name.clone_from(&request.dns_name);
    report.has_endpoints = views.iter().any(|view| ready(view).next().is_some());
    Ok(report)
}

/// Returns the port to probe, in all families.
fn views<'a>(
    name: &ServiceName,
    detail: &'a ServiceDetail,
    port: &str,
    protocol: Protocol,
) -> Result<Vec<&'a PortView>, Status> {
    let named = |view: &&PortView| {
        let is = port.is_empty()
            || *port == *view.port.key.port_name
            || port == view.port.port.to_string();
        is && view.port.key.protocol == protocol
    };
    let mut views: Vec<&PortView> = detail.ports.iter().filter(named).collect();
    let Some(first) = views.first().map(|view| view.port.key.port_name.clone()) else {
        return Err(Status::invalid_argument(format!(
            "the Service {name} has no port of {protocol}{} to probe: kpctl describe service {name} shows its ports",
            match port {
                "" => String::new(),
                port => format!(" with name or number {port:?}"),
            }
        )));
    };
    views.retain(|view| view.port.key.port_name == first);
    Ok(views)
}

fn ready(view: &PortView) -> impl Iterator<Item = SocketAddr> {
    view.endpoints
        .iter()
        .filter(|endpoint| endpoint.is_usable())
        .map(|endpoint| SocketAddr::new(endpoint.addr.ip, endpoint.addr.port))
}

/// Returns what a node's agent tries, always in the same order.
fn plan(
    views: &[&PortView],
    node: &NodeName,
    all: &[NodeName],
    facts: &BTreeMap<NodeName, Arc<NodeFacts>>,
) -> Vec<Try> {
    let mut tries = Vec::new();
    for view in views {
        let port = &view.port;
        tries.push(Try::Service(SocketAddr::new(port.cluster_ip, port.port)));
        tries.extend(ready(view).take(ENDPOINTS).map(Try::Endpoint));
        let Some(node_port) = port.node_port else {
            continue;
        };
        let neighbours = neighbours(node, all).filter_map(|neighbour| {
            let facts = facts.get(neighbour)?;
            let ip = primary(facts, port.key.family)?;
            Some(Try::NodePort(
                neighbour.clone(),
                SocketAddr::new(ip, node_port),
            ))
        });
        tries.extend(neighbours.take(NEIGHBOURS));
    }
    tries
}

/// Returns the nodes behind a node in the ring of all nodes: each node is probed by as many as it probes.
fn neighbours<'a>(node: &NodeName, all: &'a [NodeName]) -> impl Iterator<Item = &'a NodeName> {
    let at = all.partition_point(|other| other <= node);
    let (before, after) = all.split_at_checked(at).unwrap_or((all, &[]));
    let ring = after.iter().chain(before);
    let node = node.clone();
    ring.filter(move |other| **other != node).take(NEIGHBOURS * 2)
}

fn primary(facts: &NodeFacts, family: Family) -> Option<IpAddr> {
    facts.addresses.iter().copied().find(|ip| Family::of(*ip) == family)
}

fn report(answers: Answers, plan: impl Fn(&NodeName) -> Vec<Try>) -> pb::ProbeReport {
    let mut report = pb::ProbeReport {
        missing_replicas: answers.missing,
        ..pb::ProbeReport::default()
    };
    let mut seen = BTreeMap::<NodeName, (Vec<String>, u32)>::new();
    let mut detailed = 0;
    for heard in &answers.nodes {
        let node = &heard.node;
        let tries = plan(node);
        let mut probed = match attempts::of(heard) {
            Ok(attempts) => judge(&tries, attempts, |neighbour, works| {
                let (by, not_by) = seen.entry(neighbour.clone()).or_default();
                if !works {
                    *not_by += 1;
                } else if by.len() < FAILED {
                    by.push(node.to_string());
                }
            }),
            Err(reason) => pb::ProbedNode {
                reason,
                ..pb::ProbedNode::default()
            },
        };
        probed.node = node.to_string();
        detailed += usize::from(!probed.failed.is_empty());
        if detailed > DETAILED {
            probed.failed.clear();
        }
        if report.nodes.len() < NODES {
            report.nodes.push(probed);
        } else {
            report.more += 1;
        }
    }
    for node in &mut report.nodes {
        if let Some((by, not_by)) = seen.remove(node.node.as_str()) {
            node.seen_by = by;
            node.not_seen_by = not_by;
        }
    }
    report
}

/// Says what the outcomes of a node's connections mean; `neighbour` learns what its node port did.
fn judge(
    tries: &[Try],
    attempts: &[pb::Attempt],
    mut neighbour: impl FnMut(&NodeName, bool),
) -> pb::ProbedNode {
    let mut node = pb::ProbedNode::default();
    let connected = |attempt: &pb::Attempt| attempt.outcome() == pb::AttemptOutcome::Connected;
    let outcomes = || tries.iter().zip(attempts);
    let family = |one: &Try| Family::of(one.address().ip());
    let mut verdict = pb::ProbeVerdict::Works;
    for (one, attempt) in outcomes() {
        let works = connected(attempt);
        match one {
            Try::Service(_) if works => node.took_us = node.took_us.max(attempt.took_us),
            Try::Service(at) => {
                let its = outcomes().filter(|(other, _)| {
                    matches!(other, Try::Endpoint(_)) && family(other) == family(one)
                });
                let straight = its.filter(|(_, attempt)| connected(attempt)).count();
                let (found, text) = match straight {
                    0 => (
                        pb::ProbeVerdict::Endpoints,
                        format!("neither {at} nor an endpoint behind it gives a good answer"),
                    ),
                    _ => (
                        pb::ProbeVerdict::DataPath,
                        format!(
                            "nothing comes back through {at}, and an endpoint behind it answers"
                        ),
                    ),
                };
                // The data path is what kplane answers for.
                if verdict != pb::ProbeVerdict::DataPath {
                    verdict = found;
                    node.reason = text;
                }
            }
            Try::Endpoint(_) => {}
            Try::NodePort(of, at) => {
                neighbour(of, works);
                if !works && verdict == pb::ProbeVerdict::Works {
                    verdict = pb::ProbeVerdict::NodePort;
                    node.reason = format!("the node port at {at} of {of} does not answer");
                }
            }
        }
        if !works && node.failed.len() < FAILED {
            node.failed.push(one.failed(attempt));
        }
    }
    // One endpoint of several that fails is no problem of a node through which the Service works.
    if verdict == pb::ProbeVerdict::Works {
        node.failed.clear();
    }
    node.verdict = verdict.into();
    node
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(connected: bool) -> pb::Attempt {
        let outcome = if connected {
            pb::AttemptOutcome::Connected
        } else {
            pb::AttemptOutcome::Silent
        };
        pb::Attempt {
            outcome: outcome.into(),
            took_us: 400,
            ..pb::Attempt::default()
        }
    }

    #[test]
    fn the_data_path_is_told_from_the_endpoints_and_from_neighbours() {
        use pb::ProbeVerdict as V;
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let tries = [
            Try::Service(at("10.96.0.1:443")),
            Try::Endpoint(at("10.0.0.1:6443")),
            Try::Endpoint(at("10.0.0.2:6443")),
            Try::NodePort("n2".into(), at("10.0.0.9:30000")),
        ];
        for (outcomes, verdict, seen) in [
            ([true, true, true, true], V::Works, true),
            ([true, false, true, true], V::Works, true),
            ([false, true, false, true], V::DataPath, true),
            ([false, false, false, true], V::Endpoints, true),
            ([true, true, true, false], V::NodePort, false),
            ([false, true, true, false], V::DataPath, false),
        ] {
            let attempts = outcomes.map(attempt);
            let mut neighbours = Vec::new();
            let node = judge(&tries, &attempts, |of, works| {
                neighbours.push((of.to_string(), works));
            });
            assert_eq!(node.verdict(), verdict, "{outcomes:?}");
            assert_eq!(node.reason.is_empty(), verdict == V::Works);
            assert_eq!(neighbours, [("n2".to_owned(), seen)]);
        }
    }

    #[test]
    fn every_node_is_the_neighbour_of_as_many_as_it_has() {
        let all: Vec<NodeName> = ["a", "b", "c", "d", "e"].map(Into::into).into();
        let mut probed = BTreeMap::<&str, usize>::new();
        for node in &all {
            for other in neighbours(node, &all).take(NEIGHBOURS) {
                assert_ne!(other, node);
                *probed.entry(other).or_default() += 1;
            }
        }
        assert!(probed.values().all(|count| *count == NEIGHBOURS));
        assert_eq!(probed.len(), all.len());
        assert_eq!(neighbours(&all[0], &all[..1]).count(), 0);
    }
}
