//! Streams of desired state for tools: one loop, whatever the picture.
//!
//! A stream is a cursor, as an agent's is. It reads from the store when the client has taken the message before, so a
//! client that reads slowly costs one message, and gets the latest state.
//!
//! `WatchNode` has the cursor of an agent. A watch of more than one node reads two logs: that of shared objects, and
//! that of all nodes' own objects (`publish/overlays.rs`). A change that does not concern a watch causes no message.

use std::sync::Arc;
use std::time::Duration;

use kplane_fleet::hub::Hub;
use kplane_picture::freshness::Freshness;
use kplane_picture::publish::Head;
use kplane_picture::trust::Trust;
use kplane_proto::v1 as pb;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tonic::Status;

use super::confidence;

/// Maximum time between two messages of a stream.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// A picture that a stream follows.
pub(super) trait Feed: Send + Sync + 'static {
    /// The message of the stream.
    type Message: Send + 'static;

    /// Returns whether there may be news. The picture is complete when there are none.
    fn is_behind(&self, head: &Head) -> bool;

    /// Returns the next part of the news. `None` if they do not concern the picture, unless the stream has been quiet
    /// for long.
    ///
    /// # Errors
    /// The picture cannot be sent.
    fn next(&mut self, hub: &Hub, long_quiet: bool) -> Result<Option<Self::Message>, Status>;

    /// Returns the message of a stream that waits until the source has been read.
    fn waiting(source: pb::SourceState) -> Self::Message;
}

/// Follows a picture until the client disconnects or the control plane ends.
pub(super) async fn follow<F: Feed>(
    hub: Arc<Hub>,
    mut feed: F,
    outbox: mpsc::Sender<Result<F::Message, Status>>,
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
            false => Some(Ok(F::waiting(waiting(&hub)))),
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

/// Returns what the control plane knows of a source that has not been read.
fn waiting(hub: &Hub) -> pb::SourceState {
    pb::SourceState {
        read: false,
        ..source_state(hub, &hub.store.trust(), &Freshness::default())
    }
}
