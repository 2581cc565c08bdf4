//! Answers to the control plane's questions.

use std::sync::Arc;

use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use tokio::task::spawn_blocking;

use crate::engine::{Engine, Stopped};
use crate::peer_probe::PeerProbe;
use crate::report::{affinity, connected, edges, proxied, servers};
use crate::service_connections::ServiceConnections;
use crate::{attempts, dns};

/// Answers a question. Kernels are asked on threads for such work, and the data path does not wait.
pub(super) async fn answer(
    engine: Engine,
    peer_probe: PeerProbe,
    connections: Option<Arc<ServiceConnections>>,
    question: pb::Inspect,
) -> Result<pb::Inspection, Stopped> {
    let backend = engine.backend().name;
    let mut answer = pb::Inspection {
        token: question.token,
        ..pb::Inspection::default()
    };
    // A question without a Service is not about virtual servers.
    if !question.name.is_empty() {
        let service = ServiceName::new(&question.namespace, &question.name);
        answer = servers::inspection(question.token, engine.inspect(service).await?);
    }
    if let Some(destination) = question.destination {
        let reading = spawn_blocking(move || servers::kernel(backend, &destination));
        answer.kernel = reading.await.ok();
    }
    if let Some(question) = question.affinity {
        let proxy = engine.proxy();
        let reading =
            spawn_blocking(move || affinity::answer(backend, proxy.get().as_deref(), &question));
        answer.affinity = reading.await.ok();
    }
    if let Some(question) = question.connected {
        let proxy = engine.proxy();
        let listing =
            spawn_blocking(move || connected::answer(backend, proxy.get().as_deref(), &question));
        answer.connected = listing.await.ok();
    }
    if let Some(question) = question.edges {
        let backend = engine.backend();
        let summing = move || edges::answer(backend, connections.as_deref(), &question);
        answer.edges = spawn_blocking(summing).await.ok();
    }
    if let Some(question) = question.proxied {
        answer.proxied = Some(proxied::answer(engine.proxy().get().as_deref(), question));
    }
    if let Some(nodes) = question.reach {
        answer.reached = Some(peer_probe(nodes).await);
    }
    if let Some(question) = question.denials {
        answer.denials = Some(engine.denials().answer(question).await);
    }
    answer.attempts = attempts::connect(&question.attempts).await;
    if let Some(question) = question.dns {
        answer.attempts.extend(dns::ask(&question).await);
    }
    Ok(answer)
}
