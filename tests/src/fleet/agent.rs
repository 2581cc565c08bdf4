//! One simulated agent: a connection of its own with mutual TLS, the real protocol, and no kernel.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use kplane_dataplane::backoff::Backoff;
use kplane_model::ObjectHash;
use kplane_proto::v1::{self as pb, AgentMessage, Hello, agent_message};
use kplane_tls::ClientConfig;
use prost::bytes::Bytes;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, interval_at, sleep, sleep_until, timeout};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

use super::catalog::{Catalog, Piece, Reply};
use super::held::Held;
use super::meter::Meter;
use super::plane::{agent_address, identity};
use super::wire::{PREFIX, connect, sync};

/// Address of the first agent: 127.1.0.1.
const OWN: u32 = 0x7f01_0001;
/// As of real agents.
const RECONNECT: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
const PING_INTERVAL: Duration = Duration::from_secs(5);
const SILENCE: Duration = Duration::from_secs(15);
const OPEN_WITHIN: Duration = Duration::from_secs(10);
const OUTBOX: usize = 3;
/// Longest time until an agent goes back to its first replica.
const HOME_WITHIN: Duration = Duration::from_secs(5);
/// The capabilities to compare ranges, and to say in between that the agent is alive.
const CAPABILITIES: u64 =
    1 << (pb::Capability::Ranges as u64 - 1) | 1 << (pb::Capability::Beats as u64 - 1);

/// What all agents share.
#[derive(Debug)]
pub(super) struct World {
    pub(super) certs: PathBuf,
    pub(super) catalog: Catalog,
    pub(super) meter: Meter,
    pub(super) replicas: usize,
    /// Number of changes after which the same Service changes again.
    pub(super) changing: u64,
    /// Whether agents report what they hold.
    pub(super) reports: bool,
    /// Number of agents that do not read, the first ones.
    pub(super) stalled: watch::Sender<u32>,
    /// Number of times that agents were told to go back to their first replica.
    pub(super) home: watch::Sender<u32>,
    /// The control planes' processes.
    pub(super) pids: Mutex<Vec<u32>>,
}

impl World {
    pub(super) fn note_pids(&self, pids: Vec<u32>) {
        *self.pids.lock().unwrap_or_else(PoisonError::into_inner) = pids;
    }

    pub(super) fn pids(&self) -> Vec<u32> {
        self.pids.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// An agent.
#[derive(Debug)]
pub(super) struct Agent {
    number: u32,
    name: String,
    identity: Arc<ClientConfig>,
    world: Arc<World>,
    held: Mutex<Held>,
}

/// The reason why a stream ended.
enum Ended {
    /// No stream could be opened.
    NotOpened,
    /// The control plane asked the agent to come back later.
    Later(Duration),
    /// The agent goes back to its first replica.
    WentHome,
    Lost,
}

/// The agent counts as up to date at a replica.
struct Attending<'a>(&'a Meter, usize);

impl<'a> Attending<'a> {
    fn begin(meter: &'a Meter, replica: usize) -> Self {
        meter.on[replica].fetch_add(1, Relaxed);
        Self(meter, replica)
    }
}

impl Drop for Attending<'_> {
    fn drop(&mut self) {
        self.0.on[self.1].fetch_sub(1, Relaxed);
    }
}

impl Agent {
    pub(super) fn new(number: u32, name: String, world: &Arc<World>) -> Result<Self> {
        Ok(Self {
            number,
            identity: identity(&world.certs, &name)?,
            name,
            world: Arc::clone(world),
            held: Mutex::default(),
        })
    }

    pub(super) fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects again and again, to one replica after the other, after random pauses as real agents do.
    pub(super) async fn run(self: Arc<Self>) {
        let order = self.order();
        let mut backoff = RECONNECT;
        let mut resting = BTreeMap::new();
        let mut last = None;
        loop {
            let mut round = order.clone();
            round.sort_by_key(|replica| Some(*replica) == last);
            resting.retain(|_, until| *until > Instant::now());
            round.retain(|replica| !resting.contains_key(replica));
            let mut sent_away = false;
            for replica in round {
                last = Some(replica);
                match Box::pin(self.stream(replica, replica == order[0], &mut backoff)).await {
                    Ended::NotOpened => continue,
                    Ended::WentHome => sent_away = true,
                    Ended::Later(time) => {
                        let time = time + rand::random_range(Duration::ZERO..=time / 2);
                        resting.insert(replica, Instant::now() + time);
                        sent_away = true;
                    }
                    Ended::Lost => {}
                }
                break;
            }
            let first = resting.values().min().copied();
            match first {
                Some(until) if resting.len() == order.len() => sleep_until(until).await,
                _ if sent_away => {}
                _ => sleep(backoff.full_jitter()).await,
            }
        }
    }

    /// Returns the replica that the agent prefers.
    pub(super) fn first(&self) -> usize {
        self.order().first().copied().unwrap_or_default()
    }

    /// Returns the replicas in the order of a hash of the node and the replica.
    fn order(&self) -> Vec<usize> {
        let mut order = Vec::from_iter(0..self.world.replicas);
        order.sort_by_cached_key(|replica| {
            let place = format!("{} {replica}", self.name);
            let mut digest = kplane_model::Digest::default();
            digest.add(ObjectHash::of(place.as_bytes()));
            digest.to_bytes()
        });
        order
    }

    async fn stream(&self, replica: usize, is_first: bool, backoff: &mut Backoff) -> Ended {
        let opened = timeout(OPEN_WITHIN, self.open(replica)).await;
        let Ok(Ok((messages, outbox))) = opened else {
            return Ended::NotOpened;
        };
        self.held().begin_stream();
        let talk = Talk {
            agent: self,
            replica,
            outbox,
            epoch: 0,
            bytes: 0,
            way: None,
            attending: None,
            report_at: Some(Instant::now()),
            reported_at: None,
            spread: Duration::ZERO,
            beat: None,
            beat_at: None,
        };
        let goes_home = async {
            let mut home = self.world.home.subscribe();
            let reported = home.changed().await.is_ok() && !is_first;
            if !reported {
                std::future::pending::<()>().await;
            }
            sleep(rand::random_range(Duration::ZERO..HOME_WITHIN)).await;
        };
        tokio::select! {
            ended = talk.run(messages, backoff) => ended,
            () = goes_home => Ended::WentHome,
        }
    }

    async fn open(
        &self,
        replica: usize,
    ) -> Result<(tonic::Streaming<Bytes>, mpsc::Sender<AgentMessage>)> {
        let (outbox, messages) = mpsc::channel(OUTBOX);
        let hello = Hello {
            protocol_version: kplane_proto::PROTOCOL_VERSION,
            capabilities: CAPABILITIES,
            node_name: self.name.clone(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            instance: self.number.into(),
            resume: self.held().token(),
            backend: "nftables".to_owned(),
            ..Hello::default()
        };
        let hello = agent_message::Kind::Hello(hello);
        outbox.try_send(AgentMessage { kind: Some(hello) })?;
        let own = Ipv4Addr::from(OWN + self.number);
        let channel = connect(own, agent_address(replica), &self.identity).await?;
        let stream = sync(channel, ReceiverStream::new(messages)).await?;
        Ok((stream, outbox))
    }
}

/// An open stream.
struct Talk<'a> {
    agent: &'a Agent,
    replica: usize,
    outbox: mpsc::Sender<AgentMessage>,
    epoch: u64,
    /// Bytes of messages that came.
    bytes: u64,
    /// The count of the way in which the agent gets up to date, from the first piece on.
    way: Option<&'a std::sync::atomic::AtomicU64>,
    attending: Option<Attending<'a>>,
    report_at: Option<Instant>,
    reported_at: Option<Instant>,
    /// The time over which reports are spread.
    spread: Duration,
    /// Longest time between two messages to the control plane, if it wants beats.
    beat: Option<Duration>,
    beat_at: Option<Instant>,
}

impl Talk<'_> {
    async fn run(mut self, mut messages: tonic::Streaming<Bytes>, backoff: &mut Backoff) -> Ended {
        let agent = self.agent;
        let world = &agent.world;
        let mut stalled = world.stalled.subscribe();
        let mut ping = interval_at(Instant::now() + PING_INTERVAL, PING_INTERVAL);
        let mut heard = Instant::now();
        let outbox = self.outbox.clone();
        loop {
            if *stalled.borrow_and_update() > agent.number {
                self.attending = None;
                let reads = stalled.wait_for(|stalled| *stalled <= agent.number);
                if reads.await.is_err() {
                    return Ended::Lost;
                }
                heard = Instant::now();
            }
            let report_at = if world.reports { self.report_at } else { None };
            let room = async {
                sleep_until(report_at.unwrap_or(heard)).await;
                outbox.reserve().await
            };
            tokio::select! {
                message = messages.next() => {
                    heard = Instant::now();
                    let Some(Ok(message)) = message else {
                        return Ended::Lost;
                    };
                    match self.message(&message) {
                        Ok(None) => {}
                        Ok(Some(later)) => return Ended::Later(later),
                        Err(_) => {
                            world.meter.violations.unreadable.fetch_add(1, Relaxed);
                            return Ended::Lost;
                        }
                    }
                    if self.attending.is_some() {
                        backoff.reset();
                    }
                }
                permit = room, if report_at.is_some() => {
                    let Ok(permit) = permit else {
                        return Ended::Lost;
                    };
                    permit.send(AgentMessage { kind: Some(self.report()) });
                    (self.report_at, self.reported_at) = (None, Some(Instant::now()));
                }
                _ = ping.tick() => {
                    self.send(agent_message::Kind::Ping(pb::Ping { token: 1 }));
                }
                () = sleep_until(self.beat_at.unwrap_or(heard)), if self.beat_at.is_some() => {
                    self.send(agent_message::Kind::Beat(pb::Beat {}));
                    self.beat_at = self.beat.map(|beat| Instant::now() + beat);
                }
                _ = stalled.changed() => {}
                () = sleep_until(heard + SILENCE) => return Ended::Lost,
            }
        }
    }

    fn send(&self, kind: agent_message::Kind) {
        // Without room, what was sent before says that the agent lives.
        let _ = self.outbox.try_send(AgentMessage { kind: Some(kind) });
    }

    fn report(&self) -> agent_message::Kind {
        let held = self.agent.held();
        let revision = if self.attending.is_some() { held.revision() } else { 0 };
        self.agent.world.meter.reports.fetch_add(1, Relaxed);
        agent_message::Kind::Report(pb::Report {
            epoch: self.epoch,
            received_revision: revision,
            applied_revision: revision,
            verified_revision: revision,
            ..pb::Report::default()
        })
    }

    /// Reports progress as real agents do: soon, but not more often than the control plane wants.
    fn report_later(&mut self) {
        let now = Instant::now();
        let after_last = self.reported_at.map_or(now, |at| at + self.spread);
        let spread = now + rand::random_range(Duration::ZERO..=self.spread);
        self.report_at.get_or_insert(spread.max(after_last));
    }

    /// Handles a message; returns how long the agent is to stay away, if it is.
    fn message(&mut self, message: &Bytes) -> Result<Option<Duration>> {
        self.bytes += u64::try_from(message.len())? + PREFIX;
        match self.agent.world.catalog.read(message)? {
            Reply::Welcome { epoch, beat } => {
                (self.epoch, self.beat) = (epoch, beat);
                self.beat_at = beat.map(|beat| Instant::now() + beat);
            }
            Reply::Update(piece) => self.update(&piece),
            Reply::Ping(token) => self.send(agent_message::Kind::Pong(pb::Pong { token })),
            Reply::Compare(count) => self.compare(u16::try_from(count).context("ranges")?),
            Reply::ComeBackLater(later) => return Ok(Some(later)),
            Reply::Heartbeat(spread) => self.spread = spread,
            Reply::Other => {}
        }
        Ok(None)
    }

    fn update(&mut self, piece: &Piece) {
        let World {
            catalog,
            meter,
            changing,
            ..
        } = &*self.agent.world;
        let mut held = self.agent.held();
        let held_something = held.revision() > 0;
        if self.attending.is_none() && self.way.is_none() {
            self.way = Some(match piece {
                Piece { snapshot: true, .. } => &meter.ways.snapshots,
                Piece {
                    ranges: Some(_), ..
                } => &meter.ways.ranges,
                Piece { changes, .. } if changes.is_empty() => &meter.ways.equal,
                Piece { .. } => &meter.ways.changes,
            });
        }
        let taken = held.push(&catalog.tables(), self.epoch, piece);
        drop(held);
        let Some(taken) = taken else {
            return;
        };
        meter.took(&taken, *changing);
        self.report_later();
        if self.attending.is_none() {
            self.attending = Some(Attending::begin(meter, self.replica));
            if let Some(way) = self.way.take()
                && held_something
            {
                meter.resumed(way, self.bytes);
            }
        }
    }

    fn compare(&self, count: u16) {
        let world = &self.agent.world;
        let digests = self.agent.held().ranges(&world.catalog.tables(), count).to_bytes();
        self.send(agent_message::Kind::Ranges(pb::Ranges { digests }));
    }
}
