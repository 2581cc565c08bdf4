//! Streams of desired state for tools.
//!
//! A stream is a cursor, as an agent's is. It reads from the store when the client has taken the message before, so a
//! client that reads slowly costs one message, and gets the latest state. A change that does not concern the node causes
//! no message.

use std::sync::Arc;
use std::time::Duration;

use kplane_fleet::hub::Hub;
use kplane_picture::freshness::Freshness;
use kplane_picture::trust::Trust;
use kplane_proto::v1 as pb;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tonic::Status;

use super::confidence;
use super::desired::NodeFeed;

/// Maximum time between two messages of a stream.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// Follows a picture until the client disconnects or the control plane ends.
pub(super) async fn follow(
    hub: Arc<Hub>,
    mut feed: NodeFeed,
    outbox: mpsc::Sender<Result<pb::DesiredState, Status>>,
) {
    let mut head = hub.store.head();
    let mut beat = Instant::now() + HEARTBEAT;
    loop {
        let long_quiet = tokio::select! {
            biased;
            () = hub.shutdown.cancelled() => return,
            () = outbox.closed() => return,
            changed = head.wait_for(|head| head.synced && feed.is_behind(head)) => match changed {
                Ok(_) => false,
                Err(_) => return,
            },
            () = sleep_until(beat) => true,
        };
        let permit = tokio::select! {
            () = hub.shutdown.cancelled() => return,
            permit = outbox.reserve() => permit,
        };
        let Ok(permit) = permit else { return };
        // The message has the state of this moment: the client may have taken its time.
        let message = match head.borrow().synced {
            true => feed.next(&hub, long_quiet).transpose(),
            false => Some(Ok(waiting(&hub))),
        };
        if let Some(message) = message {
            let failed = message.is_err();
            permit.send(message);
            if failed {
                return;
            }
            beat = Instant::now() + HEARTBEAT;
        }
    }
}

/// Returns what the control plane knows of its source, for a picture with this trust and these versions.
pub(super) fn source_state(hub: &Hub, trust: &Trust, freshness: &Freshness) -> pb::SourceState {
    let age = hub.upstream_age();
    pb::SourceState {
        epoch: hub.store.epoch(),
        read: true,
        confidence: confidence(trust).into(),
        doubt: trust.doubt().to_owned(),
        upstream_age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        freshness: freshness.news(&Freshness::default()),
        cluster_id: hub.upstream.cluster_id().to_owned(),
        names_nodes: hub.names_are_nodes(),
    }
}

/// Returns the message of a stream that waits until the source has been read.
fn waiting(hub: &Hub) -> pb::DesiredState {
    let source = pb::SourceState {
        read: false,
        ..source_state(hub, &hub.store.trust(), &Freshness::default())
    };
    pb::DesiredState {
        source: Some(source),
        ..pb::DesiredState::default()
    }
}
