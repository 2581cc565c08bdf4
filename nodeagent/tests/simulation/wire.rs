//! The network, scripted: streams between agents and replicas that are slow, break, stall or fall silent.
//!
//! A stream keeps the order of its messages, as TCP does. Streams do not wait for each other: what an older stream
//! carries may arrive after a newer one has begun.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::StreamExt as _;
use http_body_util::StreamBody;
use hyper::body::Frame;
use kp_nodeagent::sync::{Found, Link, OUTBOX, OpenError, Replica, Transport};
use kplane_agents::streams::AgentServer;
use kplane_proto::shared::{AgentService as _, Messages, PREFIX, frame};
use kplane_proto::v1::{AgentMessage, Leaving, ServerMessage, agent_message, server_message};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status};

use crate::kernel::Kernel;
use crate::ledger::{Shared, lock};
use crate::links::{SharedLinks, peer_probe};

/// Messages under way to an agent, and to a replica, before the sender waits.
const WINDOW: usize = 6;

/// Most nodes of a simulation in which no links break.
const FEW_NODES: u8 = 3;

/// Time after which an attempt to connect fails where nothing answers.
const CONNECT: Duration = Duration::from_secs(2);

/// What answers at a replica's address.
#[derive(Clone, Debug)]
pub(crate) struct Listener {
    pub(crate) server: AgentServer,
    pub(crate) epoch: u64,
    /// Ends with the replica.
    pub(crate) open: CancellationToken,
    /// The capabilities that the replica's version lacks, as bits.
    pub(crate) lacks: u64,
}

/// The way of one agent to all replicas.
#[derive(Clone, Debug)]
pub(crate) struct Wire {
    pub(crate) node: u8,
    pub(crate) listeners: Arc<Mutex<Vec<Option<Listener>>>>,
    pub(crate) weather: Arc<Mutex<Weather>>,
    pub(crate) links: SharedLinks,
    /// Number of nodes, for latencies that differ.
    pub(crate) nodes: u8,
    pub(crate) kernel: Kernel,
    pub(crate) ledger: Shared,
}

/// The state of an agent's connections.
#[derive(Debug)]
pub(crate) struct Weather {
    pub(crate) latency: Duration,
    /// Nothing reaches the agent before.
    pub(crate) stalled_until: Instant,
    /// The capabilities that the agent's version lacks, as bits.
    pub(crate) lacks: u64,
    /// The way into the latest stream.
    asks: Option<mpsc::WeakSender<AgentMessage>>,
    /// Streams, and whether they carry anything.
    streams: Vec<(CancellationToken, CancellationToken)>,
}

impl Weather {
    pub(crate) fn new() -> Self {
        Self {
            latency: Duration::ZERO,
            stalled_until: Instant::now(),
            lacks: 0,
            asks: None,
            streams: Vec::new(),
        }
    }

    /// Breaks all streams.
    pub(crate) fn cut(&mut self) {
        self.streams.drain(..).for_each(|(cut, _)| cut.cancel());
    }

    /// Has the agent ask when no kernel leads to a Pod any more. Returns whether there is a stream for that.
    pub(crate) fn ask(&self, leaving: Leaving) -> bool {
        let stream = self.asks.as_ref().and_then(mpsc::WeakSender::upgrade);
        let message = AgentMessage {
            kind: Some(agent_message::Kind::Leaving(leaving)),
        };
        stream.is_some_and(|stream| stream.try_send(message).is_ok())
    }

    /// Makes all streams carry nothing any more. Streams that begin later work.
    pub(crate) fn silence(&mut self) {
        self.streams.drain(..).for_each(|(_, silent)| silent.cancel());
    }
}

impl Wire {
    /// Returns the latency by now, in whole milliseconds as the runtime's timers have them. Messages that are sent to
    /// several agents at the same time never arrive at the same time: the runtime's order of these is random.
    fn latency(&self) -> Duration {
        let millis = lock(&self.weather).latency.as_millis();
        let millis = u64::try_from(millis).unwrap_or_default();
        let nodes = u64::from(self.nodes.max(FEW_NODES));
        Duration::from_millis(1 + nodes * millis + u64::from(self.node))
    }

    /// Waits until the node reaches control planes.
    async fn lit(&self) {
        loop {
            let until = lock(&self.links).cut_until(self.node);
            if until <= Instant::now() {
                return;
            }
            sleep_until(until).await;
        }
    }
}

/// Returns the address of a replica.
pub(crate) fn place(replica: usize) -> SocketAddr {
    let number = u8::try_from(replica).unwrap_or(u8::MAX);
    ([10, 9, 0, number], 7465).into()
}

impl Transport for Wire {
    fn find(&self) -> impl Future<Output = Vec<Found>> + Send + 'static {
        let count = lock(&self.listeners).len();
        let replicas = (0..count).map(|replica| Replica {
            place: Some(place(replica)),
            url: 0,
        });
        std::future::ready(vec![Ok(replicas.collect())])
    }

    async fn open(&mut self, replica: Replica, mut hello: AgentMessage) -> Result<Link, OpenError> {
        let latency = self.latency();
        sleep(latency).await;
        if lock(&self.links).cut_until(self.node) > Instant::now() {
            sleep(CONNECT).await;
            return Err(OpenError::Connect {
                address: replica.to_string(),
                reason: "nothing answers".to_owned(),
            });
        }
        let listeners = lock(&self.listeners).clone();
        let index = (0..listeners.len()).find(|index| Some(place(*index)) == replica.place);
        let Some(listener) = index.and_then(|index| listeners[index].clone()) else {
            return Err(OpenError::Connect {
                address: replica.to_string(),
                reason: "refused".to_owned(),
            });
        };
        let lacks = listener.lacks | lock(&self.weather).lacks;
        if let Some(agent_message::Kind::Hello(hello)) = &mut hello.kind {
            hello.capabilities &= !lacks;
        }
        let stream = Stream {
            wire: self.clone(),
            epoch: listener.epoch,
            lacks: listener.lacks,
            latency,
            cut: listener.open.child_token(),
            silent: CancellationToken::new(),
        };
        let ends = (stream.cut.clone(), stream.silent.clone());
        lock(&self.weather).streams.push(ends);
        let (outbox, messages) = mpsc::channel(OUTBOX);
        lock(&self.weather).asks = Some(outbox.downgrade());
        // The channel has room, since nothing was sent before.
        let _ = outbox.try_send(hello);
        let (body, requests) = mpsc::channel(WINDOW);
        tokio::spawn(stream.clone().carry_up(messages, body));
        let body = StreamBody::new(ReceiverStream::new(requests));
        let messages = Messages::new(body);
        let frames = listener.server.sync(Request::new(messages)).await.map_err(|status| {
            OpenError::Refused {
                address: replica.to_string(),
                status: Box::new(status),
            }
        })?;
        let (answers, inbox) = mpsc::channel(1);
        tokio::spawn(stream.carry_down(frames, answers));
        Ok(Link {
            outbox,
            inbox: ReceiverStream::new(inbox).boxed(),
            token: None,
            peer_probe: peer_probe(&self.links, self.node),
        })
    }
}

/// One stream.
#[derive(Clone, Debug)]
struct Stream {
    wire: Wire,
    epoch: u64,
    lacks: u64,
    latency: Duration,
    cut: CancellationToken,
    silent: CancellationToken,
}

type Up = mpsc::Sender<Result<Frame<Bytes>, Status>>;
type Down = mpsc::Sender<Result<ServerMessage, Status>>;

impl Stream {
    /// Carries an agent's messages to a replica.
    async fn carry_up(self, mut from: mpsc::Receiver<AgentMessage>, to: Up) {
        let (queue, mut due) = mpsc::channel::<(Instant, Bytes)>(WINDOW);
        let carry = async {
            while let Some((at, bytes)) = due.recv().await {
                sleep_until(at).await;
                self.wire.lit().await;
                if self.silent.is_cancelled() || to.send(Ok(Frame::data(bytes))).await.is_err() {
                    break;
                }
            }
            if self.silent.is_cancelled() {
                // The replica hears nothing, not even the end.
                to.closed().await;
            }
        };
        let read = async {
            while let Some(message) = from.recv().await {
                self.sent(&message);
                let _ = queue.send((Instant::now() + self.latency, frame(&message))).await;
            }
            drop(queue);
            sleep(self.latency).await;
        };
        tokio::select! {
            biased;
            () = self.cut.cancelled() => {}
            ((), ()) = async { tokio::join!(read, carry) } => {}
        }
    }

    /// Notes a message that an agent sends.
    fn sent(&self, message: &AgentMessage) {
        let mut ledger = lock(&self.wire.ledger);
        match &message.kind {
            Some(agent_message::Kind::Report(report)) => {
                self.wire.kernel.show(|sides| ledger.reported(self.wire.node, report, sides));
            }
            Some(agent_message::Kind::Hello(hello)) => {
                let resume = hello.resume.as_ref().map(|resume| (resume.epoch, resume.revision));
                ledger.asked(self.wire.node, self.epoch, resume);
            }
            _ => {}
        }
    }

    /// Carries a replica's messages to an agent.
    async fn carry_down<F>(self, mut from: F, to: Down)
    where
        F: futures_util::Stream<Item = Result<Bytes, Status>> + Send + Unpin + 'static,
    {
        let (queue, mut due) = mpsc::channel::<(Instant, Result<ServerMessage, Status>)>(WINDOW);
        let read = async {
            let mut partial = BytesMut::new();
            while let Some(item) = from.next().await {
                let at = Instant::now() + self.latency;
                match item {
                    Ok(bytes) => {
                        partial.put(bytes);
                        while let Some(mut message) = take(&mut partial) {
                            self.said(&mut message);
                            let _ = queue.send((at, Ok(message))).await;
                        }
                    }
                    Err(status) => drop(queue.send((at, Err(status))).await),
                }
            }
            drop(queue);
        };
        let carry = async {
            let mut snapshot = false;
            while let Some((at, item)) = due.recv().await {
                let stalled = lock(&self.wire.weather).stalled_until;
                sleep_until(at.max(stalled)).await;
                self.wire.lit().await;
                if self.silent.is_cancelled() {
                    std::future::pending::<()>().await;
                }
                let ends = self.arrives(&item, &mut snapshot);
                let Ok(room) = to.reserve().await else {
                    break;
                };
                if let Some((at, snapshot)) = ends {
                    lock(&self.wire.ledger).delivered(self.wire.node, at, snapshot);
                }
                room.send(item);
            }
        };
        let silenced = async {
            self.silent.cancelled().await;
            lock(&self.wire.ledger).leaves(self.wire.node, self.epoch);
            // The agent hears nothing, not even the end, until it gives up.
            to.closed().await;
        };
        tokio::select! {
            biased;
            () = self.cut.cancelled() => drop(to.try_send(Err(Status::unavailable("the connection broke")))),
            () = silenced => {}
            () = to.closed() => {}
            ((), ()) = async { tokio::join!(read, carry) } => {}
        }
        lock(&self.wire.ledger).leaves(self.wire.node, self.epoch);
    }

    /// Notes what a replica says at this moment, and takes out what its version does not say.
    fn said(&self, message: &mut ServerMessage) {
        let mut ledger = lock(&self.wire.ledger);
        match &mut message.kind {
            Some(server_message::Kind::Welcome(welcome)) => {
                welcome.capabilities &= !self.lacks;
                if self.lacks != 0 {
                    welcome.beat_ms = 0;
                }
                ledger.joins(self.wire.node, self.epoch);
            }
            Some(server_message::Kind::Left(left)) => {
                ledger.left(self.epoch, left.token, left.outcome());
            }
            _ => {}
        }
    }

    /// Returns the position of an update that ends with this message, and whether it is a snapshot.
    fn arrives(
        &self,
        item: &Result<ServerMessage, Status>,
        snapshot: &mut bool,
    ) -> Option<((u64, u64), bool)> {
        let Some(server_message::Kind::Update(update)) = &item.as_ref().ok()?.kind else {
            return None;
        };
        *snapshot |= update.snapshot;
        let end = update.end.as_ref()?;
        Some(((self.epoch, end.revision), std::mem::take(snapshot)))
    }
}

/// Takes a complete message from the beginning of what a stream carries.
fn take(from: &mut BytesMut) -> Option<ServerMessage> {
    let prefix = from.get(..PREFIX)?;
    let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]);
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    if from.len() < PREFIX + length {
        return None;
    }
    let message = from.split_to(PREFIX + length).split_off(PREFIX);
    Some(ServerMessage::decode(message).unwrap())
}
