//! Which agents give signs of life.

use std::time::Duration;

use kplane_model::NodeName;
use tokio::time::Instant;

use super::{AgentRecord, AgentRegistry};

/// The agents' streams at one moment.
#[derive(Debug, Default)]
pub(crate) struct Signs {
    /// Nodes whose streams ended, or are silent, and since when.
    pub(crate) quiet: Vec<(NodeName, Instant)>,
    /// Number of other nodes.
    pub(crate) alive: usize,
}

/// Returns whether an agent is connected and has sent something lately, if it must.
fn is_alive(record: &AgentRecord, now: Instant, silent: Duration) -> bool {
    record.connected && !(record.beats && now.saturating_duration_since(record.sign) > silent)
}

impl AgentRegistry {
    /// Returns which agents are alive. An agent that sends no beats is never silent, and strangers do not count.
    pub(crate) fn signs(&self, silent: Duration) -> Signs {
        let mut signs = Signs::default();
        // The clock is read once for all agents.
        let now = Instant::now();
        let agents = self.lock();
        for (node, agent) in agents.by_node.iter().filter(|(_, agent)| !agent.stranger) {
            if is_alive(&agent.record, now, silent) {
                signs.alive += 1;
            } else {
                signs.quiet.push((node.clone(), agent.record.sign));
            }
        }
        signs
    }

    /// Returns the nodes whose agents are alive and can be asked which nodes they reach.
    pub(crate) fn askable(&self, silent: Duration) -> Vec<NodeName> {
        let now = Instant::now();
        let agents = self.lock();
        agents
            .by_node
            .iter()
            .filter(|(_, agent)| {
                agent.record.beats && !agent.stranger && is_alive(&agent.record, now, silent)
            })
            .map(|(node, _)| node.clone())
            .collect()
    }

    /// Returns whether a node's agent is alive.
    pub(crate) fn is_alive(&self, node: &str, silent: Duration) -> bool {
        let agents = self.lock();
        let agent = agents.by_node.get(node);
        agent.is_some_and(|agent| is_alive(&agent.record, Instant::now(), silent))
    }
}
