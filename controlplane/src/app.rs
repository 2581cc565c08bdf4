//! Wiring: turns a configuration into a running control plane.

mod error;
mod flags;
mod overrides;
mod ports;
mod protection;

pub use error::{BuildError, TaskError};
pub use flags::TlsFlags;
pub use kplane_desired_state::inside::Origin;
pub use overrides::{State, StateFlags, pod_namespace};
pub use protection::Protection;

use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use kplane_agents::connection_limits::{ConnectionLimiter, Limits, ServerTls};
use kplane_agents::hub::Hub;
use kplane_agents::identity::{self, Authenticator};
use kplane_agents::peers::{self, Peers};
use kplane_agents::{events, failure_detector, fleet, suspects, taints};
use kplane_desired_state::admission::Admission;
use kplane_desired_state::index::CliffGuard;
use kplane_desired_state::inside::{FatalError, InProcess, Inside, Running};
use kplane_desired_state::kubernetes::Api;
use kplane_desired_state::source::kubernetes::Kubernetes;
use kplane_desired_state::source::manifests::Manifests;
use kplane_desired_state::source::{self, Source, SourceError};
use kplane_model::NodeName;
use kplane_status_api::server::prestop;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use self::ports::{agent_limits, agent_router, agent_service, listen, serve, status_router};
use crate::admin::{Admin, Own};

/// Configuration of a control plane.
#[derive(Clone, Debug)]
pub struct Config {
    /// Origin of the objects.
    pub source: Origin,
    /// Identity of the source, if the source itself has none: agents do not continue from what another one said.
    pub source_id: Option<String>,
    /// Address for agents; `None` serves agents in the same process only.
    pub agent_listen: Option<SocketAddr>,
    /// Address of the status API.
    pub status_listen: Option<SocketAddr>,
    /// Address of readiness checks and metrics.
    pub http_listen: Option<SocketAddr>,
    /// Whether readiness checks and metrics are inside TLS, with the certificate of the other ports.
    pub http_tls: bool,
    /// Protection of the ports of agents and of the status API.
    pub protection: Protection,
    /// Limits on connections of agents; lowered to what the limit of open files allows.
    pub agent_limits: Limits,
    /// Restrictions on Services.
    pub admission: Admission,
    /// Configuration of the guard that holds back large deletions.
    pub cliff_guard: CliffGuard,
    /// Whether events are written to the API server that the objects come from.
    pub events: bool,
    /// Whether Nodes lose the start-up taint when their data paths answer.
    pub startup_taint: bool,
    /// What is done about dead nodes.
    pub dead_node: suspects::Mode,
    /// What happens to established connections to endpoints on dead nodes.
    pub dead_connections: suspects::Connections,
    /// Identities of callers, and their rights.
    pub identity: identity::AuthenticatorConfig,
    /// The other replicas.
    pub peers: peers::Config,
    /// The only node that is served: the control plane keeps nothing that is for others. `None` = all nodes.
    pub only_node: Option<NodeName>,
    /// The Node on which this replica runs; `None` = not known.
    pub own_node: Option<NodeName>,
    /// The cluster's name from `--cluster-name`, if it was given.
    pub cluster_name: Option<String>,
    /// Place of the operators' overrides; `None` = the control plane takes none.
    pub state: Option<State>,
}

impl Config {
    /// Creates the configuration of a control plane that listens nowhere and has all defaults.
    pub fn new(source: Origin) -> Self {
        Self {
            source,
            source_id: None,
            agent_listen: None,
            status_listen: None,
            http_listen: None,
            http_tls: false,
            protection: Protection::PlainText { exposed: false },
            agent_limits: Limits::AGENTS,
            admission: Admission::default(),
            cliff_guard: CliffGuard::default(),
            events: false,
            startup_taint: false,
            dead_node: suspects::Mode::Off,
            dead_connections: suspects::Connections::End,
            identity: identity::AuthenticatorConfig::default(),
            peers: peers::Config::default(),
            only_node: None,
            own_node: None,
            cluster_name: None,
            state: Some(State::default()),
        }
    }

    /// Returns what events are about.
    fn scope(&self) -> events::EventScope {
        match self.only_node {
            Some(_) => events::EventScope::Node,
            None => events::EventScope::Cluster,
        }
    }
}

/// A control plane that runs until it is shut down or a part of it fails.
#[derive(Debug)]
pub struct Bound {
    /// Address for agents.
    pub agent_addr: Option<SocketAddr>,
    /// Address of the status API.
    pub status_addr: Option<SocketAddr>,
    /// Address of readiness checks and metrics.
    pub http_addr: Option<SocketAddr>,
    hub: Arc<Hub>,
    authenticator: Arc<Authenticator>,
    tasks: JoinSet<Result<(), TaskError>>,
}

/// Starts a control plane. The future is boxed, so that its code is generated here and not once more in each program.
///
/// # Errors
/// [`BuildError`] when it cannot start.
pub fn build(config: Config) -> BoxFuture<'static, Result<Bound, BuildError>> {
    Box::pin(start(config))
}

/// Starts the control plane of one node, inside its agent's process.
pub fn inside(inside: Inside) -> BoxFuture<'static, Result<Running, FatalError>> {
    Box::pin(async move {
        let bound = start(Config {
            status_listen: inside.status,
            // The agent's flags are checked: they allow the address.
            protection: Protection::PlainText { exposed: true },
            admission: inside.admission,
            cliff_guard: inside.guard,
            events: true,
            // A node that freezes itself would have nothing to serve after a start of the machine.
            state: None,
            source_id: inside.source_id,
            only_node: Some(inside.node),
            ..Config::new(inside.origin)
        })
        .await?;
        Ok(Running {
            service: bound.in_process(),
            status: bound.status_addr,
            ended: Box::pin(async { Ok(bound.wait().await?) }),
        })
    })
}

async fn start(config: Config) -> Result<Bound, BuildError> {
    kplane_http::panics::install();
    check(&config)?;
    let agents = listen(config.agent_listen, ("agents", "agent-listen", "agents"))?;
    let of_status = ("the status API", "status-listen", "status");
    let status = listen(config.status_listen, of_status)?;
    let of_http = ("readiness and metrics", "http-listen", "http");
    let http = listen(config.http_listen, of_http)?;
    let mut tasks = JoinSet::new();
    let own = Own::default();
    let (hub, api) = start_hub(&config, &mut tasks).await?;
    let plain_text =
        config.protection.plain_text([("agents", &agents), ("the status API", &status)]);
    // Nobody else sets it.
    let _ = hub.replica().plain_text_ports.set(plain_text);
    let authenticator = Authenticator::open(&config.identity, Arc::clone(&hub), api.clone())?;
    let (tls, peers) = secure(&config, &authenticator, api.clone(), &hub, &mut tasks)?;
    if let (true, Some(api)) = (config.events, &api) {
        let known = (Arc::clone(&hub), peers.clone());
        let counts = Arc::clone(&own.events);
        let task = events::run(known, Arc::clone(api), config.scope(), counts);
        tasks.spawn(until(task, hub.shutdown().clone()));
    }
    let shutdown = hub.shutdown().clone();
    follow(&hub, peers.as_ref(), &mut tasks);
    let limiters = [
        ConnectionLimiter::new("agents", agent_limits(config.agent_limits)),
        ConnectionLimiter::new("the status API", Limits::STATUS),
    ];
    let [agent_limiter, status_limiter] = &limiters;
    let agent_addr = serve(
        agents,
        agent_limiter,
        tls.clone(),
        agent_router(&hub, &authenticator),
        &mut tasks,
        &shutdown,
    );
    let status_addr = serve(
        status,
        status_limiter,
        tls.clone(),
        status_router(&hub, &authenticator, peers, &own.metrics).await?,
        &mut tasks,
        &shutdown,
    );
    let http_addr = http.as_ref().and_then(|http| http.local_addr().ok());
    if let Some(http) = http {
        let own = Own {
            api,
            tls: tls.clone(),
            ..own
        };
        let admin = Admin::new(Arc::clone(&hub), Arc::clone(&authenticator), limiters, own);
        tasks.spawn(until(
            admin.serve(http, if config.http_tls { tls } else { None }),
            shutdown,
        ));
    }
    Ok(Bound {
        agent_addr,
        status_addr,
        http_addr,
        hub,
        authenticator,
        tasks,
    })
}

/// Follows Pods that wait to end, and agents that fall silent.
fn follow(hub: &Arc<Hub>, peers: Option<&Arc<Peers>>, tasks: &mut JoinSet<Result<(), TaskError>>) {
    let prestop = prestop::serve(Arc::clone(hub), peers.cloned());
    tasks.spawn(until(prestop, hub.shutdown().clone()));
    let watch = failure_detector::watch(Arc::clone(hub), peers.cloned());
    tasks.spawn(until(watch, hub.shutdown().clone()));
}

/// Refuses plain text where other machines would reach it, and TLS without a certificate.
fn check(config: &Config) -> Result<(), BuildError> {
    let protection = &config.protection;
    protection.check(config.agent_listen, "agents")?;
    protection.check(config.status_listen, "the status API")?;
    match protection {
        Protection::PlainText { .. } if config.http_tls => Err(BuildError::NoCertificate),
        _ => Ok(()),
    }
}

/// Starts to follow the certificates and keys; `None` = plain text. Also returns the way to other replicas, if any.
fn secure(
    config: &Config,
    authenticator: &Arc<Authenticator>,
    api: Option<Arc<Api>>,
    hub: &Hub,
    tasks: &mut JoinSet<Result<(), TaskError>>,
) -> Result<(Option<ServerTls>, Option<Arc<Peers>>), BuildError> {
    let protection = config.protection.clone();
    let admits = protection.takes_certificates() || authenticator.takes_tokens();
    let started = protection.start(api, &config.peers)?;
    if started.serving.is_some() {
        if !admits {
            return Err(BuildError::NoCallers);
        }
        let keys = Arc::clone(authenticator).follow_keys();
        tasks.spawn(until(keys, hub.shutdown().clone()));
    }
    if let Some(keeper) = started.keeper {
        tasks.spawn(until(keeper, hub.shutdown().clone()));
    }
    if let Some(listed) = started.listed.clone() {
        // Nobody else sets it.
        let _ = hub.replica().listed.set(listed);
    }
    let peers = Peers::new(
        hub.store().epoch(),
        &config.peers,
        started.peers,
        started.listed,
    );
    Ok((started.serving, peers))
}

async fn start_hub(
    config: &Config,
    tasks: &mut JoinSet<Result<(), TaskError>>,
) -> Result<(Arc<Hub>, Option<Arc<Api>>), SourceError> {
    let (sink, batches) = mpsc::channel(source::QUEUE);
    let epoch = rand::random::<u64>().max(1);
    let (hub, index) = Hub::new(
        epoch,
        config.source.name(),
        config.admission.clone(),
        config.cliff_guard,
        batches,
    );
    hub.suspects().set_mode(config.dead_node, config.dead_connections);
    hub.streams().snapshots.limit(config.agent_limits.snapshots_per_second);
    if let Some(node) = config.own_node.clone() {
        // Nobody else sets it.
        let _ = hub.replica().own_node.set(node);
    }
    if let Some(name) = config.cluster_name.clone() {
        let _ = hub.replica().cluster_name.set(name);
    }
    if let Some(node) = config.only_node.clone() {
        hub.store().serve_only(node);
    }
    if let Some(id) = config.source_id.clone() {
        hub.upstream().set_cluster_id(id);
    }
    let stop = hub.shutdown().clone();
    let mut api = None;
    match config.source.clone() {
        Origin::Manifests(path) => drop(tasks.spawn(run(Manifests::new(path), sink, stop))),
        Origin::Kubernetes(source) => {
            let source =
                Kubernetes::new(source, config.only_node.clone(), hub.upstream().clone()).await?;
            api = Some(source.api());
            if config.startup_taint {
                let (fleet, tainted) = (Arc::clone(hub.agents()), hub.notices().tainted.changes());
                let keeper = taints::keep(fleet, tainted, source.api());
                tasks.spawn(until(keeper, hub.shutdown().clone()));
            }
            tasks.spawn(run(source, sink, stop));
        }
    }
    if config.startup_taint && !matches!(config.source, Origin::Kubernetes(_)) {
        tracing::warn!(
            "--startup-taint has no effect: only a control plane with an API server can change Nodes"
        );
    }
    overrides::keep(&hub, config, api.as_ref(), tasks);
    let sweep = fleet::forget_strangers(Arc::clone(hub.agents()));
    tasks.spawn(async move {
        sweep.await;
        Ok(())
    });
    tasks.spawn(until(index, hub.shutdown().clone()));
    Ok((hub, api))
}

/// Runs a task until the control plane ends.
async fn until(task: impl Future<Output = ()>, stop: CancellationToken) -> Result<(), TaskError> {
    tokio::select! {
        () = task => stop.cancelled().await,
        () = stop.cancelled() => {}
    }
    Ok(())
}

async fn run(
    source: impl Source,
    sink: mpsc::Sender<source::Batch>,
    stop: CancellationToken,
) -> Result<(), TaskError> {
    tokio::select! {
        result = source.run(sink) => result?,
        () = stop.cancelled() => return Ok(()),
    }
    // Standard input was read to its end; its content stays in force.
    stop.cancelled().await;
    Ok(())
}

impl Bound {
    /// Returns the shared state, for tests and embedding programs.
    pub fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    /// Returns the check of callers, for its counters.
    pub fn authenticator(&self) -> &Arc<Authenticator> {
        &self.authenticator
    }

    /// Returns the service for an agent in the same process.
    pub fn in_process(&self) -> InProcess {
        InProcess::new(agent_service(&self.hub, &self.authenticator))
    }

    /// Returns the token that ends the control plane; [`Bound::wait`] returns when it has ended.
    pub fn shutdown_token(&self) -> CancellationToken {
        self.hub.shutdown().clone()
    }

    /// Runs until it is shut down or a part fails; then all parts end.
    ///
    /// # Errors
    /// The part that failed first.
    pub fn wait(self) -> BoxFuture<'static, Result<(), TaskError>> {
        Box::pin(self.run())
    }

    async fn run(mut self) -> Result<(), TaskError> {
        let first = self.tasks.join_next().await;
        self.hub.shutdown().cancel();
        self.tasks.shutdown().await;
        first.map_or(Ok(()), |result| result?)
    }
}
