//! The control plane's HTTP port: liveness, readiness and metrics.
//!
//! Ready means that every kind has been listed once, and that the ports have their certificates; agents get nothing
//! before. The control plane
//! stays ready when the API server goes away later, because it then serves what it knows. It also
//! stays ready while it holds objects that its source no longer names, or doubts its source. In
//! this state it serves more, not less; another replica would do no better, and agents without any
//! control plane would learn of no change at all.

mod metrics;
mod ports;
mod work;

#[cfg(test)]
mod tests;

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use kplane_agents::connection_limits::{ConnectionLimiter, Cover, ServerTls};
use kplane_agents::hub::Hub;
use kplane_agents::identity::Authenticator;
use kplane_desired_state::source::upstream::KindState;
use kplane_http::metrics::Format;
use kplane_http::{Answer, Guests, TEXT, answer, not_found, serve, serve_inside};
use kplane_status_api::server::Print;
use kplane_tls::{ServerConfig, explain};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use self::ports::Ports;
pub(crate) use self::work::Own;

/// Maximum number of connections at a time.
const MAX_CONNECTIONS: usize = 64;
/// Time without news after which a kind counts as stale: longer than the source's own checks take.
const STALE_AFTER: Duration = Duration::from_secs(45);

/// The handler of the port's requests.
#[derive(Clone, Debug)]
pub(crate) struct Admin {
    hub: Arc<Hub>,
    /// The limiters of the agents' port and of the status API's port.
    limiters: [Arc<ConnectionLimiter>; 2],
    guests: Arc<Guests>,
    registry: Arc<Registry>,
}

impl Admin {
    /// Creates the handler with the limiters of the agents' port and of the status API's port, and this control plane's
    /// credentials.
    pub(crate) fn new(
        hub: Arc<Hub>,
        authenticator: Arc<Authenticator>,
        limiters: [Arc<ConnectionLimiter>; 2],
        own: Own,
    ) -> Self {
        let [agents, status] = limiters.clone();
        let guests = Guests::new(MAX_CONNECTIONS);
        let ports = Ports {
            agents,
            status,
            http: Arc::clone(&guests),
            authenticator,
        };
        let printer = Arc::clone(&own.metrics);
        let registry = Arc::new(metrics::registry(Arc::clone(&hub), ports, own));
        let shared = Arc::downgrade(&registry);
        let print = Print::new(move || {
            let registry = shared.upgrade();
            registry.map_or_else(String::new, |registry| Format::Prometheus.print(&registry))
        });
        // There is one handler a process.
        let _ = printer.set(print);
        Self {
            hub,
            limiters,
            guests,
            registry,
        }
    }

    /// Answers requests forever; inside TLS as soon as there are certificates, if there are to be any.
    pub(crate) async fn serve(self, listener: TcpListener, tls: Option<ServerTls>) {
        let guests = Arc::clone(&self.guests);
        let respond = move |request: &Request<Incoming>| self.respond(request);
        let Some(secured) = tls else {
            return serve(listener, &guests, respond).await;
        };
        let Some(follower) = secured.await else {
            return;
        };
        let greet = move |stream| {
            let config = for_pages(&follower.current());
            async move { TlsAcceptor::from(config).accept(stream).await.map_err(explain) }
        };
        serve_inside(listener, &guests, greet, respond).await;
    }

    fn respond<B>(&self, request: &Request<B>) -> Answer {
        let verbose = request.uri().query().is_some_and(|q| q.contains("verbose"));
        match request.uri().path() {
            "/livez" => answer(StatusCode::OK, TEXT, "ok\n"),
            "/readyz" => self.readiness(verbose),
            "/metrics" => {
                let format = Format::wanted(request.headers());
                let body = format.print(&self.registry);
                answer(StatusCode::OK, format.content_type(), body)
            }
            _ => not_found(),
        }
    }

    fn readiness(&self, verbose: bool) -> Answer {
        let waits = |limiter: &Arc<ConnectionLimiter>| limiter.cover() == Cover::Waiting;
        let draining = self.hub.streams().draining.is_on();
        let synced = self.hub.store().head().borrow().synced;
        let ready = synced && !draining && !self.limiters.iter().any(waits);
        let mut body = String::new();
        if draining {
            body.push_str("agents: leaving, because this control plane is about to stop\n");
        }
        if verbose || !ready {
            for (kind, state) in self.hub.upstream().kinds() {
                // Writing to a string cannot fail.
                let _ = writeln!(body, "{kind}: {}", describe(&state));
            }
            for limiter in self.limiters.iter().filter(|limiter| limiter.cover() != Cover::Closed) {
                let _ = writeln!(body, "port for {}: {}", limiter.what(), limiter.cover());
            }
            let doubt = self.hub.store().trust();
            if doubt.is_partial() {
                let _ = writeln!(body, "data: incomplete: {}", doubt.doubt());
            }
            if let Some(held) = &self.hub.index().summary().borrow().held {
                let _ = writeln!(body, "held: {held}");
            }
        }
        let (status, verdict) = if ready {
            (StatusCode::OK, "ok\n")
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, "not ready\n")
        };
        body.push_str(verdict);
        answer(status, TEXT, body)
    }
}

/// Returns the configuration of the gRPC ports for pages: HTTP/1.1, with or without a certificate of the client.
fn for_pages(config: &Arc<ServerConfig>) -> Arc<ServerConfig> {
    let mut config = ServerConfig::clone(config);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Arc::new(config)
}

/// Describes the freshness of a kind: its age, and the problem, if there is one.
fn describe(state: &KindState) -> String {
    let age = state.current_at.unwrap_or(state.started).elapsed();
    let seconds = age.as_secs();
    let mut text = if !state.synced {
        format!("not listed for {seconds} s")
    } else if age >= STALE_AFTER {
        format!("synced, stale for {seconds} s")
    } else {
        format!("synced, current {seconds} s ago")
    };
    if let Some(trouble) = &state.trouble {
        text.push_str(": ");
        text.push_str(&trouble.issue.to_string());
    }
    text
}
