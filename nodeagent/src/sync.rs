//! The client of the stream from the control plane.
//!
//! ```text
//! Waiting ------after a while-----------> Finding
//! Finding ------names resolved----------> Connecting (the first replica of a round)
//! Connecting ---Welcome-----------------> Live
//! Connecting ---refused, timed out------> Connecting (the next replica), or Waiting
//! Live ---------broken, silent, refused-> Waiting
//! ```
//!
//! The client owns the connection, and no part of the desired state: complete updates go to the
//! engine, and reports come from it. While there is no connection, the kernel keeps what it holds.
//! A new connection starts with a resume token, so that only real differences travel.

mod answers;
mod grpc;
mod hello;
mod live;
mod lost;
mod older;
mod prestop;
mod replicas;
mod report_pacing;
mod spread;
mod transport;
mod waiting;

#[cfg(test)]
mod tests;

pub use grpc::{Credentials, Grpc};
pub use transport::{Found, Link, OUTBOX, OpenError, Presented, Replica, Transport};

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use kplane_model::NodeName;
use kplane_proto::PROTOCOL_VERSION;
use kplane_proto::v1 as pb;
use kplane_proto::v1::server_message;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use self::live::{Live, StepOutcome};
use self::lost::{Lost, Retry};
use self::older::INSISTENCE;
use self::replicas::{CUT_OFF, Next, Replicas};
use self::spread::Look;
use crate::connection::{Connection, Frozen};
use crate::desired::{Collector, now_ms};
use crate::engine::{Engine, Stopped};
use crate::prestop::Questions;
use crate::service_connections::ServiceConnections;

/// Longest wait for the resolution of names if replicas are known from before.
const RESOLUTION: Duration = Duration::from_secs(1);

/// Longest time from the first packet to Welcome.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Time after which a stream counts as healthy; the pause after it is short again.
const HEALTHY: Duration = Duration::from_secs(60);

/// Time for which reports name a control plane that showed an older state.
const NOTICE: Duration = Duration::from_secs(600);

/// Most different reasons that are remembered so that each is logged once.
const MAX_COMPLAINTS: usize = 64;

/// Longest identity of a cluster, in bytes; the UID of an object has 36.
const MAX_CLUSTER: usize = 64;

/// The identity of the agent.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The node of the agent.
    pub node: NodeName,
    /// A random number, new for each start.
    pub instance: u64,
    /// Whether nobody chose the backend: kube-proxy's file names no mode (K21).
    pub mode_unset: bool,
}

impl Identity {
    /// Creates the identity of an agent that starts now.
    pub fn new(node: NodeName, mode_unset: bool) -> Self {
        Self {
            node,
            instance: rand::random(),
            mode_unset,
        }
    }
}

/// Keeps a stream to a control plane for as long as the agent runs.
#[derive(Debug)]
pub struct Client<T> {
    transport: T,
    identity: Identity,
    shared: LastingState,
    replicas: Replicas,
    look: Look,
    /// Whether to ask for a snapshot, because the agent's state is in doubt.
    fresh: bool,
    connection: watch::Sender<Connection>,
    /// The last reasons in the log, since the last stream; the same reason is not logged again.
    complaints: BTreeSet<String>,
}

/// The state that outlives a stream and is reported on the next one.
#[derive(Debug)]
struct LastingState {
    engine: Engine,
    /// The number of messages of kinds that this version does not know.
    unknown_messages: u64,
    round_trip: Duration,
    /// The number of the last trigger that was sent to a control plane.
    triggers_reported: u64,
    /// The last remark about control planes that show an older state, for reports.
    notice: Option<Notice>,
    /// The order that freezes the node, by the last heartbeat.
    frozen: Option<Frozen>,
    /// Questions about Pods that wait to end.
    prestop: Option<Questions>,
    /// The counter of connections.
    connections: Option<Arc<ServiceConnections>>,
    /// The replicas that the control plane has just named.
    named: Vec<String>,
}

/// A remark for reports.
#[derive(Debug)]
struct Notice {
    text: String,
    since_ms: u64,
    /// The time after which reports are without it.
    until: Instant,
}

#[derive(Debug)]
enum State {
    Waiting(Duration),
    Finding,
    Connecting(Replica),
    Live(Box<Live>),
}

impl<T: Transport> Client<T> {
    /// Creates a client that is not connected yet.
    pub fn new(transport: T, identity: Identity, engine: Engine) -> Self {
        let disconnected = Connection {
            since_ms: now_ms(),
            ..Connection::default()
        };
        Self {
            replicas: Replicas::new(identity.node.clone()),
            transport,
            identity,
            shared: LastingState {
                engine,
                unknown_messages: 0,
                round_trip: Duration::ZERO,
                triggers_reported: 0,
                notice: None,
                frozen: None,
                prestop: None,
                connections: None,
                named: Vec::new(),
            },
            look: Look::plan(),
            fresh: false,
            connection: watch::Sender::new(disconnected),
            complaints: BTreeSet::new(),
        }
    }

    /// Adds the questions about Pods that wait to end.
    #[must_use]
    pub(crate) fn with_prestop(mut self, questions: Option<Questions>) -> Self {
        self.shared.prestop = questions;
        self
    }

    /// Adds the counter of connections, for questions about them.
    #[must_use]
    pub(crate) fn with_connections(mut self, of: Option<Arc<ServiceConnections>>) -> Self {
        self.shared.connections = of;
        self
    }

    /// Returns a receiver of the connection's state.
    pub fn connection(&self) -> watch::Receiver<Connection> {
        self.connection.subscribe()
    }

    /// Runs until the engine stops; safe to drop at any time.
    pub async fn run(mut self) -> Stopped {
        let mut state = State::Finding;
        loop {
            state = match self.step(state).await {
                Ok(next) => next,
                Err(stopped) => return stopped,
            };
        }
    }

    async fn step(&mut self, state: State) -> Result<State, Stopped> {
        match state {
            State::Waiting(wait) => {
                sleep(wait).await;
                Ok(State::Finding)
            }
            State::Finding => {
                self.find().await;
                Ok(self.next_replica())
            }
            State::Connecting(replica) => match timeout(HANDSHAKE, self.connect(replica)).await {
                Ok(Ok(live)) => {
                    self.connected(true);
                    self.look =
                        if self.replicas.seeks_zone() { Look::plan_sooner() } else { Look::plan() };
                    self.replicas.answered(true, Instant::now());
                    Ok(State::Live(Box::new(live)))
                }
                Ok(Err(lost)) => self.failed(&lost),
                Err(_) => self.failed(&Lost::NoWelcome),
            },
            State::Live(mut live) => {
                let find = || self.transport.find();
                tokio::select! {
                    biased;
                    progress = live.step(&mut self.shared) => self.progressed(live, progress),
                    found = self.look.found(find) => self.look_around(live, found),
                }
            }
        }
    }

    /// Handles a step of the stream.
    fn progressed(
        &mut self,
        live: Box<Live>,
        progress: Result<StepOutcome, Lost>,
    ) -> Result<State, Stopped> {
        Connection::freeze(&self.connection, self.shared.frozen.as_ref());
        self.replicas.named(&std::mem::take(&mut self.shared.named));
        match progress {
            Ok(StepOutcome::UpdateTaken) => {
                self.fresh = false;
                self.replicas.taken();
                Ok(State::Live(live))
            }
            Ok(StepOutcome::UpstreamAge(age)) if self.replicas.leaves(age, Instant::now()) => {
                self.ended(&live, &Lost::CutOff(age))
            }
            Ok(_) => Ok(State::Live(live)),
            Err(lost) => self.ended(&live, &lost),
        }
    }

    /// Leaves the replica if another one is the agent's favourite.
    fn look_around(&mut self, live: Box<Live>, found: Vec<Found>) -> Result<State, Stopped> {
        match self.replicas.favourite_elsewhere(found, Instant::now()) {
            Some(favourite) => self.ended(&live, &Lost::Rebalanced(favourite)),
            None => Ok(State::Live(live)),
        }
    }

    /// Handles a replica that gives the agent no stream.
    fn failed(&mut self, lost: &Lost) -> Result<State, Stopped> {
        self.disconnect(lost)?;
        self.replicas.answered(false, Instant::now());
        Ok(self.next_replica())
    }

    /// Handles the end of a stream.
    fn ended(&mut self, live: &Live, lost: &Lost) -> Result<State, Stopped> {
        if live.age() >= HEALTHY {
            self.replicas.healthy();
        }
        let retry = self.disconnect(lost)?;
        let sent_away = matches!(retry, Retry::After(_) | Retry::Elsewhere);
        let wait = self.replicas.ended(sent_away, Instant::now());
        Ok(State::Waiting(wait))
    }

    /// Resolves the names of the replicas, and reserves their addresses before the first connection.
    async fn find(&mut self) {
        let found = self.transport.find();
        let found = if self.replicas.any() {
            timeout(RESOLUTION, found).await.unwrap_or_default()
        } else {
            found.await
        };
        for failure in self.replicas.begin_round(found, Instant::now()) {
            self.complain(&failure.to_string());
        }
        let places = self.replicas.places();
        if !places.is_empty() {
            self.shared.engine.reserve(|reserved| reserved.peers = places);
        }
    }

    fn next_replica(&mut self) -> State {
        match self.replicas.next(Instant::now()) {
            Next::Try(replica) => State::Connecting(replica),
            Next::Wait(wait) => State::Waiting(wait),
        }
    }

    async fn connect(&mut self, replica: Replica) -> Result<Live, Lost> {
        let mut link = self.transport.open(replica, self.hello()).await?;
        let first = match link.inbox.next().await {
            Some(Ok(message)) => message.kind,
            Some(Err(status)) => return Err(Lost::Broken(Box::new(status))),
            None => return Err(Lost::Closed),
        };
        match first {
            Some(server_message::Kind::Welcome(welcome)) => {
                if welcome.protocol_version != PROTOCOL_VERSION {
                    let theirs = welcome.protocol_version;
                    return Err(Lost::Protocol(format!(
                        "it speaks version {theirs}, this agent {PROTOCOL_VERSION}; upgrade the \
                         older of the two"
                    )));
                }
                self.replicas.says_zone(welcome.same_zone);
                let cluster = self.check_cluster(&welcome.cluster_id)?;
                let mut collector = Collector::of_cluster(welcome.epoch, cluster);
                collector.hear(&welcome.freshness);
                let collector = self.check_freshness(collector, &mut link).await?;
                tracing::info!(
                    %replica,
                    epoch = format!("{:016x}", welcome.epoch),
                    server_version = welcome.server_version,
                    "connected to the control plane"
                );
                let reports = self.shared.engine.reports();
                Ok(Live::new(link, collector, reports, welcome.beat_ms))
            }
            Some(server_message::Kind::ComeBackLater(later)) => {
                self.replicas.named(&later.replicas);
                Err(later.into())
            }
            _ => Err(Lost::Protocol(
                "its first message is not Welcome".to_owned(),
            )),
        }
    }

    /// Returns the control plane's cluster. A state of another cluster is none to continue from.
    fn check_cluster(&self, theirs: &str) -> Result<Arc<str>, Lost> {
        let theirs: Arc<str> = theirs[..theirs.floor_char_boundary(MAX_CLUSTER)].into();
        let ours = self.shared.engine.reports().borrow().cluster.clone();
        let differs = !ours.is_empty() && !theirs.is_empty() && ours != theirs;
        if differs && !self.fresh {
            Err(Lost::OtherCluster { ours, theirs })
        } else {
            Ok(theirs)
        }
    }

    /// Returns the collector of a stream whose control plane shows no older state than the node holds, or
    /// one that the node takes because all control planes do.
    async fn check_freshness(
        &mut self,
        mut collector: Collector,
        link: &mut Link,
    ) -> Result<Collector, Lost> {
        let reports = self.shared.engine.reports();
        let lag = |collector: &Collector| live::lag(collector, &reports.borrow());
        if lag(&collector).is_none() {
            return Ok(collector);
        }
        // The first heartbeat says whether the control plane is in touch with its source.
        let heartbeat = loop {
            match link.inbox.next().await {
                Some(Ok(pb::ServerMessage {
                    kind: Some(server_message::Kind::Heartbeat(heartbeat)),
                })) => break heartbeat,
                Some(Ok(_)) => {}
                Some(Err(status)) => return Err(Lost::Broken(Box::new(status))),
                None => return Err(Lost::Closed),
            }
        };
        collector.hear(&heartbeat.freshness);
        let Some(lag) = lag(&collector) else {
            return Ok(collector);
        };
        let in_touch = Duration::from_millis(heartbeat.upstream_age_ms) < CUT_OFF;
        if !in_touch || !self.replicas.believes_older(Instant::now()) {
            return Err(Lost::Behind { lag, in_touch });
        }
        let why = format!(
            "all control planes have shown an older state of the cluster for {INSISTENCE:?}, so the node takes it. Was the \
             API server restored from a backup?"
        );
        tracing::warn!(%lag, "{why}");
        self.notice(&why);
        Ok(collector.going_back(true))
    }

    /// Records that there is no stream, and why; returns what to do about it.
    fn disconnect(&mut self, lost: &Lost) -> Result<Retry, Stopped> {
        self.connected(false);
        let retry = lost.retry();
        match retry {
            Retry::Never(stopped) => return Err(stopped),
            Retry::Backoff => {}
            Retry::Fresh => self.fresh = true,
            Retry::After(after) => self.replicas.rest(after, Instant::now()),
            Retry::Elsewhere => {}
            Retry::Behind { in_touch } => {
                self.replicas.shows_older(in_touch, Instant::now());
                self.notice(&lost.to_string());
                self.connection.send_modify(|connection| connection.older_states += 1);
            }
        }
        let reason = lost.to_string();
        if !lost.is_move() {
            self.complain(&reason);
        } else if self.is_new(&reason) {
            tracing::info!(reason, "changing to another control plane");
        }
        Ok(retry)
    }

    /// Records a remark about the current replica for reports.
    fn notice(&mut self, text: &str) {
        let replica = self.replicas.current();
        let replica = replica.map_or_else(String::new, |replica| replica.to_string());
        let since_ms = self.shared.notice.as_ref().map(|notice| notice.since_ms);
        self.shared.notice = Some(Notice {
            text: format!("{replica}: {text}"),
            since_ms: since_ms.unwrap_or_else(now_ms),
            until: Instant::now() + NOTICE,
        });
    }

    /// Records the reason why there is no stream, and logs it once.
    fn complain(&mut self, reason: &str) {
        if self.is_new(reason) {
            tracing::warn!(
                reason,
                "not connected to the control plane; the kernel keeps its rules"
            );
        }
    }

    /// Records the reason why there is no stream; returns whether it was not logged yet.
    fn is_new(&mut self, reason: &str) -> bool {
        self.connection.send_if_modified(|connection| {
            let changed = connection.reason != reason;
            reason.clone_into(&mut connection.reason);
            changed
        });
        if !self.complaints.insert(reason.to_owned()) {
            tracing::debug!(reason, "still not connected");
            return false;
        }
        if self.complaints.len() > MAX_COMPLAINTS {
            self.complaints.clear();
        }
        true
    }

    fn connected(&mut self, live: bool) {
        if live {
            self.complaints.clear();
        }
        self.connection.send_if_modified(|connection| {
            let changed = connection.live != live;
            if changed {
                *connection = Connection {
                    live,
                    since_ms: now_ms(),
                    reason: String::new(),
                    frozen: connection.frozen.take(),
                    ..*connection
                };
            }
            changed
        });
    }
}
