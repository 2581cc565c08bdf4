//! `StatusService`: what people and tools see of the fleet.

use std::sync::Arc;
use std::time::Duration;

use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use kplane_proto::v1::status_service_server::StatusService;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tracing::info;

use super::{questions, views};
use crate::hub::{Approved, Closing, Hub, Seen};

/// Least time between two answers of a watch.
const WATCH_PAUSE: Duration = Duration::from_millis(100);
/// Ages in the answers move on at least this often.
const WATCH_REFRESH: Duration = Duration::from_secs(2);

/// Serves the status API from a hub.
#[derive(Clone, Debug)]
pub struct StatusServer {
    hub: Arc<Hub>,
}

impl StatusServer {
    /// Serves from a hub.
    #[must_use]
    pub fn new(hub: Arc<Hub>) -> Self {
        Self { hub }
    }
}

#[tonic::async_trait]
impl StatusService for StatusServer {
    type WatchFleetStream = ReceiverStream<Result<pb::Fleet, Status>>;

    async fn get_fleet(
        &self,
        _request: Request<pb::GetFleetRequest>,
    ) -> Result<Response<pb::Fleet>, Status> {
        Ok(Response::new(views::fleet(&self.hub)))
    }

    async fn watch_fleet(
        &self,
        _request: Request<pb::GetFleetRequest>,
    ) -> Result<Response<Self::WatchFleetStream>, Status> {
        let (outbox, stream) = mpsc::channel(1);
        tokio::spawn(watch(Arc::clone(&self.hub), outbox));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn list_services(
        &self,
        request: Request<pb::ListServicesRequest>,
    ) -> Result<Response<pb::ListServicesResponse>, Status> {
        let ports = self
            .hub
            .ports(request.into_inner().namespace)
            .await
            .map_err(closing)?;
        let services = ports
            .iter()
            .map(|view| views::service(&self.hub.store, view));
        let services = services.collect();
        Ok(Response::new(pb::ListServicesResponse { services }))
    }

    async fn describe_service(
        &self,
        request: Request<pb::DescribeServiceRequest>,
    ) -> Result<Response<pb::ServiceDescription>, Status> {
        let request = request.into_inner();
        let name = ServiceName::new(&request.namespace, &request.name);
        let detail = self.hub.detail(name.clone()).await.map_err(closing)?;
        let detail =
            detail.ok_or_else(|| Status::not_found(format!("no Service {name} is known")))?;
        let answers = questions::ask_all(&self.hub.fleet, &name).await;
        let description = views::description(&self.hub, &name, &detail, answers);
        Ok(Response::new(description))
    }

    async fn approve(
        &self,
        request: Request<pb::ApproveRequest>,
    ) -> Result<Response<pb::ApproveResponse>, Status> {
        let peer = request.remote_addr();
        let seen = request.into_inner();
        let nodes = self.hub.fleet.holding();
        let held = self.hub.summary().borrow().held.is_some();
        if !held && nodes.is_empty() && !self.hub.store.trust().is_partial() {
            let revision = self.hub.store.head().borrow().revision;
            return Ok(Response::new(views::approved(
                None,
                String::new(),
                &nodes,
                revision,
            )));
        }
        let count = |number| usize::try_from(number).unwrap_or(usize::MAX);
        let seen = Seen {
            services: count(seen.services),
            without_endpoints: count(seen.without_endpoints),
        };
        let approved = self.hub.approve(seen).await.map_err(closing)?;
        let approved = approved.map_err(|more| Status::failed_precondition(more.to_string()))?;
        let Approved {
            released,
            doubt,
            revision,
        } = approved;
        let services = released.as_ref().map_or(0, |held| held.services);
        let endpoints = released.as_ref().map_or(0, |held| held.without_endpoints);
        info!(
            peer = peer.map_or_else(|| "unknown".to_owned(), |peer| peer.to_string()),
            services,
            without_endpoints = endpoints,
            nodes = nodes.len(),
            doubt,
            revision,
            "approved: what the source does not name is gone"
        );
        let released = released.as_ref();
        Ok(Response::new(views::approved(
            released, doubt, &nodes, revision,
        )))
    }
}

#[expect(clippy::needless_pass_by_value, reason = "handed to map_err")]
fn closing(error: Closing) -> Status {
    Status::unavailable(error.to_string())
}

async fn watch(hub: Arc<Hub>, outbox: mpsc::Sender<Result<pb::Fleet, Status>>) {
    let mut agents = hub.fleet.changes();
    let mut head = hub.store.head();
    let mut summary = hub.summary();
    while outbox.send(Ok(views::fleet(&hub))).await.is_ok() {
        tokio::time::sleep(WATCH_PAUSE).await;
        let alive = tokio::select! {
            changed = agents.changed() => changed.is_ok(),
            changed = head.changed() => changed.is_ok(),
            changed = summary.changed() => changed.is_ok(),
            () = tokio::time::sleep(WATCH_REFRESH) => true,
            () = outbox.closed() => false,
            () = hub.shutdown.cancelled() => false,
        };
        if !alive {
            return;
        }
    }
}
