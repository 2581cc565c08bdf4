//! The Kubernetes API server as a source: lists and watches the kinds that a Service proxy needs.
//!
//! One `Reflector` per kind follows the server and sends changes. One task merges them into
//! batches: everything that is ready at a moment is one batch, and nothing waits for more. Nothing
//! here writes to the API, so any number of control planes may run.
//!
//! Modules from the outside in: `http` and `parse` are the edge, and `transport` is the interface
//! that the edge implements. `reflector` is the state machine; `memory` and `gathering` decide what
//! a list means. `report` reports the reflector's state; `endpoints` serves servers without slices;
//! `server` follows the server's address, and `cluster` identifies the cluster.

mod backoff;
mod cluster;
mod endpoints;
mod gathering;
mod http;
mod memory;
mod parse;
mod protobuf;
mod reflector;
mod report;
mod resource;
mod server;
mod transport;

use std::collections::BTreeMap;
use std::sync::Arc;

use kplane_model::NodeName;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use self::http::Http;
use self::reflector::{KindEvents, Reflector};
use self::report::Reporter;
use self::resource::Resource;
use super::upstream::Upstream;
use super::{Batch, Event, Source, SourceError};
use crate::k8s::Kind;
use crate::kubernetes::{Access, Api, TRAP};

/// Name of the source in the status API.
pub const NAME: &str = "kubernetes";

/// Number of chunks of events that may wait for the index, four kinds together.
const QUEUE: usize = 64;
/// Maximum number of events of a batch; more go into the next one.
const MAX_BATCH: usize = 8_192;

/// Configuration of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The API server's address, and the credentials.
    pub access: Access,
    /// Mark of connections to the API server, which the node's rules recognize; 0 = none.
    pub own_mark: u32,
    /// Whether to read what NetworkPolicies need.
    pub network_policies: bool,
    /// Read Pods, which NetworkPolicies need in any case.
    pub watch_pods: bool,
}

/// The API server as a source.
#[derive(Debug)]
pub struct Kubernetes {
    api: Arc<Api>,
    only_node: Option<NodeName>,
    network_policies: bool,
    watch_pods: bool,
    upstream: Upstream,
}

impl Kubernetes {
    /// Reads the credentials, without connecting to the server yet. `only_node`: the only Node to read; `None` = all. The
    /// source writes its state to `upstream`.
    ///
    /// # Errors
    /// [`SourceError::Access`] when the configuration is invalid.
    pub async fn new(
        config: Config,
        only_node: Option<NodeName>,
        upstream: Upstream,
    ) -> Result<Self, SourceError> {
        let needs_us = config.access.needs_us();
        let api = Api::new(config.access, config.own_mark).await?;
        if needs_us {
            tracing::warn!(server = api.server(), "{TRAP}");
        }
        Ok(Self {
            api: Arc::new(api),
            only_node,
            network_policies: config.network_policies,
            watch_pods: config.watch_pods || config.network_policies,
            upstream,
        })
    }

    /// Returns the connection, for other code that talks to the same server.
    pub fn api(&self) -> Arc<Api> {
        Arc::clone(&self.api)
    }
}

impl Source for Kubernetes {
    async fn run(self, sink: mpsc::Sender<Batch>) -> Result<(), SourceError> {
        let resources = [
            Resource::Services,
            Resource::Slices,
            Resource::Nodes(self.only_node),
            Resource::ServiceCidrs,
        ];
        let policies = [
            Resource::NetworkPolicies,
            Resource::ClusterPolicies { beta: true },
            Resource::Namespaces,
        ]
        .into_iter()
        .filter(|_| self.network_policies);
        let pods = self.watch_pods.then_some(Resource::Pods);
        let (outbox, inbox) = mpsc::channel(QUEUE);
        let mut reflectors = JoinSet::new();
        for resource in resources.into_iter().chain(policies).chain(pods) {
            let report = Reporter::new(resource.kind(), self.upstream.clone());
            let http = Http::new(Arc::clone(&self.api), resource);
            reflectors.spawn(Reflector::new(http, report, outbox.clone()).run());
        }
        drop(outbox);
        let identify = cluster::identify(Arc::clone(&self.api), self.upstream, sink.clone());
        reflectors.spawn(identify);
        reflectors.spawn(server::follow(self.api, sink.clone()));
        merge(inbox, sink).await;
        Ok(())
    }
}

/// Makes batches of the reflectors' events until the consumer has gone.
async fn merge(mut inbox: mpsc::Receiver<KindEvents>, sink: mpsc::Sender<Batch>) {
    let mut doubts = BTreeMap::new();
    loop {
        let first = tokio::select! {
            reported = inbox.recv() => reported,
            () = sink.closed() => None,
        };
        let Some(first) = first else {
            return;
        };
        let at = first.at;
        let mut events = Vec::new();
        take_in(first, &mut events, &mut doubts);
        while events.len() < MAX_BATCH
            && let Ok(more) = inbox.try_recv()
        {
            take_in(more, &mut events, &mut doubts);
        }
        let batch = Batch {
            events,
            observed_at: at,
        };
        if sink.send(batch).await.is_err() {
            return;
        }
    }
}

fn take_in(reported: KindEvents, events: &mut Vec<Event>, doubts: &mut BTreeMap<Kind, String>) {
    events.extend(reported.events);
    if let Some((kind, doubt)) = reported.doubt {
        match doubt {
            Some(doubt) => drop(doubts.insert(kind, doubt)),
            None => drop(doubts.remove(&kind)),
        }
        events.push(Event::Doubts(doubts.values().cloned().collect()));
    }
}
