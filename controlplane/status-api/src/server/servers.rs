//! Virtual servers of IPVS in the description of a Service. They and their connections change all the time, so reports
//! contain only a few counts of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use kplane_agents::fleet::label;
use kplane_agents::node_query::Reply;
use kplane_model::{NodeName, ServiceName};
use kplane_proto::v1 as pb;

use super::node_query::{self, Agents};
use super::pages::Node;

/// Longest text of an agent that is shown, in bytes.
const TEXT: usize = 300;

/// Asks all agents that have virtual servers for those of a Service.
pub(super) async fn of_all(
    agents: Agents<'_>,
    service: &ServiceName,
) -> BTreeMap<NodeName, pb::ServiceServers> {
    let question = Arc::new(node_query::about(service));
    let wanted = |_: &NodeName, node: &Node<'_>| node.has_servers(service);
    let answers = agents.ask(|_| Arc::clone(&question), wanted, node_query::SERVICE);
    let heard = answers.await.nodes.into_iter();
    heard.map(|heard| (heard.node.clone(), servers(heard, service))).collect()
}

/// Returns an answer, without virtual servers of other Services.
pub(super) fn servers(heard: Reply, service: &ServiceName) -> pb::ServiceServers {
    let inspection = match heard.outcome {
        Ok(inspection) => inspection,
        Err(error) => {
            return pb::ServiceServers {
                error,
                ..pb::ServiceServers::default()
            };
        }
    };
    let mut servers = inspection.servers;
    servers.retain(|server| {
        let key = server.key.as_ref();
        key.is_some_and(|k| k.namespace == *service.namespace && k.name == *service.name)
    });
    let cut = kplane_proto::bound_servers(&mut servers) as u64;
    pb::ServiceServers {
        servers,
        more: inspection.more.saturating_add(cut),
        age_ms: inspection.age_ms,
        error: label(&inspection.error, TEXT),
    }
}
