//! A control plane's store and an agent's engine in one process: what gRPC would carry between them
//! is handed over. For packet tests and benchmarks.

use std::time::SystemTime;

use anyhow::{Context as _, Result};
use kp_nodeagent::desired::{Collector, Update};
use kp_nodeagent::engine::{CheckpointSettings, Engine, Followers};
use kp_nodeagent::report::Sync;
use kplane_dataplane::backend::{Kind, OpenError, Settings};
use kplane_dataplane::plan::NodeSettings;
use kplane_desired_state::index::Index;
use kplane_desired_state::publish::{Cursor, Publication, Published, Store};
use kplane_desired_state::source::{Batch, Event};
use kplane_model::ServiceKey;
use kplane_proto::v1::{self as pb, server_message};
use kplane_rig::netns::NetNs;
use kplane_rig::wait::DEADLINE;
use prost::Message as _;

/// The epoch of the only control plane there is.
pub const EPOCH: u64 = 1;
/// gRPC puts so many bytes in front of each message.
const GRPC_HEADER_BYTES: usize = 5;

/// An engine with a backend in a namespace.
pub async fn engine(
    kind: Kind,
    ns: NetNs,
    settings: NodeSettings,
    backend: Settings,
) -> Result<Engine> {
    recalling(kind, ns, settings, backend, CheckpointSettings::default()).await
}

/// The same with a memory of what the node served.
pub async fn recalling(
    kind: Kind,
    ns: NetNs,
    settings: NodeSettings,
    backend: Settings,
    restore: CheckpointSettings,
) -> Result<Engine> {
    let open = move || {
        let inside = ns.enter().map_err(|error| OpenError {
            backend: "test",
            reason: format!("{error:#}"),
        })?;
        // The engine's thread lives in the namespace until it ends.
        std::mem::forget(inside);
        kind.open(&backend)
    };
    Ok(Engine::start(Box::new(open), settings, Followers::default(), restore).await?)
}

/// What happened in the cluster reaches the store.
pub fn happen(index: &mut Index, store: &Store, events: Vec<Event>) {
    let observed_at = SystemTime::now();
    let outcome = index.apply(Batch {
        events,
        observed_at,
    });
    if let Some(publication) = outcome.publication {
        store.publish(publication);
    }
    store.set_enforcement(index.enforcement());
}

/// Services are new or changed, or gone (`None`).
pub fn publish(store: &Store, services: Vec<(ServiceKey, Option<Published>)>) {
    store.publish(Publication::sample(services, vec![]));
}

/// What a node is sent next, as its agent takes it, and its length on the wire in bytes.
pub fn collect(store: &Store, node: &str, cursor: &mut Cursor) -> Result<(Update, usize)> {
    let (mut pieces, mut bytes) = (Vec::new(), 0);
    let mut complete = false;
    while !complete {
        let piece = store.collect(node, cursor);
        complete = piece.end.is_some();
        let update = pb::Update {
            objects: piece.objects,
            deleted: piece.deleted.iter().map(Into::into).collect(),
            snapshot: piece.snapshot,
            end: piece.end.map(|end| pb::UpdateEnd {
                revision: end.revision,
                digest: end.digest.to_bytes().to_vec(),
                changed_at_ms: 1_800_000_000_000,
                triggers: end.triggers.into_iter().map(Into::into).collect(),
                enforcement: match end.enforcement {
                    // No test is about a control plane that says nothing.
                    pb::Enforcement::Unspecified => pb::Enforcement::On,
                    said => said,
                }
                .into(),
                ..pb::UpdateEnd::default()
            }),
            ..pb::Update::default()
        };
        let message = pb::ServerMessage {
            kind: Some(server_message::Kind::Update(update.clone())),
        };
        bytes += message.encoded_len() + GRPC_HEADER_BYTES;
        pieces.push(update);
    }
    // All at once: an agent's clock runs from the first piece on.
    let mut collector = Collector::new(EPOCH);
    let mut update = None;
    for piece in pieces {
        update = collector.push(piece)?;
    }
    let update = update.context("the last piece does not end the update")?;
    Ok((update, bytes))
}

/// Hands an update over and waits until the kernel holds it; says how long that took.
pub async fn submit(engine: &Engine, update: Update) -> Result<Sync> {
    let mut reports = engine.reports();
    let revision = update.position.revision;
    engine.submit(update).await??;
    let applied = reports.wait_for(|r| r.applied.is_some_and(|at| at.revision >= revision));
    let report = tokio::time::timeout(DEADLINE, applied).await??;
    let sync = report.last_sync.clone();
    sync.context("an applied update has its times")
}
