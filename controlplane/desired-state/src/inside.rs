//! A control plane inside the process of an agent, for `--standalone`.
//!
//! The agent's program names the function that starts it ([`Start`]), so that the agent's library does not need the
//! control plane, and a program without it is smaller.

use std::convert::Infallible;
use std::error::Error;
use std::net::SocketAddr;
use std::path::PathBuf;

use futures_util::future::BoxFuture;
use kplane_model::NodeName;
use tonic::body::Body;
use tower::util::BoxCloneSyncService;

use crate::admission::Admission;
use crate::index::CliffGuard;
use crate::source::kubernetes;

/// The origin of objects.
#[derive(Clone, Debug)]
pub enum Origin {
    /// A folder or file of manifests, or `-` for standard input.
    Manifests(PathBuf),
    /// A Kubernetes API server.
    Kubernetes(kubernetes::Config),
}

impl Origin {
    /// Returns the origin's name in the status API.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Manifests(_) => "manifests",
            Self::Kubernetes(_) => kubernetes::NAME,
        }
    }
}

/// Configuration of the control plane of one node.
#[derive(Clone, Debug)]
pub struct Inside {
    /// The node, the only one that is served.
    pub node: NodeName,
    /// Origin of the objects.
    pub origin: Origin,
    /// Identity of the source, if the source itself has none.
    pub source_id: Option<String>,
    /// Address of the status API; `None` = none.
    pub status: Option<SocketAddr>,
    /// Restrictions on Services.
    pub admission: Admission,
    /// Guard that holds back large deletions.
    pub guard: CliffGuard,
}

/// The control plane's gRPC service, called as a function: there is no connection, and no HTTP/2.
pub type InProcess = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Infallible>;

/// A running control plane.
pub struct Running {
    /// Service for the agent.
    pub service: InProcess,
    /// Address of the status API.
    pub status: Option<SocketAddr>,
    /// Ends with the control plane; the error is that of the part that failed.
    pub ended: BoxFuture<'static, Result<(), FatalError>>,
}

/// The reason why a control plane cannot start or has ended.
pub type FatalError = Box<dyn Error + Send + Sync>;

/// Starts a control plane.
pub type Start = fn(Inside) -> BoxFuture<'static, Result<Running, FatalError>>;
