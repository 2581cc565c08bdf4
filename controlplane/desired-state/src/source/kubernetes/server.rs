//! Follows the address of the API server, so that no Service gets its address and port.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::mpsc;
use tokio::time::sleep;

use super::{Batch, Event};
use crate::kubernetes::Api;
use kplane_util::dial::resolve;

/// Interval between two resolutions of the server's name.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// Sends the server's addresses at the start and at each change, until the consumer has gone.
pub(super) async fn follow(api: Arc<Api>, sink: mpsc::Sender<Batch>) {
    let mut reported = BTreeSet::new();
    loop {
        // When a name cannot be resolved, the last addresses stay.
        if let Some(now) = place(&api.server()).await
            && now != reported
        {
            reported.clone_from(&now);
            let batch = Batch {
                events: vec![Event::ApiServer(now)],
                observed_at: SystemTime::now(),
            };
            if sink.send(batch).await.is_err() {
                return;
            }
        }
        tokio::select! {
            () = sleep(LOOK_EVERY) => {}
            () = sink.closed() => return,
        }
    }
}

async fn place(server: &str) -> Option<BTreeSet<SocketAddr>> {
    let url = server.parse().ok()?;
    Some(resolve(&url).await.ok()?.into_iter().collect())
}
