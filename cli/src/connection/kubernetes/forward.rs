//! A port of a pod, as a stream through the API server and the pod's kubelet.

use std::io;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kplane_model::one_line;
use kplane_tls::{ClientConfig, Wire, greet};
use kube::{Api, Client};

use super::api::{Asked, Problem};
use crate::args::STATUS_PORT;
use crate::connection::plane_cause;

/// The reason why a port of a pod cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum ForwardError {
    /// The API server refused.
    #[error("the API server {0}")]
    Api(Problem),
    /// The kubelet or the pod refused.
    #[error("{0}")]
    Pod(String),
    /// The control plane and kpctl do not understand each other.
    #[error("{}", plane_cause(.0))]
    Greeting(io::Error),
}

/// Opens the status port of a pod (namespace and name), with TLS inside if there is a configuration. `host` must be in
/// the certificate of the control plane.
pub(super) async fn open(
    client: &Client,
    (namespace, pod): (&str, &str),
    tls: Option<Arc<ClientConfig>>,
    host: &str,
) -> Result<Box<dyn Wire>, ForwardError> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let mut forwarder = pods
        .portforward(pod, &[STATUS_PORT])
        .await
        .map_err(|error| ForwardError::Api(Problem::of(&error, Asked::FORWARD)))?;
    let stream = forwarder.take_stream(STATUS_PORT);
    let (Some(stream), Some(refusal)) = (stream, forwarder.take_error(STATUS_PORT)) else {
        return Err(ForwardError::Greeting(io::ErrorKind::NotConnected.into()));
    };
    tokio::select! {
        // A refusal comes before the end of the stream, and explains it.
        biased;
        Some(message) = refusal => Err(ForwardError::Pod(one_line(&message))),
        greeted = greet(stream, tls, host) => greeted.map_err(ForwardError::Greeting),
    }
}
