//! The flows that lead to endpoints: what `kpctl drain-status` shows. The agents of all nodes count them.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use kplane_fleet::hub::Hub;
use kplane_fleet::peers::Peers;
use kplane_model::{Endpoint, Protocol, ServiceName, parse_ip};
use kplane_picture::index::{PortView, Selection};
use kplane_proto::v1 as pb;
use tonic::Status;

use super::policy_index::{no_pod, place_of};
use super::request::{bounded_names, detail, known_node};
use super::{closing, inquiry, policies};

/// Maximum number of endpoints in a question.
const TARGETS: usize = 256;
/// Maximum number of addresses of a Pod.
const ADDRESSES: usize = 16;
/// Maximum number of Services that an endpoint names.
const SERVICES: usize = 16;
/// Maximum number of nodes that an endpoint names.
const NODES: usize = 100;
/// Time for all agents. Each counts for 4 s at most.
const WITHIN: Duration = Duration::from_millis(5_500);

/// An address, and a port unless all count.
type EndpointPlace = (IpAddr, Option<(u16, Protocol)>);

/// An endpoint to count.
#[derive(Debug, Default)]
struct Found {
    node: String,
    terminating: bool,
    serving: bool,
    services: Vec<String>,
}

/// The endpoints of a question.
#[derive(Debug, Default)]
struct Subject {
    all: bool,
    found: BTreeMap<EndpointPlace, Found>,
    /// Number of endpoints that were left out.
    more: u64,
    /// Number of endpoints that are not being shut down, and do not count.
    others: u64,
}

/// Asks all agents how many flows lead to the endpoints that a request means.
pub(super) async fn status(
    hub: &Hub,
    peers: Option<&Peers>,
    request: &pb::DrainStatusRequest,
) -> Result<pb::DrainStatus, Status> {
    if request.departures {
        let latest = hub.departures.latest().into_iter().rev();
        return Ok(pb::DrainStatus {
            departures: latest.map(|(_, one)| pb::Departure::clone(&one)).collect(),
            ..pb::DrainStatus::default()
        });
    }
    let subject = Subject::of(hub, request).await?;
    let (more, others) = (subject.more, subject.others);
    if subject.found.is_empty() {
        return Ok(pb::DrainStatus {
            more,
            others,
            ..pb::DrainStatus::default()
        });
    }
    let question = pb::Inspect {
        flows: Some(pb::FlowQuestion {
            targets: subject.found.keys().map(target).collect(),
        }),
        ..pb::Inspect::default()
    };
    let answers = inquiry::ask(hub, peers, question, "", WITHIN).await;
    let parts = answers.parts(|answer| answer.flows.as_ref(), |counts| &counts.error);
    let mut tally = DrainTally::new(subject.found);
    for (node, counts) in &parts.told {
        tally.add(node, counts);
    }
    Ok(pb::DrainStatus {
        endpoints: tally.endpoints(),
        more,
        others,
        ..parts.asked.into()
    })
}

fn target(&(ip, port): &EndpointPlace) -> pb::FlowTarget {
    let (port, protocol) = match port {
        Some((port, protocol)) => (port, protocol.into()),
        None => (0, pb::Protocol::Unspecified),
    };
    pb::FlowTarget {
        address: ip.to_string(),
        port: port.into(),
        protocol: protocol.into(),
    }
}

/// Calls `each` with the ServicePorts that have an endpoint on a node.
async fn ports_on(hub: &Hub, node: &str, mut each: impl FnMut(&PortView)) -> Result<(), Status> {
    let mut selection = Selection {
        node: node.to_owned(),
        ..Selection::default()
    };
    loop {
        let page = hub.ports(selection.clone()).await.map_err(closing)?;
        page.ports.iter().for_each(&mut each);
        selection.after = page.ports.last().map(|port| port.port.key.clone());
        if !page.more {
            return Ok(());
        }
    }
}

impl Subject {
    async fn of(hub: &Hub, request: &pb::DrainStatusRequest) -> Result<Self, Status> {
        bounded_names(&[&request.namespace, &request.name, &request.node])?;
        let mut subject = Self {
            all: request.all,
            ..Self::default()
        };
        let by_service = !request.name.is_empty();
        if !request.pod.is_empty() && !by_service && request.node.is_empty() {
            subject.add_pod(hub, &request.pod).await?;
            return Ok(subject);
        }
        match (by_service, request.addresses.as_slice(), &*request.node) {
            (false, [], "") | (true, [_, ..], _) => {
                let text = "name one Service, one node, or the addresses of one Pod";
                return Err(Status::invalid_argument(text));
            }
            (true, [], _) => {
                let name = ServiceName::new(&request.namespace, &request.name);
                for port in &detail(hub, &name).await?.ports {
                    subject.add(port, |_| true);
                }
            }
            (false, [], node) => subject.add_node(hub, node).await?,
            (false, addresses, node) => subject.add_addresses(addresses, node)?,
        }
        Ok(subject)
    }

    /// Adds the addresses of a Pod. Its EndpointSlices say whether it is being shut down.
    async fn add_pod(&mut self, hub: &Hub, pod: &str) -> Result<(), Status> {
        let named = policies::named(pod);
        let pod = named.ok_or_else(|| Status::invalid_argument("pod is NAMESPACE/NAME"))?;
        bounded_names(&[&pod.namespace, &pod.name])?;
        let place = place_of(hub, &pod).await?.ok_or_else(|| {
            Status::failed_precondition(format!(
                "the addresses of Pod {pod} are not known, since the control plane watches no Pods without \
                 --network-policy: name a kubeconfig, or ask for its Service"
            ))
        })?;
        let (node, addresses) = place.ok_or_else(|| no_pod(&pod))?;
        let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
        self.add_addresses(&addresses, &node)?;
        let found = &mut self.found;
        ports_on(hub, &node, |port| {
            for endpoint in port.endpoints.iter().filter(|of| of.terminating) {
                if let Some(found) = found.get_mut(&(endpoint.addr.ip, None)) {
                    found.terminating = true;
                }
            }
        })
        .await
    }

    /// Adds the endpoints on a node.
    async fn add_node(&mut self, hub: &Hub, node: &str) -> Result<(), Status> {
        known_node(hub, node)?;
        ports_on(hub, node, |port| {
            self.add(port, |endpoint| endpoint.node.as_deref() == Some(node));
        })
        .await
    }

    fn add_addresses(&mut self, addresses: &[String], node: &str) -> Result<(), Status> {
        let invalid = |text: String| Err(Status::invalid_argument(text));
        if addresses.len() > ADDRESSES {
            return invalid(format!("more than {ADDRESSES} addresses"));
        }
        for text in addresses {
            let ip = match parse_ip(text) {
                Ok(ip) if !ip.is_unspecified() => ip,
                Ok(ip) => return invalid(format!("{ip} is the address of no Pod")),
                Err(error) => return invalid(error.to_string()),
            };
            let found = Found {
                node: node.to_owned(),
                ..Found::default()
            };
            self.found.insert((ip, None), found);
        }
        Ok(())
    }

    fn add(&mut self, view: &PortView, is_wanted: impl Fn(&Endpoint) -> bool) {
        let key = &view.port.key;
        for endpoint in view.endpoints.iter().filter(|one| is_wanted(one)) {
            if !self.all && !endpoint.terminating {
                self.others += 1;
                continue;
            }
            let place = (endpoint.addr.ip, Some((endpoint.addr.port, key.protocol)));
            if self.found.len() == TARGETS && !self.found.contains_key(&place) {
                self.more += 1;
                continue;
            }
            let found = self.found.entry(place).or_default();
            found.node = endpoint.node.as_deref().unwrap_or_default().to_owned();
            found.terminating |= endpoint.terminating;
            found.serving |= endpoint.serving;
            let name = key.service.to_string();
            if found.services.len() < SERVICES && !found.services.contains(&name) {
                found.services.push(name);
            }
        }
    }
}

/// The counts of all nodes, put together.
struct DrainTally {
    endpoints: Vec<(EndpointPlace, Found, Vec<pb::DrainNode>)>,
}

impl DrainTally {
    fn new(found: BTreeMap<EndpointPlace, Found>) -> Self {
        let endpoints = found.into_iter();
        Self {
            endpoints: endpoints
                .map(|(place, found)| (place, found, Vec::new()))
                .collect(),
        }
    }

    fn add(&mut self, node: &str, counts: &pb::FlowCounts) {
        for count in &counts.counts {
            let index = usize::try_from(count.target).ok();
            let Some((.., nodes)) = index.and_then(|index| self.endpoints.get_mut(index)) else {
                continue;
            };
            // An agent that names a target twice counts once.
            if nodes.last().is_some_and(|last| last.node == node) {
                continue;
            }
            nodes.push(pb::DrainNode {
                node: node.to_owned(),
                flows: count.flows,
                direct: count.direct,
                newest_s: count.newest_s,
                oldest_s: count.oldest_s,
                table: kplane_fleet::fleet::label(&counts.table, 16),
            });
        }
    }

    fn endpoints(self) -> Vec<pb::DrainEndpoint> {
        let endpoints = self.endpoints.into_iter();
        endpoints
            .map(|(place, found, nodes)| endpoint(place, found, nodes))
            .collect()
    }
}

fn endpoint(
    (ip, port): EndpointPlace,
    found: Found,
    mut nodes: Vec<pb::DrainNode>,
) -> pb::DrainEndpoint {
    let sum = |of: fn(&pb::DrainNode) -> u64, nodes: &[pb::DrainNode]| {
        nodes
            .iter()
            .fold(0_u64, |sum, node| sum.saturating_add(of(node)))
    };
    let flows = sum(|node| node.flows, &nodes);
    // Where the endpoint runs, flows that other nodes lead there look like direct ones.
    let own = nodes.iter().find(|node| node.node == found.node);
    let direct = match own {
        Some(own) => own.direct.saturating_sub(flows.saturating_sub(own.flows)),
        None => 0,
    };
    nodes.retain(|node| node.flows > 0);
    nodes.sort_by_key(|node| Reverse(node.flows));
    let nodes_with_flows = nodes.len() as u64;
    nodes.truncate(NODES);
    let (address, protocol) = match port {
        Some((port, protocol)) => (
            std::net::SocketAddr::new(ip, port).to_string(),
            protocol.into(),
        ),
        None => (ip.to_string(), pb::Protocol::Unspecified),
    };
    pb::DrainEndpoint {
        address,
        protocol: protocol.into(),
        node: found.node,
        terminating: found.terminating,
        serving: found.serving,
        services: found.services,
        flows,
        direct,
        nodes,
        nodes_with_flows,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(flows: u64, direct: u64) -> pb::FlowCounts {
        pb::FlowCounts {
            counts: vec![pb::FlowCount {
                flows,
                direct,
                ..pb::FlowCount::default()
            }],
            ..pb::FlowCounts::default()
        }
    }

    #[test]
    fn a_flow_that_two_nodes_see_counts_once() {
        let place = ("10.0.0.5".parse().unwrap(), Some((80, Protocol::Tcp)));
        let found = Found {
            node: "n1".to_owned(),
            ..Found::default()
        };
        let mut tally = DrainTally::new([(place, found)].into());
        // Node n1 leads 2 flows there itself, sees the 3 of n2, and one that no Service led.
        tally.add("n1", &counts(2, 4));
        tally.add("n2", &counts(3, 0));
        tally.add("n2", &counts(1_000, 0));
        tally.add("n3", &counts(0, 7));
        let endpoint = tally.endpoints().pop().unwrap();
        assert_eq!((endpoint.flows, endpoint.direct), (5, 1));
        let nodes: Vec<_> = endpoint.nodes.iter().map(|node| &*node.node).collect();
        assert_eq!(nodes, ["n2", "n1"]);
        assert_eq!(endpoint.address, "10.0.0.5:80");
    }
}
