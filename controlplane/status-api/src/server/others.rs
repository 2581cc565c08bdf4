//! The other replicas, as a watch follows them.

use std::sync::Arc;

use kplane_agents::peers::{Collected, Following, Peers};
use kplane_model::ServiceName;
use tonic::Status;

/// The answers of other replicas to a watch; of none if the control plane asks no others.
#[derive(Default)]
pub(super) struct Others(Option<Following>);

impl Others {
    /// Begins to follow the other replicas: all nodes, or one Service.
    pub(super) async fn follow(
        peers: Option<&Arc<Peers>>,
        service: Option<ServiceName>,
    ) -> Result<Self, Status> {
        let Some(peers) = peers else {
            return Ok(Self(None));
        };
        let following = Following::begin(peers, service).await.ok_or_else(|| {
            Status::resource_exhausted("too many different Services are watched; try again later")
        })?;
        Ok(Self(Some(following)))
    }

    /// Returns the latest answers.
    pub(super) fn latest(&mut self) -> Arc<Collected> {
        match &mut self.0 {
            Some(following) => following.latest(),
            None => Arc::default(),
        }
    }

    /// Waits for other answers.
    pub(super) async fn changed(&mut self) {
        match &mut self.0 {
            Some(following) => following.changed().await,
            None => std::future::pending().await,
        }
    }
}
