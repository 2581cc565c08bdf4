//! The records of other replicas.

use futures_util::future::join_all;
use kplane_proto::v1 as pb;
use tokio::time::{Instant, timeout_at};

use super::answer::Question;
use super::{Collected, Missing, PATIENCE, Peers, describe};

/// Maximum number of changes, and of nodes of a change, in a replica's answer.
const MAX_CHANGES: usize = 200;
const MAX_NODES: usize = 5;

impl Peers {
    /// Asks all other replicas for their record of a Service; returns their answers, and the replicas without one.
    pub(crate) async fn recorded(
        &self,
        request: &pb::ServiceHistoryRequest,
    ) -> (Vec<pb::ServiceHistory>, Vec<pb::MissingReplica>) {
        // This finds out which address is whose.
        let Collected {
            answers,
            mut missing,
        } = self.collect(&Question::default()).await;
        let (targets, _) = self.way.targets().await;
        let until = Instant::now() + PATIENCE;
        let asked = answers.iter().map(|answer| {
            let mut all = targets.iter();
            let target = all.find(|target| target.address == answer.address);
            async move {
                let mut client = self.way.client(target.ok_or(Missing::Late)?);
                let recorded = timeout_at(until, client.recorded(request.clone())).await;
                let recorded = recorded.map_err(|_| Missing::Late)?;
                recorded.map_err(|status| Missing::Refused(describe(&status)))
            }
        });
        let mut recorded = Vec::new();
        for (answer, result) in answers.iter().zip(join_all(asked).await) {
            match result {
                Ok(response) => recorded.push(bounded(response.into_inner())),
                Err(reason) => missing.push(pb::MissingReplica {
                    address: answer.address.to_string(),
                    reason: reason.to_string(),
                }),
            }
        }
        (recorded, missing)
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
