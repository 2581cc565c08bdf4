//! The guard of the status port: every request passes the authenticator before its service sees it.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Extensions, HeaderMap, Request, Response};
use kplane_agents::connection_limits::ConnectionGuard;
use kplane_agents::identity::{Authenticator, Caller, Port, Refusal, RefusalReason, Right};
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

/// Returns the right that a method needs. A method that is not listed reads the state of the fleet. `None` leaves
/// the check to the method, which knows the node.
fn right_for(path: &str) -> Option<Right> {
    match path {
        "/kplane.v1.StatusService/Approve" | "/kplane.v1.StatusService/Freeze" => Some(Right::Act),
        "/kplane.v1.StatusService/TryService" | "/kplane.v1.StatusService/ProbeNodes" => {
            Some(Right::Probe)
        }
        "/kplane.v1.StatusService/GetAffinity"
        | "/kplane.v1.StatusService/GetFlows"
        | "/kplane.v1.StatusService/GetGraph" => Some(Right::ReadClients),
        "/kplane.v1.StatusService/FollowDrops" => Some(Right::Sample),
        "/kplane.v1.DesiredStateService/WatchNode" => None,
        // Some questions make agents act.
        "/kplane.v1.PeerService/Approve"
        | "/kplane.v1.PeerService/Ask"
        | "/kplane.v1.PeerService/Suspect" => Some(Right::PeerAct),
        _ if path.starts_with("/kplane.v1.PeerService/") => Some(Right::Peer),
        _ => Some(Right::ReadStatus),
    }
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
) -> Result<(), Refusal> {
    let connection = connection(request.extensions())?.clone();
    let right = right_for(request.uri().path());
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
                Err(refusal) => Ok(Status::from(refusal).into_http()),
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
            ("StatusService/JudgeConnection", "get", "/kplane/status"),
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
            let right = right_for(&format!("/kplane.v1.{method}")).unwrap();
            assert_eq!((right.verb(), &*right.path()), (verb, path), "{method}");
        }
    }
}
