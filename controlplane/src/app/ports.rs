//! The ports of a control plane, and the services on them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kplane_agents::connection_limits::{
    ConnectionGuard, ConnectionLimiter, Cover, Limits, ServerTls,
};
use kplane_agents::hub::Hub;
use kplane_agents::identity::Authenticator;
use kplane_agents::peers::Peers;
use kplane_agents::streams::AgentServer;
use kplane_proto::public_descriptors;
use kplane_proto::shared::AgentServiceServer;
use kplane_proto::v1::desired_state_service_server::DesiredStateServiceServer;
use kplane_proto::v1::peer_service_server::PeerServiceServer;
use kplane_proto::v1::recorder_service_server::RecorderServiceServer;
use kplane_proto::v1::status_service_server::StatusServiceServer;
use kplane_status_api::page::Page;
use kplane_status_api::server::{
    DesiredServer, Guarded, Metrics, PeerServer, RecorderServer, StatusServer,
};
use tokio::net::{TcpListener, TcpSocket};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::codec::CompressionEncoding;
use tonic::service::Routes;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Server;
use tonic::transport::server::Router;
use tonic::{Request, Status};
use tracing::warn;

use super::protection::is_exposed;
use super::{BuildError, TaskError};

/// Interval at which the transport probes a silent peer.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Maximum number of connections that the kernel keeps until they are accepted; net.core.somaxconn
/// may lower it.
const BACKLOG: u32 = 4096;
/// Maximum number of concurrent streams of one connection: an agent has one, a tool few.
const MAX_STREAMS: u32 = 16;

/// Opens a port, if it has an address. The error names its purpose, its flag, and its value in the chart.
pub(super) fn listen(
    address: Option<SocketAddr>,
    (purpose, flag, value): (&'static str, &'static str, &'static str),
) -> Result<Option<TcpListener>, BuildError> {
    let Some(address) = address else {
        return Ok(None);
    };
    open(address).map(Some).map_err(|source| BuildError::Listen {
        address,
        purpose,
        flag,
        value,
        source,
    })
}

/// Opens a port. When a whole fleet connects at once, agents that do not fit into the backlog try
/// again a second later.
fn open(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Lowers the limits on connections of agents to what the limit of open files allows.
pub(super) fn agent_limits(wanted: Limits) -> Limits {
    let files = kplane_http::file_limit();
    let limits = wanted.within(files);
    if limits.connections < wanted.connections {
        warn!(
            files,
            connections = limits.connections,
            "the limit of open files allows fewer agents than the configured {}; raise it \
             (LimitNOFILE, ulimit -n)",
            wanted.connections
        );
    }
    limits
}

pub(super) fn serve(
    listener: Option<TcpListener>,
    limiter: &Arc<ConnectionLimiter>,
    tls: Option<ServerTls>,
    router: Router,
    tasks: &mut JoinSet<Result<(), TaskError>>,
    shutdown: &CancellationToken,
) -> Option<SocketAddr> {
    let listener = listener?;
    let address = listener.local_addr().ok();
    if let Some(address) = address.filter(|address| tls.is_none() && is_exposed(address)) {
        warn!(
            %address, port = limiter.what(),
            "serving in plain text (--insecure): any machine that reaches the address can pose as any node"
        );
    }
    let (stop, limiter) = (shutdown.clone(), Arc::clone(limiter));
    limiter.set_cover(Cover::Waiting);
    tasks.spawn(async move {
        let tls = match tls {
            None => None,
            Some(secured) => tokio::select! {
                Some(follower) = secured => Some(follower),
                () = stop.cancelled() => return Ok(()),
            },
        };
        let incoming = limiter.incoming(listener, tls);
        let stop = stop.cancelled_owned();
        Ok(router.serve_with_incoming_shutdown(incoming, stop).await?)
    });
    address
}

fn server() -> Server {
    Server::builder()
        .max_concurrent_streams(Some(MAX_STREAMS))
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
}

pub(super) fn agent_router(hub: &Arc<Hub>, authenticator: &Arc<Authenticator>) -> Router {
    server().add_service(agent_service(hub, authenticator))
}

pub(super) fn agent_service(
    hub: &Arc<Hub>,
    authenticator: &Arc<Authenticator>,
) -> AgentServiceServer<AgentServer> {
    AgentServiceServer::new(AgentServer::new(Arc::clone(hub), Arc::clone(authenticator)))
}

pub(super) async fn status_router(
    hub: &Arc<Hub>,
    authenticator: &Arc<Authenticator>,
    peers: Option<Arc<Peers>>,
    metrics: &Metrics,
) -> Result<Router, BuildError> {
    let described = public_descriptors()?;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(&described)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    // Many tools still ask the older version.
    let (reflection, older) = (reflection().build_v1()?, reflection().build_v1alpha()?);
    // The port serves as soon as it is open: the status API explains what is not ready.
    let (serving, health) = tonic_health::server::health_reporter();
    serving.set_serving::<StatusServiceServer<StatusServer>>().await;
    serving.set_serving::<DesiredStateServiceServer<DesiredServer>>().await;
    serving.set_serving::<PeerServiceServer<PeerServer>>().await;
    serving.set_serving::<RecorderServiceServer<RecorderServer>>().await;
    let page = Page::new(hub, authenticator, peers.clone());
    let recorder = RecorderServer::new(Arc::clone(hub), peers.clone());
    let recorder = RecorderServiceServer::new(recorder.with(Arc::clone(metrics)));
    let status = StatusServer::new(Arc::clone(hub)).with(peers);
    let status = StatusServiceServer::new(status)
        .accept_compressed(CompressionEncoding::Gzip)
        .send_compressed(CompressionEncoding::Gzip);
    let peer = PeerServiceServer::new(PeerServer::new(Arc::clone(hub)));
    let desired = DesiredStateServiceServer::new(DesiredServer::new(Arc::clone(hub)));
    let services = Routes::new(Guarded::new(status, Arc::clone(authenticator)))
        .add_service(Guarded::new(recorder, Arc::clone(authenticator)))
        .add_service(Guarded::new(desired, Arc::clone(authenticator)))
        .add_service(Guarded::new(peer, Arc::clone(authenticator)))
        .add_service(InterceptedService::new(health, in_use))
        .add_service(Guarded::new(reflection, Arc::clone(authenticator)))
        .add_service(Guarded::new(older, Arc::clone(authenticator)));
    let routes = Routes::from(page.beside(services.prepare().into_axum_router()));
    Ok(server().accept_http1(true).add_routes(routes))
}

/// Marks the connection as in use, so that a connection with a request stays open.
fn in_use(request: Request<()>) -> Result<Request<()>, Status> {
    if let Some(connection) = request.extensions().get::<ConnectionGuard>() {
        connection.keep();
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_error_of_a_taken_port_says_who_may_have_it_and_how_to_choose_another_one() {
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = other.local_addr().unwrap();
        let of_http = ("readiness and metrics", "http-listen", "http");
        let error = listen(Some(address), of_http).unwrap_err().to_string();
        let command = format!("`ss -ltnp 'sport = :{}'`", address.port());
        for part in [
            "another program",
            "Talos",
            &command,
            "--http-listen",
            "controlPlane.ports.http",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
        let nowhere = SocketAddr::from(([192, 0, 2, 1], 1));
        let error = listen(Some(nowhere), of_http).unwrap_err().to_string();
        assert!(!error.contains("ss -ltnp"), "{error}");
    }
}
