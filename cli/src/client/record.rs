//! The requests of `RecorderService`.

use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use tonic::Code;

use super::{Client, Error, similar};

impl Client {
    /// Returns the changes of one Service.
    pub(crate) async fn service_history(
        &self,
        name: &ServiceName,
        request: pb::ServiceHistoryRequest,
    ) -> Result<pb::ServiceHistory, Error> {
        let mut stub = self.recorder.clone();
        match recorded(self.ask(stub.get_service_history(request)).await) {
            Err(Error::Refused {
                code: Code::NotFound,
                ..
            }) => Err(Error::NoService {
                name: name.clone(),
                similar: similar(
                    name,
                    &self.services(pb::ListServicesRequest::default()).await?,
                ),
            }),
            answer => answer,
        }
    }

    /// Returns what differs between a node's desired state and its kernel.
    pub(crate) async fn diff(&self, request: pb::DiffRequest) -> Result<pb::Diff, Error> {
        let mut stub = self.recorder.clone();
        recorded(self.ask(stub.get_diff(request)).await)
    }

    /// Returns the metrics of the control plane, as text.
    pub(crate) async fn metrics(&self) -> Result<String, Error> {
        let mut stub = self.recorder.clone();
        let metrics = self.ask(stub.get_metrics(pb::MetricsRequest {})).await;
        Ok(recorded(metrics)?.text)
    }
}

/// Explains the answer of a control plane that is older than this service.
fn recorded<T>(answer: Result<T, Error>) -> Result<T, Error> {
    answer.map_err(|error| match error {
        Error::NotStatus { server } => Error::NoRecord { server },
        error => error,
    })
}
