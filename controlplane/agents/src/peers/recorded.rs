//! The records of other replicas.

use kplane_proto::v1 as pb;

use super::Peers;
use super::way::Client;

/// Maximum number of changes, and of nodes of a change, in a replica's answer.
const MAX_CHANGES: usize = 200;
const MAX_NODES: usize = 5;

impl Peers {
    /// Asks all other replicas for their record of a Service; returns their answers, and the replicas without one.
    pub async fn recorded(
        &self,
        request: &pb::ServiceHistoryRequest,
    ) -> (Vec<pb::ServiceHistory>, Vec<pb::MissingReplica>) {
        let ask = |mut client: Client| async move { client.recorded(request.clone()).await };
        let (recorded, missing) = self.ask_each(ask).await;
        (recorded.into_iter().map(bounded).collect(), missing)
    }
}

/// Cuts an answer to the size that a replica's has.
fn bounded(mut history: pb::ServiceHistory) -> pb::ServiceHistory {
    history.changes.truncate(MAX_CHANGES);
    for change in &mut history.changes {
        change.slowest.truncate(MAX_NODES);
        change.waiting.truncate(MAX_NODES);
    }
    history
}
