//! The guard of the status port: every request passes the authenticator before its service sees it.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Extensions, HeaderMap, Request, Response};
use kplane_agents::connection_limits::ConnectionGuard;
use kplane_agents::identity::{Authenticator, Caller, Port, Refusal, RefusalReason, Right};
use kplane_proto::right_of;
use kplane_proto::v1 as pb;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::Service;

/// A service behind the authenticator. Requests carry their [`Caller`] as an extension.
#[derive(Clone, Debug)]
pub struct Guarded<S> {
    inner: S,
    authenticator: Arc<Authenticator>,
}

impl<S> Guarded<S> {
    /// Puts a service behind the authenticator.
    pub fn new(inner: S, authenticator: Arc<Authenticator>) -> Self {
        Self {
            inner,
            authenticator,
        }
    }
}

impl<S: NamedService> NamedService for Guarded<S> {
    const NAME: &'static str = S::NAME;
}

/// Returns the right that a method declares in its .proto file. `Ok(None)` leaves the check to the method, which knows the
/// node.
///
/// # Errors
/// UNIMPLEMENTED: no method of this port has the path.
fn right_for(path: &str) -> Result<Option<Right>, Status> {
    use pb::Right as Declared;
    Ok(Some(match right_of(path) {
        Some(Declared::ReadStatus) => Right::ReadStatus,
        Some(Declared::Act) => Right::Act,
        Some(Declared::Probe) => Right::Probe,
        Some(Declared::ReadClients) => Right::ReadClients,
        Some(Declared::Sample) => Right::Sample,
        Some(Declared::ReadPolicies) => Right::ReadPolicies,
        Some(Declared::Peer) => Right::Peer,
        Some(Declared::PeerAct) => Right::PeerAct,
        Some(Declared::ReadDesired) => return Ok(None),
        None if path.starts_with("/grpc.reflection.") => Right::ReadStatus,
        Some(Declared::Unspecified | Declared::Agent) | None => {
            return Err(Status::unimplemented(
                "this control plane has no such method",
            ));
        }
    }))
}

/// Returns the connection of a request.
pub(crate) fn connection(extensions: &Extensions) -> Result<&ConnectionGuard, Refusal> {
    // It is a bug if there is none: every connection of the port has passed a limiter.
    extensions
        .get()
        .ok_or_else(|| Refusal::new(RefusalReason::NoCredential, "the connection is unknown"))
}

/// Admits a caller with a right, if one is needed, and marks the connection as in use.
pub(crate) async fn admit(
    authenticator: &Arc<Authenticator>,
    connection: &ConnectionGuard,
    headers: &HeaderMap,
    right: Option<Right>,
) -> Result<Caller, Refusal> {
    let caller = authenticator.authenticate(Port::Status, connection, headers).await?;
    if let Some(right) = right {
        caller.may(&right).await?;
    }
    connection.keep();
    Ok(caller)
}

/// Admits a request, which carries its visitor from then on.
async fn admit_request(
    authenticator: &Arc<Authenticator>,
    request: &mut Request<Body>,
) -> Result<(), Status> {
    let connection = connection(request.extensions())?.clone();
    let right = right_for(request.uri().path())?;
    let caller = admit(authenticator, &connection, request.headers(), right).await?;
    request.extensions_mut().insert(caller);
    Ok(())
}

impl<S> Service<Request<Body>> for Guarded<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        // The clone stays behind; the service that is ready goes.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        let authenticator = Arc::clone(&self.authenticator);
        Box::pin(async move {
            match admit_request(&authenticator, &mut request).await {
                Ok(()) => inner.call(request).await,
                Err(refused) => Ok(refused.into_http()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_acts_on_nodes_or_reads_clients_needs_a_right_of_its_own() {
        for (method, verb, path) in [
            ("StatusService/GetDrainStatus", "get", "/kplane/status"),
            ("StatusService/GetProxied", "get", "/kplane/status"),
            ("StatusService/JudgeConnection", "get", "/kplane/policies"),
            ("StatusService/DescribePolicy", "get", "/kplane/policies"),
            ("StatusService/GetDrops", "get", "/kplane/status"),
            ("StatusService/FollowDrops", "create", "/kplane/samples"),
            ("StatusService/TryService", "create", "/kplane/probes"),
            ("StatusService/ProbeNodes", "create", "/kplane/probes"),
            ("StatusService/GetAffinity", "get", "/kplane/clients"),
            ("StatusService/GetFlows", "get", "/kplane/clients"),
            ("StatusService/GetGraph", "get", "/kplane/clients"),
            ("PeerService/Ask", "update", "/kplane/peer"),
            ("PeerService/Suspect", "update", "/kplane/peer"),
            ("PeerService/Inspect", "get", "/kplane/peer"),
        ] {
            let right = right_for(&format!("/kplane.v1.{method}")).unwrap().unwrap();
            assert_eq!((right.verb(), &*right.path()), (verb, path), "{method}");
        }
        for other in [
            "/kplane.v1.StatusService/New",
            "/kplane.v1.AgentService/Sync",
            "/x",
        ] {
            assert!(right_for(other).is_err(), "{other}");
        }
    }
}
