//! Two agents that claim one node.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kplane_model::NodeName;
use kplane_proto::v1::Hello;

use super::moderation::{Misbehaviour, Moderation};
use super::{Agents, NotBegun};

/// Time without an attempt after which a competing agent counts as gone: a live competing agent tries again every few seconds.
const REMEMBERED: Duration = Duration::from_secs(60);

/// An agent that claims a node for which another agent speaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompetingAgent {
    /// The competing agent's address.
    pub peer: String,
    /// Time of its first attempt.
    pub since: Instant,
    /// Time of its last attempt.
    pub last: Instant,
}

impl CompetingAgent {
    fn peer_ip(&self) -> &str {
        peer_ip(&self.peer)
    }

    /// Returns whether the competing agent still tries to connect.
    pub fn is_there(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last) < REMEMBERED
    }
}

impl Agents {
    /// Refuses an agent whose process differs from the one that speaks for the node. The control plane cannot know
    /// which of the two is right, so the first one stays. An agent that has ended, or was silent for longer than
    /// streams may be, has no stream any more and is not in the way.
    pub(super) fn refuse_competing_agent(
        &mut self,
        node: &NodeName,
        hello: &Hello,
        peer: &str,
        now: Instant,
        moderation: &Moderation,
    ) -> Result<(), NotBegun> {
        let Some(agent) = self.by_node.get_mut(node) else {
            return Ok(());
        };
        if !agent.record.connected || agent.record.instance == hello.instance {
            return Ok(());
        }
        let record = Arc::make_mut(&mut agent.record);
        let before = record
            .competing_agent
            .take()
            .filter(|competing_agent| competing_agent.peer_ip() == peer_ip(peer));
        if before.is_none() {
            moderation.tell(node, Misbehaviour::CompetingAgent, || {
                format!(
                    "two agents have the name of this node, at {} and {peer}; the second one is refused. Check \
                     --node-name on both nodes",
                    record.peer
                )
            });
        }
        record.competing_agent = Some(CompetingAgent {
            peer: peer.to_owned(),
            since: before.map_or(now, |competing_agent| competing_agent.since),
            last: now,
        });
        Err(NotBegun::Taken(record.peer.clone()))
    }
}

/// Returns the address of a peer without its port, which differs for each connection.
fn peer_ip(peer: &str) -> &str {
    peer.rsplit_once(':').map_or(peer, |(ip, _)| ip)
}
