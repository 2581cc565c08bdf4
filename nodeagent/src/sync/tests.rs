//! Tests of the client against a scripted control plane. Time is paused.

mod connection;
mod replicas;
mod updates;

use std::sync::Mutex;
use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt};
use kplane_proto::DIGEST_SCHEMA;
use kplane_proto::v1::{AgentMessage, ServerMessage};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Status;

use super::lost::LONGEST_ABSENCE;
use super::*;
use crate::desired::fixture::{EPOCH, Plane, RANGES, svc};
use crate::desired::{Position, Refusal, Resume};
use crate::engine::{CheckpointSettings, Command};
use crate::report::Report;
use kplane_dataplane::backend::{Backend, noop};
use kplane_proto::v1::agent_message;

/// Longest that any test waits for anything; time is paused, so it costs nothing.
const PATIENCE: Duration = Duration::from_secs(600);

const SECOND: Duration = Duration::from_secs(1);

/// Hands each stream that the client opens to the test.
struct Scripted {
    opened: mpsc::UnboundedSender<Server>,
    /// The replicas that can be found, and those that refuse connections.
    stage: Arc<Mutex<Stage>>,
}

/// The replicas of the control plane.
#[derive(Default)]
struct Stage {
    replicas: Vec<Replica>,
    /// Replicas that refuse connections.
    dead: BTreeSet<Replica>,
    /// The number of streams that are refused before one is opened.
    refusals: u32,
    refused: u32,
    /// The number of times that names were resolved.
    looks: u32,
}

/// A replica at an address of its own.
fn at(number: u8) -> Replica {
    Replica {
        place: Some(([10, 0, 0, number], 7465).into()),
        url: 0,
    }
}

impl Transport for Scripted {
    fn find(&self) -> impl Future<Output = Vec<Found>> + Send + 'static {
        let mut stage = self.stage.lock().unwrap();
        stage.looks += 1;
        std::future::ready(vec![Ok(stage.replicas.clone())])
    }

    async fn open(&mut self, replica: Replica, hello: AgentMessage) -> Result<Link, OpenError> {
        {
            let mut stage = self.stage.lock().unwrap();
            if stage.refusals > 0 || stage.dead.contains(&replica) {
                stage.refusals = stage.refusals.saturating_sub(1);
                stage.refused += 1;
                return Err(OpenError::Connect {
                    address: "nowhere".into(),
                    reason: "refused".into(),
                });
            }
        }
        let (outbox, inbox) = mpsc::channel(OUTBOX);
        let (send, messages) = mpsc::unbounded_channel();
        let Some(agent_message::Kind::Hello(hello)) = hello.kind else {
            panic!("the first message is no Hello: {hello:?}");
        };
        let server = Server {
            at: replica,
            hello,
            opened_at: Instant::now(),
            send,
            inbox,
        };
        // A test that is over takes no more streams.
        let _ = self.opened.send(server);
        let inbox = UnboundedReceiverStream::new(messages).boxed();
        Ok(Link {
            outbox,
            inbox,
            token: None,
            peer_probe: Arc::new(|_| {
                async {
                    pb::Reached {
                        nodes: vec![true, false],
                    }
                }
                .boxed()
            }),
        })
    }
}

/// The control plane's end of one stream. Dropping it closes the stream.
struct Server {
    at: Replica,
    hello: pb::Hello,
    opened_at: Instant,
    send: mpsc::UnboundedSender<Result<ServerMessage, Status>>,
    inbox: mpsc::Receiver<AgentMessage>,
}

impl Server {
    fn say(&self, kind: server_message::Kind) {
        self.send.send(Ok(ServerMessage { kind: Some(kind) })).unwrap();
    }

    fn welcome(&self, epoch: u64) {
        self.welcome_from(epoch, None);
    }

    /// Says whether this replica is in the zone of the agent's node.
    fn welcome_from(&self, epoch: u64, same_zone: Option<bool>) {
        self.say(server_message::Kind::Welcome(pb::Welcome {
            protocol_version: PROTOCOL_VERSION,
            epoch,
            same_zone,
            ..pb::Welcome::default()
        }));
    }

    fn update(&self, pieces: Vec<pb::Update>) {
        for piece in pieces {
            self.say(server_message::Kind::Update(piece));
        }
    }

    /// The next message of the client; `None` when it closed the stream.
    async fn heard(&mut self) -> Option<agent_message::Kind> {
        let message = timeout(PATIENCE, self.inbox.recv()).await.unwrap();
        message.map(|message| message.kind.unwrap())
    }

    /// Takes one message, and answers it if it is a ping; false when the client closed the stream.
    async fn answers_a_ping(&mut self) -> bool {
        let heard = self.heard().await;
        if let Some(agent_message::Kind::Ping(pb::Ping { token })) = heard {
            self.say(server_message::Kind::Pong(pb::Pong { token }));
        }
        heard.is_some()
    }

    /// Returns the next report that is as wanted. Pings are answered meanwhile.
    async fn report(&mut self, wanted: impl Fn(&pb::Report) -> bool) -> pb::Report {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            match self.heard().await.expect("the client closed the stream") {
                agent_message::Kind::Report(report) if wanted(&report) => return report,
                agent_message::Kind::Ping(ping) => {
                    let token = ping.token;
                    self.say(server_message::Kind::Pong(pb::Pong { token }));
                }
                _ => {}
            }
        }
        panic!("no such report");
    }

    /// All reports within a time. Pings are answered meanwhile.
    async fn reports_within(&mut self, time: Duration) -> Vec<pb::Report> {
        let deadline = Instant::now() + time;
        let mut reports = Vec::new();
        while let Ok(message) = tokio::time::timeout_at(deadline, self.inbox.recv()).await {
            match message.and_then(|message| message.kind) {
                Some(agent_message::Kind::Report(report)) => reports.push(report),
                Some(agent_message::Kind::Ping(ping)) => {
                    let token = ping.token;
                    self.say(server_message::Kind::Pong(pb::Pong { token }));
                }
                _ => {}
            }
        }
        reports
    }

    async fn applied(&mut self, revision: u64) -> pb::Report {
        self.report(|report| report.applied_revision == revision).await
    }

    /// Waits until the client gives the stream up.
    async fn closed(mut self) {
        while self.heard().await.is_some() {}
    }
}

/// The streams that a client opens, and its engine.
struct Rig {
    servers: mpsc::UnboundedReceiver<Server>,
    engine: Engine,
    stage: Arc<Mutex<Stage>>,
    connection: watch::Receiver<Connection>,
    client: tokio::task::JoinHandle<Stopped>,
}

/// An engine on the test's own runtime, whose time stands still.
fn local(backend: Backend) -> Engine {
    let (engine, work) = Engine::local(backend, CheckpointSettings::default());
    tokio::spawn(work);
    engine
}

impl Rig {
    fn new() -> Self {
        Self::with(local(noop::open()), 0)
    }

    fn with(engine: Engine, refusals: u32) -> Self {
        let rig = Self::among(engine, [at(1)]);
        rig.stage.lock().unwrap().refusals = refusals;
        rig
    }

    /// A client that finds these replicas.
    fn among(engine: Engine, replicas: impl IntoIterator<Item = Replica>) -> Self {
        let (opened, servers) = mpsc::unbounded_channel();
        let stage = Arc::new(Mutex::new(Stage {
            replicas: replicas.into_iter().collect(),
            ..Stage::default()
        }));
        let transport = Scripted {
            opened,
            stage: stage.clone(),
        };
        let client = Client::new(transport, Identity::new("n1".into(), false), engine.clone());
        Self {
            servers,
            engine,
            stage,
            connection: client.connection(),
            client: tokio::spawn(client.run()),
        }
    }

    async fn opened(&mut self) -> Server {
        timeout(PATIENCE, self.servers.recv()).await.unwrap().unwrap()
    }

    /// Returns a stream over which all of `plane` was applied.
    async fn synced(&mut self, plane: &mut Plane) -> Server {
        let mut server = self.opened().await;
        server.welcome(plane.epoch);
        server.update(plane.snapshot());
        server.applied(plane.revision).await;
        server
    }

    fn report(&self) -> Report {
        self.engine.reports().borrow().clone()
    }
}
