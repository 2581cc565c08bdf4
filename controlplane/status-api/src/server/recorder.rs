//! `RecorderService`: what happened, for operators and tools.

mod diff;
mod history;
mod wire;

use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use kplane_agents::hub::Hub;
use kplane_agents::peers::Peers;
use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use kplane_proto::v1::recorder_service_server::RecorderService;
use tonic::{Request, Response, Status};

pub(super) use history::of_own_agents;

use super::request::{bounded_names, charge, cost};
use super::{Answer, millis};

/// Number of events in an answer, unless the question says otherwise, and the largest number.
const NOTICES: (usize, usize) = (100, 1_000);

/// Prints the metrics.
pub struct Print(Box<dyn Fn() -> String + Send + Sync>);

impl Print {
    /// Wraps a function that prints the metrics.
    pub fn new(print: impl Fn() -> String + Send + Sync + 'static) -> Self {
        Self(Box::new(print))
    }

    /// Prints them.
    pub fn print(&self) -> String {
        self.0()
    }
}

impl std::fmt::Debug for Print {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Print(..)")
    }
}

/// The printer of this process's metrics, if it has any; the wiring sets it once.
pub type Metrics = Arc<OnceLock<Print>>;

/// The server of the record.
#[derive(Clone, Debug)]
pub struct RecorderServer {
    hub: Arc<Hub>,
    /// The other replicas; `None` = this one answers alone.
    peers: Option<Arc<Peers>>,
    metrics: Metrics,
}

impl RecorderServer {
    /// Creates a server from a hub, which asks these other replicas as well.
    pub fn new(hub: Arc<Hub>, peers: Option<Arc<Peers>>) -> Self {
        let metrics = Metrics::default();
        Self {
            hub,
            peers,
            metrics,
        }
    }

    /// Shows these metrics.
    #[must_use]
    pub fn with(self, metrics: Metrics) -> Self {
        Self { metrics, ..self }
    }
}

/// Returns the limit that a question means.
fn limit(asked: u32, (usual, most): (usize, usize)) -> usize {
    match usize::try_from(asked) {
        Ok(0) => usual,
        Ok(asked) => asked.min(most),
        Err(_) => most,
    }
}

#[tonic::async_trait]
impl RecorderService for RecorderServer {
    async fn get_service_history(
        &self,
        request: Request<pb::ServiceHistoryRequest>,
    ) -> Answer<pb::ServiceHistory> {
        charge(&request, cost(self.hub.agents().count()))?;
        let request = request.into_inner();
        let name = service_name(&request)?;
        let answer = history::of_all(&self.hub, self.peers.as_deref(), &request).await;
        if answer.changes.is_empty() && self.hub.index().detail(name.clone()).await?.is_none() {
            return Err(Status::not_found(format!(
                "no Service {name} is known, and the record has no change of it"
            )));
        }
        Ok(Response::new(answer))
    }

    async fn get_diff(&self, request: Request<pb::DiffRequest>) -> Answer<pb::Diff> {
        let services = self.hub.index().summary().borrow().totals.services;
        charge(&request, cost(services))?;
        let others = match &self.peers {
            Some(peers) => peers.nodes().await,
            None => Arc::default(),
        };
        let answer = diff::diff(&self.hub, &others, &request.get_ref().kernel_of)?;
        Ok(Response::new(answer))
    }

    async fn list_noticed(&self, request: Request<pb::NoticedRequest>) -> Answer<pb::NoticedList> {
        charge(&request, 1)?;
        let request = request.into_inner();
        let (events, since_ms) = self
            .hub
            .notices()
            .recorder
            .noticed(request.after, limit(request.limit, NOTICES));
        Ok(Response::new(pb::NoticedList {
            events: events.into_iter().map(wire::notice).collect(),
            now_ms: millis(SystemTime::now()),
            since_ms,
            unasked_replicas: Peers::unasked(self.peers.as_deref()).await,
        }))
    }

    async fn get_metrics(&self, request: Request<pb::MetricsRequest>) -> Answer<pb::MetricsText> {
        charge(&request, cost(self.hub.agents().count()))?;
        let print = self
            .metrics
            .get()
            .ok_or_else(|| Status::unavailable("this process has no metrics"))?;
        let text = print.print();
        Ok(Response::new(pb::MetricsText { text }))
    }
}

/// Returns the Service of a question.
pub(super) fn service_name(request: &pb::ServiceHistoryRequest) -> Result<ServiceName, Status> {
    bounded_names(&[&request.namespace, &request.name])?;
    Ok(ServiceName::new(&request.namespace, &request.name))
}
