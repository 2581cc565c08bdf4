//! The HTTP client: its connections detect a dead peer, and it does not retry.

use std::sync::Arc;
use std::time::Duration;

use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube::Config;
use kube::client::ConfigExt;
use tower::ServiceBuilder;

use super::requests::{Counted, Requests};
use kplane_util::dial::Dialer;

/// Time for which unused connections are kept.
const POOL_IDLE: Duration = Duration::from_secs(45);

/// Creates a client for a configuration, whose connections carry kplane's mark.
pub(super) fn client(
    config: &Config,
    own_mark: u32,
    requests: &Arc<Requests>,
) -> kube::Result<kube::Client> {
    let http = Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(POOL_IDLE)
        .build(config.rustls_https_connector_with_connector(Dialer::new(own_mark))?);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(tower::BoxError::from)
        .service(Counted {
            inner: http,
            requests: Arc::clone(requests),
        });
    Ok(kube::Client::new(service, config.default_namespace.clone()))
}
