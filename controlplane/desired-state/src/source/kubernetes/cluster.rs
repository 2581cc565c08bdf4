//! Identifies the cluster, so that an agent notices a disk or an address of another cluster.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::{Batch, Upstream};
use crate::kubernetes::{Api, Asked, Failure};

/// The namespace whose UID identifies the cluster: it exists as long as the cluster does.
const NAMESPACE: &str = "kube-system";
const ASKED: Asked = Asked::new("get", "namespaces", "");
/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Interval between two attempts.
const AGAIN: Duration = Duration::from_secs(60);

/// Reads the identity of the cluster, and tries again until it succeeds or the consumer has gone. Nothing
/// waits for the identity: without it, agents do not check their cluster.
pub(super) async fn identify(api: Arc<Api>, upstream: Upstream, sink: mpsc::Sender<Batch>) {
    let mut reported = false;
    loop {
        match uid(&api).await {
            Ok(uid) => {
                tracing::info!(cluster = uid, "identified the cluster");
                return upstream.set_cluster_id(uid);
            }
            Err(failure) if !reported => {
                tracing::info!(
                    reason = failure.explain(ASKED),
                    "cannot identify the cluster, so agents cannot tell that their disks come from another cluster. \
                     Trying again every {AGAIN:?}"
                );
                reported = true;
            }
            Err(_) => {}
        }
        tokio::select! {
            () = sleep(AGAIN) => {}
            () = sink.closed() => return,
        }
    }
}

async fn uid(api: &Api) -> Result<String, Failure> {
    let namespaces = kube::Api::<Namespace>::all(api.client());
    let request = namespaces.get_metadata(NAMESPACE);
    let namespace = api.ask(ASKED, PATIENCE, request).await;
    let uid = namespace.map_err(|unanswered| unanswered.failure)?.metadata.uid;
    uid.ok_or_else(|| Failure::Malformed(format!("namespace {NAMESPACE} has no UID")))
}
