//! Builds a running agent from a configuration. Several agents may run in one process.

mod ending;
mod followers;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use hyper::Request;
use hyper::body::Incoming;
use kplane_desired_state::admission::Admission;
use kplane_desired_state::index::{CliffGuard, Guarded};
use kplane_desired_state::inside::{self, Inside, Origin};
use kplane_model::Family;
use kplane_tls::{Follower, TokenFile};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use self::ending::Cause;
use self::followers::answer_hooks;
use crate::avoided;
use crate::cache::Cache;
use crate::claim::{Claim, Taken};
use crate::config::{Config, Source};
use crate::connection::Connection;
use crate::desired;
use crate::engine::{CheckpointSettings, Engine, Followers, OfflineStartSettings, Opener, Stopped};
use crate::handover::{self, Handover};
use crate::healthz::Health;
use crate::metrics::{Counters, Metrics, Sources};
use crate::own_places::OwnPlaces;
use crate::prestop::Farewell;
use crate::reload;
use crate::report::{Failure, Report};
use crate::service_health;
use crate::sync::{Client, Credentials, Grpc, Identity};
use crate::sysctl;
use crate::take_over::{self, TakeOver};
use kplane_dataplane::backend::{Backend, OpenError};
use kplane_dataplane::leftovers::Ports;
use kplane_http::{Answer, BindError, Port, REBIND};
use kplane_kube_proxy_config::KubeProxyConfiguration;

/// Longest wait for the engine when the agent ends. The kernel may be in the middle of a large
/// transaction, which the kernel completes or drops as a whole in any case.
const ENGINE_EXIT: Duration = Duration::from_secs(10);

/// The reason why an agent cannot start, on one line.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// This machine lacks something that the backend needs.
    #[error(transparent)]
    Backend(#[from] OpenError),
    /// Another agent programs this node.
    #[error(transparent)]
    Taken(#[from] Taken),
    /// The control plane inside this process cannot start.
    #[error(transparent)]
    ControlPlane(inside::FatalError),
    /// The program has no control plane for `--standalone`.
    #[error(
        "--standalone: this program was built without a control plane inside; take one that was built with it (cargo \
         feature standalone), or give --control-plane"
    )]
    NoControlPlane,
    /// A certificate or key cannot be used.
    #[error("cannot set up TLS to the control plane")]
    Tls(#[from] kplane_tls::FileError),
    /// A port is taken, and the configuration makes that an error (G6).
    #[error(transparent)]
    Bind(#[from] BindError),
}

/// A part of a running agent that ended without being asked to.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// The engine ended, which is a bug.
    #[error(transparent)]
    Engine(#[from] Stopped),
    /// The control plane inside this process ended.
    #[error("the control plane in this process failed")]
    ControlPlane(#[source] inside::FatalError),
    /// A task panicked, which is a bug.
    #[error("a task panicked")]
    Panic(#[from] tokio::task::JoinError),
}

/// A running agent. It runs until it is shut down or until one of its parts fails.
#[derive(Debug)]
pub struct Bound {
    /// The address that answers health checks. `None` if health checks are off, or if the port is
    /// taken and the agent keeps trying to open it.
    pub healthz_addr: Option<SocketAddr>,
    /// The address that serves metrics; `None` as for `healthz_addr`.
    pub metrics_addr: Option<SocketAddr>,
    /// The address at which a standalone agent serves its status.
    pub status_addr: Option<SocketAddr>,
    engine: Engine,
    connection: watch::Receiver<Connection>,
    configuration: watch::Receiver<Arc<KubeProxyConfiguration>>,
    shutdown: CancellationToken,
    tasks: Tasks,
    /// The claim on the network namespace, held until the engine has ended.
    claim: Option<Claim>,
    /// Another program that programs this node, reported as long as it runs, or its rules as long as they stay.
    competing_proxy: watch::Sender<Option<Failure>>,
    /// The end of preStop hooks.
    farewell: Option<Farewell>,
    /// The way to the next agent.
    handover: Handover,
}

/// How an agent ended in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was shut down.
    Stopped,
    /// Another agent asked to take over, and then did not. This one starts anew.
    Resumed,
}

/// Starts an agent. If its backend takes over the node, it first waits for the previous agent to end, for up to
/// [`claim::PATIENCE`](crate::claim::PATIENCE). The future is boxed, so that its code is generated here and not again in each program.
///
/// # Errors
/// [`BuildError`] if the agent cannot start.
pub fn build(config: Config) -> BoxFuture<'static, Result<Bound, BuildError>> {
    Box::pin(start(config))
}

async fn start(mut config: Config) -> Result<Bound, BuildError> {
    config.backend = config.backend.within_rights();
    if config.backend.describe().serves_without_rights() && is_of_user(&config.source) {
        kplane_model::allow_loopback_endpoints();
    }
    kplane_http::panics::install();
    let (proxy, node) = (
        config.backend_settings.userspace.clone(),
        config.node_name.clone(),
    );
    handover::inherit(&proxy, &node).await;
    let claim = if config.backend.describe().programs_kernel {
        Claim::wait_and_take(config.cache_dir.as_deref()).await?
    } else {
        None
    };
    let (kind, settings) = (config.backend, config.backend_settings.clone());
    let spare = Family::ALL.map(|family| {
        settings.pod_interface.is_some() || config.node_settings.masquerades_own(family)
    });
    let ports = Ports::new(config.healthz, config.metrics);
    let conntrack = config.conntrack.clone();
    let mut bound = build_parts(config, Box::new(move || kind.open(&settings))).await?;
    if kind.describe().programs_kernel {
        sysctl::apply_and_log(&conntrack);
    }
    if let Some(serving) = bound.engine.serving() {
        let task = TakeOver {
            serving,
            spare,
            ports,
        };
        let errand = take_over::keep_removing(task, bound.reports(), bound.competing_proxy.clone());
        spawn_errand(&mut bound.tasks, errand);
    }
    match claim.as_ref().map(Claim::watch) {
        Some(Ok(watch)) => spawn_errand(&mut bound.tasks, watch),
        Some(Err(error)) => {
            tracing::warn!(%error, "cannot log other agents that try to claim this node");
        }
        None => {}
    }
    bound.claim = claim;
    bound.handover = Handover::open(&proxy, &node);
    Ok(bound)
}

/// Starts an agent with a backend that the caller opens. `open` runs on the engine's own thread,
/// and may enter a network namespace first. The agent answers no preStop hooks, whose rules belong to this process's
/// namespace.
///
/// # Errors
/// [`BuildError`] if the agent cannot start.
pub fn build_with(
    mut config: Config,
    open: impl FnOnce() -> Result<Backend, OpenError> + Send + 'static,
) -> BoxFuture<'static, Result<Bound, BuildError>> {
    kplane_http::panics::install();
    config.prestop = None;
    Box::pin(build_parts(config, Box::new(open)))
}

async fn build_parts(config: Config, open: Opener) -> Result<Bound, BuildError> {
    let counters = Arc::new(Counters::default());
    let (publisher, servers) = service_health::channel();
    let competing_proxy = watch::Sender::new(None);
    let mut tasks = JoinSet::new();
    let own = OwnPlaces::new(&config);
    let settings = own.settings(config.node_settings.clone());
    // Before anything changes the machine, since an argument may be wrong.
    let (transport, status_addr) = connect(&config, own, &mut tasks).await?;
    let followers = Followers::new(publisher, counters.clone())
        .with_competing_proxy(competing_proxy.subscribe());
    let (followers, connections, avoided) = followers::add_tasks(followers, &config, &mut tasks);
    let (followers, prestop, farewell) = answer_hooks(followers, &config, &counters, &mut tasks);
    let engine = Engine::start(open, settings, followers, restore(&config)).await?;
    spawn_errand(&mut tasks, avoided::follow(engine.proxy(), avoided));
    let identity = Identity::new(config.node_name, config.mode_unset);
    announce(&identity, &engine);
    let client = Client::new(transport, identity, engine.clone())
        .with_prestop(prestop)
        .with_connections(connections.clone());
    let connection = client.connection();
    let health = Health {
        reports: engine.reports(),
        connection: connection.clone(),
        pulse: engine.pulse(),
        proxy: engine.proxy(),
        answers: Arc::default(),
    };
    let (effective, configuration) = watch::channel(config.kube_proxy);
    let metrics = Metrics::new(
        Sources {
            counters: counters.clone(),
            reports: engine.reports(),
            connection: connection.clone(),
            answers: health.answers.clone(),
            conntrack: engine.conntrack(),
            backend: engine.backend(),
            connections: if config.count_connections { connections } else { None },
            proxy: engine.proxy(),
        },
        configuration.clone(),
    );
    let hard = config.bind_address_hard_fail;
    let asked = health.clone();
    let respond = move |request: &Request<Incoming>| asked.respond(request);
    let healthz_addr = serve(config.healthz.map(healthz_port), hard, respond, &mut tasks).await?;
    let respond = move |request: &Request<Incoming>| metrics.respond(request);
    let metrics_addr = serve(config.metrics.map(metrics_port), hard, respond, &mut tasks).await?;
    let servers = servers.connect(health, counters);
    tasks.spawn(servers.run().map(Ok));
    tasks.spawn(async move { Err(client.run().await.into()) });
    if let Some(loader) = config.file {
        // The agent goes on if the file cannot be watched.
        spawn_errand(&mut tasks, reload::run(loader, effective, engine.clone()));
    }
    tasks.spawn(ends_with(engine.clone()));
    Ok(Bound {
        healthz_addr,
        metrics_addr,
        status_addr,
        engine,
        connection,
        configuration,
        shutdown: CancellationToken::new(),
        tasks,
        claim: None,
        competing_proxy,
        farewell,
        handover: Handover::default(),
    })
}

/// Fails when the engine has ended.
async fn ends_with<E: From<Stopped>>(engine: Engine) -> Result<(), E> {
    engine.stopped().await;
    Err(Stopped.into())
}

/// Returns how the agent deals with what it served before, and with objects that a snapshot no longer names.
fn restore(config: &Config) -> CheckpointSettings {
    let cache = config.cache_dir.as_deref();
    let programs_kernel = config.backend.describe().programs_kernel;
    let offline_start = OfflineStartSettings {
        kube_proxy: programs_kernel.then(|| Ports::new(config.healthz, config.metrics)),
    };
    CheckpointSettings {
        guard: config.cliff_guard,
        cache: cache
            .map(|folder| Cache::new(folder, config.node_name.clone()).of(config.source.id())),
        offline_start: may_be_away(&config.source).then_some(offline_start),
    }
}

/// Returns whether the source can be away while the agent runs. Manifests on the node's own disk cannot.
fn may_be_away(source: &Source) -> bool {
    match source {
        Source::ControlPlane { .. } | Source::InProcess(_) => true,
        Source::Standalone { origin, .. } => matches!(origin, Origin::Kubernetes(_)),
    }
}

/// Returns whether Services come from files of the user who runs the agent.
fn is_of_user(source: &Source) -> bool {
    matches!(
        source,
        Source::Standalone {
            origin: Origin::Manifests { .. },
            ..
        }
    )
}

fn announce(identity: &Identity, engine: &Engine) {
    tracing::info!(
        node = %identity.node,
        backend = engine.backend().name,
        version = env!("CARGO_PKG_VERSION"),
        "agent starts; the kernel's rules stay until a control plane answers, or the agent serves from its cache file"
    );
}

fn healthz_port(address: SocketAddr) -> Port {
    Port {
        what: "health checks",
        flag: "healthz-bind-address",
        address,
    }
}

fn metrics_port(address: SocketAddr) -> Port {
    Port {
        what: "metrics",
        flag: "metrics-bind-address",
        address,
    }
}

type Tasks = JoinSet<Result<(), TaskError>>;

/// Spawns a task that may end before the agent does. (The end of any other task in the set ends the
/// agent.)
fn spawn_errand(tasks: &mut Tasks, errand: impl Future<Output = ()> + Send + 'static) {
    tasks.spawn(async move {
        errand.await;
        std::future::pending().await
    });
}

/// Returns the guard of the control plane inside this process. It guards what the agent's own guard
/// guards.
fn guard_within(guard: desired::CliffGuard) -> CliffGuard {
    CliffGuard {
        deletions: if guard.enabled { Guarded::Absence } else { Guarded::Off },
        share: guard.share_percent,
        minimum: usize::try_from(guard.minimum).unwrap_or(usize::MAX),
    }
}

async fn connect(
    config: &Config,
    own: OwnPlaces,
    tasks: &mut Tasks,
) -> Result<(Grpc, Option<SocketAddr>), BuildError> {
    match config.source.clone() {
        Source::ControlPlane {
            endpoints,
            list,
            tls,
            server_name,
            token,
        } => {
            let tls = tls.map(|files| Follower::start(files, "control plane"));
            let token = token.map(|file| Follower::start(TokenFile(file), "token"));
            let credentials = Credentials {
                tls: tls.transpose()?,
                server_name: server_name.map(Into::into),
                token: token.transpose()?,
            };
            let transport = Grpc::remote(endpoints, own.dialer(), credentials).with_list(list);
            Ok((transport, None))
        }
        Source::InProcess(service) => Ok((Grpc::in_process(service), None)),
        Source::Standalone {
            origin,
            status,
            external_ips,
            reserved,
            excepted,
            proxying,
            network_policies,
        } => {
            let reserved = own.for_all_nodes(status).with_listed(&reserved);
            let inside = Inside {
                node: config.node_name.clone(),
                origin,
                source_id: config.source.id(),
                status,
                admission: Admission {
                    external_ips,
                    reserved: reserved.except(&excepted),
                    namespace_elements: 0,
                    proxying,
                    network_policies,
                    watch_pods: false,
                },
                guard: guard_within(config.cliff_guard),
            };
            let start = config.inside.ok_or(BuildError::NoControlPlane)?;
            let running = start(inside).await.map_err(BuildError::ControlPlane)?;
            tasks.spawn(async move { running.ended.await.map_err(TaskError::ControlPlane) });
            Ok((Grpc::in_process(running.service), running.status))
        }
    }
}

/// Serves a port for as long as the agent runs. A port that is taken is an error if `hard` (G6).
async fn serve<R>(
    port: Option<Port>,
    hard: bool,
    respond: R,
    tasks: &mut Tasks,
) -> Result<Option<SocketAddr>, BindError>
where
    R: Fn(&Request<Incoming>) -> Answer + Clone + Send + Sync + 'static,
{
    let Some(port) = port else {
        return Ok(None);
    };
    let listener = match port.bind().await {
        Err(error) if hard => return Err(error),
        Err(error) => {
            tracing::error!("{error}; trying again every {REBIND:?}");
            None
        }
        Ok(listener) => Some(listener),
    };
    let bound = listener.as_ref().and_then(|l| l.local_addr().ok());
    tasks.spawn(async move {
        port.serve(listener, respond).await;
        Ok(())
    });
    Ok(bound)
}

impl Bound {
    /// Returns a receiver of the engine's latest report.
    pub fn reports(&self) -> watch::Receiver<Report> {
        self.engine.reports()
    }

    /// Returns a receiver of the state of the connection to the control plane.
    pub fn connection(&self) -> watch::Receiver<Connection> {
        self.connection.clone()
    }

    /// Returns a receiver of kube-proxy's configuration as it is in effect. The configuration
    /// changes with its file (I3).
    pub fn configuration(&self) -> watch::Receiver<Arc<KubeProxyConfiguration>> {
        self.configuration.clone()
    }

    /// Returns the token that ends the agent; [`Bound::wait`] returns when the agent has ended.
    pub fn shutdown_token(&self) -> CancellationToken {
        self.shutdown.clone()
    }

    /// Runs until the agent is shut down, is to start anew, or one of its parts fails, and then ends all parts. The
    /// rules stay in the kernel and keep serving.
    ///
    /// # Errors
    /// The part that failed.
    pub fn wait(self) -> BoxFuture<'static, Result<Ended, TaskError>> {
        Box::pin(self.run())
    }

    async fn run(mut self) -> Result<Ended, TaskError> {
        let proxy = self.engine.proxy();
        let cause = tokio::select! {
            biased;
            () = self.shutdown.cancelled() => Cause::Shutdown,
            successor = self.handover.successor(&proxy) => Cause::Successor(successor),
            first = self.tasks.join_next() => Cause::Failure(first),
        };
        // Answers need the stream and the engine.
        if let Some(farewell) = self.farewell.take() {
            farewell.say().await;
        }
        self.tasks.shutdown().await;
        // The proxy goes on without the engine, and without rules that lead to it.
        let proxy = proxy.get();
        let mut reports = self.engine.reports();
        drop(self.engine);
        let engine_ends = async { while reports.changed().await.is_ok() {} };
        if tokio::time::timeout(ENGINE_EXIT, engine_ends).await.is_err() {
            tracing::warn!(
                "the kernel is still busy after {ENGINE_EXIT:?}; the agent exits without waiting"
            );
        }
        drop(self.claim);
        cause.end(self.handover, proxy).await
    }
}
