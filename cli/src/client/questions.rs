//! Questions that the control plane passes on to the agents of all nodes.

use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use tonic::{Response, Status};

use super::{Client, Error, Stub};

impl Client {
    /// Asks about a Service.
    pub(crate) async fn about<T>(
        &self,
        name: &ServiceName,
        ask: impl AsyncFnOnce(Stub) -> Result<Response<T>, Status>,
    ) -> Result<T, Error> {
        let answer = self.ask(ask(self.stub.clone())).await;
        self.known(name, answer).await
    }

    /// Returns how many flows lead to endpoints.
    pub(crate) async fn drain_status(
        &self,
        request: pb::DrainStatusRequest,
    ) -> Result<pb::DrainStatus, Error> {
        let mut stub = self.stub.clone();
        self.ask(stub.get_drain_status(request)).await
    }
}
