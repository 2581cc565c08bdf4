//! What the userspace proxies of nodes know of a Service: `kpctl get proxied`.

use std::time::Duration;

use kplane_agents::fleet::label;
use kplane_agents::hub::Hub;
use kplane_agents::peers::Peers;
use kplane_desired_state::index::PortView;
use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use tonic::Status;

use super::node_query;
use super::request::detail_for;

/// Maximum number of ServicePorts in a question.
const PORTS: usize = 32;
/// Maximum number of ServicePorts of all nodes in an answer.
const ANSWERS: usize = 2_000;
/// Maximum number of endpoints of a ServicePort that an agent may name.
const ENDPOINTS: usize = 256;
/// Maximum number of reasons of failures that an agent may name.
const REASONS: usize = 8;
/// Longest address or reason, in bytes.
const TEXT: usize = 64;
/// Time for all agents.
const WITHIN: Duration = Duration::from_millis(4_500);

/// Asks all agents, or that of one node, about a Service.
pub(super) async fn ask(
    hub: &Hub,
    peers: Option<&Peers>,
    request: &pb::ProxiedRequest,
) -> Result<pb::ProxiedAnswer, Status> {
    let node = request.node.as_str();
    let name = ServiceName::new(&request.namespace, &request.name);
    let detail = detail_for(hub, &name, node).await?;
    let ports: Vec<&PortView> = detail.ports.iter().take(PORTS).collect();
    let question = pb::Inspect {
        proxied: Some(pb::ProxiedQuestion {
            ports: ports.iter().map(|view| (&view.port.key).into()).collect(),
        }),
        ..pb::Inspect::default()
    };
    let answers = node_query::ask(hub, peers, question, node, WITHIN).await;
    Ok(put_together(&ports, &answers))
}

fn put_together(ports: &[&PortView], answers: &node_query::Answers) -> pb::ProxiedAnswer {
    let parts = answers.parts(|answer| answer.proxied.as_ref(), |_| "");
    let mut all = Vec::new();
    for (index, view) in ports.iter().enumerate() {
        let key: pb::ServiceKey = (&view.port.key).into();
        for (node, state) in &parts.reported {
            // An agent that answers about one ServicePort many times counts once.
            let of_port = state.ports.iter().take(PORTS);
            let known = of_port.take(ports.len()).find(|one| one.key.as_ref() == Some(&key));
            all.extend(known.map(|known| (index, node, known)));
        }
    }
    let more = all.len().saturating_sub(ANSWERS) as u64;
    all.truncate(ANSWERS);
    pb::ProxiedAnswer {
        ports: all
            .into_iter()
            .map(|(_, node, port)| pb::NodeProxied {
                node: node.to_string(),
                port: Some(bounded(port)),
            })
            .collect(),
        more,
        nodes: Some(parts.asked),
    }
}

/// Returns what an agent says, within bounds.
fn bounded(port: &pb::ProxiedPort) -> pb::ProxiedPort {
    let endpoints = port.endpoints.iter().take(ENDPOINTS);
    let failed = port.failed.iter().take(REASONS);
    pb::ProxiedPort {
        endpoints: endpoints
            .map(|endpoint| pb::ProxiedEndpoint {
                address: label(&endpoint.address, TEXT),
                ..*endpoint
            })
            .collect(),
        failed: failed
            .map(|failed| pb::ProxiedFailure {
                reason: label(&failed.reason, TEXT),
                count: failed.count,
            })
            .collect(),
        key: port.key.clone(),
        ..*port
    }
}
