//! The HTTP client: connections that notice a silent death, and no retries of its own.

use std::time::Duration;

use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube::Config;
use kube::client::ConfigExt;
use tower::ServiceBuilder;

/// Longest that a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(5);
/// Silence after which the kernel asks whether the other side is still there, ...
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
/// ... how often, ...
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// ... and how many questions may stay unanswered: dead within 15 + 3 * 5 = 30 s.
const KEEPALIVE_PROBES: u32 = 3;
/// Unused connections are kept for this long.
const POOL_IDLE: Duration = Duration::from_secs(45);

/// A client for a configuration.
pub(super) fn client(config: &Config) -> kube::Result<kube::Client> {
    let mut connector = HttpConnector::new();
    connector.enforce_http(false);
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(CONNECT));
    connector.set_keepalive(Some(KEEPALIVE_IDLE));
    connector.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    connector.set_keepalive_retries(Some(KEEPALIVE_PROBES));
    let http = Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(POOL_IDLE)
        .build(config.rustls_https_connector_with_connector(connector)?);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(tower::BoxError::from)
        .service(http);
    Ok(kube::Client::new(service, config.default_namespace.clone()))
}
