//! The endpoints that the userspace proxy avoids, for the control plane (U53).
//!
//! A task checks them every ten seconds, so that failures of connections do not cause reports of their own.

use std::time::Duration;

use kplane_dataplane::backend::userspace::ProxyHandle;
use kplane_model::{EndpointAddr, ServiceKey};
use tokio::sync::watch;
use tokio::time::sleep;

/// Interval between two checks.
const INTERVAL: Duration = Duration::from_secs(10);

/// Maximum number of endpoints in a report.
pub const MOST: usize = 32;

/// Endpoints that new connections avoid, in the order of their ServicePorts.
pub type Avoided = Vec<(ServiceKey, EndpointAddr)>;

/// Publishes which endpoints the proxy avoids, if a proxy runs, until no receiver is left.
pub async fn follow(proxy: ProxyHandle, news: watch::Sender<Avoided>) {
    while !news.is_closed() {
        let proxy = proxy.get();
        let now = proxy.map_or_else(Vec::new, |proxy| proxy.table().avoided(MOST));
        news.send_if_modified(|known| {
            let is_new = *known != now;
            *known = now;
            is_new
        });
        sleep(INTERVAL).await;
    }
}
