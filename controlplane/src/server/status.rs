//! `StatusService`: what people and tools see of the fleet.

use std::sync::Arc;
use std::time::Duration;

use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use kplane_proto::v1::status_service_server::StatusService;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::{questions, views};
use crate::hub::{Closing, Hub};

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
