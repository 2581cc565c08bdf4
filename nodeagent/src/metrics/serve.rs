//! The server of port 10249 (G5).

use std::sync::Arc;

use hyper::{Request, StatusCode};
use kplane_http::metrics::{Format, Process};
use kplane_http::{self as http, Answer};
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use super::collect::{Agent, KubeProxy};
use super::host::HostCollector;
use super::{Counters, Sources};
use kplane_kube_proxy_config::KubeProxyConfiguration;

/// The name under which kube-proxy shows its configuration.
const CONFIGZ: &str = "kubeproxy.config.k8s.io";

/// The state behind all pages of the port.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    mode: &'static str,
    counters: Arc<Counters>,
    configuration: watch::Receiver<Arc<KubeProxyConfiguration>>,
}

impl Metrics {
    /// Creates the pages. `configuration` is the configuration in effect.
    pub fn new(
        sources: Sources,
        configuration: watch::Receiver<Arc<KubeProxyConfiguration>>,
    ) -> Self {
        let mut registry = Registry::default();
        let mode = sources.backend.name;
        let counters = Arc::clone(&sources.counters);
        registry.register_collector(Box::new(KubeProxy(sources.clone())));
        registry.register_collector(Box::new(Agent(sources)));
        registry.register_collector(Box::new(HostCollector));
        registry.register_collector(Box::new(Process));
        Self {
            registry: Arc::new(registry),
            mode,
            counters,
            configuration,
        }
    }

    /// Answers a request to the port. kube-proxy's profiles, flags and status pages are not served:
    /// 404.
    pub(crate) fn respond<B>(&self, request: &Request<B>) -> Answer {
        let text = |body: &'static str| http::answer(StatusCode::OK, http::TEXT, body);
        match request.uri().path() {
            "/metrics" => {
                let format = Format::wanted(request.headers());
                let body = format.print(&self.registry);
                http::answer(StatusCode::OK, format.content_type(), body)
            }
            "/healthz" => text("ok"),
            "/proxyMode" => text(self.mode),
            "/configz" => {
                let configuration = serde_json::json!({ CONFIGZ: **self.configuration.borrow() });
                http::answer(StatusCode::OK, http::JSON, configuration.to_string())
            }
            "/transactions" => {
                let page = self.counters.transactions.page();
                http::answer(StatusCode::OK, http::JSON, page.to_string())
            }
            _ => http::not_found(),
        }
    }
}
