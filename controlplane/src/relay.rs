//! A relay: a control plane whose source is another control plane.
//!
//! ```text
//! root --WatchAll--> Gathering --Heard--> Mirror --> store --> agents
//!      <-- which of the roots? (Memory)
//! ```
//!
//! The relay follows one control plane at a time, and takes the next one of its list when that one fails, has lost touch
//! with its own source, or shows an older state than the relay holds. While it follows none, it keeps what it has.

mod config;
mod gather;
mod memory;

#[cfg(test)]
mod tests;

pub use config::{Config, SourceFlags};

use std::io;
use std::time::{Duration, Instant, SystemTime};

use futures_util::FutureExt as _;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use hyper_util::rt::TokioIo;
use kplane_model::{Issue, Reason, chance};
use kplane_proto::v1 as pb;
use kplane_proto::v1::desired_state_service_client::DesiredStateServiceClient;
use kplane_tls::{Follower, Token};
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Streaming};
use tracing::{info, warn};

use self::gather::{Gathering, Invalid};
use self::memory::{CutOff, Memory, Older};
use crate::dial::Dialer;
use crate::k8s::Kind;
use crate::peers::{Cover, Target, connect, describe, resolve};
use crate::source::upstream::{Above, Upstream};
use crate::source::{Batch, Event, Source, SourceError};

/// Interval at which the other control plane says that it is there, although nothing is new.
const HEARTBEAT_MS: u32 = 1_000;
/// Silence after which a stream counts as dead.
const SILENCE: Duration = Duration::from_secs(8);
/// Maximum time to connect and to begin a stream.
const OPEN: Duration = Duration::from_secs(5);
/// Limits of the pause after none of the control planes could be followed.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Time between two requests to read the source again.
const LOOK_PAUSE: Duration = Duration::from_secs(5);
/// Maximum number of control planes between a relay and the objects.
const MAX_LEVELS: usize = 8;
/// Maximum number of addresses of the other control planes.
const MAX_TARGETS: usize = 64;
/// Largest message, in bytes: one ServicePort with all its zones.
const MAX_MESSAGE: usize = 64 << 20;
/// Maximum number of bytes in flight, so that a distant root needs few round trips for a picture.
const WINDOW: u32 = 4 << 20;

type Client = DesiredStateServiceClient<Channel>;
type Stream = Streaming<pb::LayeredState>;

/// The source of a relay.
pub struct Relay {
    config: Config,
    cover: Cover,
    token: Option<Follower<Token>>,
    /// Epoch of this control plane, by which it notices that it would follow itself.
    epoch: u64,
    upstream: Upstream,
    memory: Memory,
    /// The problems that were reported last.
    reported: Vec<Issue>,
}

/// The reason why a control plane is not followed, or not any more.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("{0}")]
    Refused(String),
    #[error("it did not answer within {OPEN:?}")]
    Late,
    #[error("it said nothing for {SILENCE:?}")]
    Silent,
    #[error("it closed the stream")]
    Closed,
    #[error("it has not read its source yet")]
    NotRead,
    #[error(
        "its objects come from this control plane, which can therefore not follow it; take its address out of \
         --source-controlplane"
    )]
    Loop,
    #[error(
        "its objects come through {0} control planes, and at most {MAX_LEVELS} may be above a relay; follow one of these"
    )]
    TooDeep(usize),
    #[error(
        "it belongs to cluster {theirs:?}, and this relay serves cluster {ours:?}; correct --source-controlplane, or \
         restart the relay"
    )]
    OtherCluster { ours: String, theirs: String },
    #[error(
        "it has not seen a change of a {0} that this relay has published; nothing is taken from it"
    )]
    Older(Kind),
    #[error(transparent)]
    CutOff(#[from] CutOff),
    #[error("its messages are invalid: {0}")]
    Invalid(#[from] Invalid),
    #[error("this control plane stops")]
    Stopping,
}

impl From<Older> for Lost {
    fn from(older: Older) -> Self {
        Self::Older(older.0)
    }
}

impl Source for Relay {
    async fn run(self, sink: mpsc::Sender<Batch>) -> Result<(), SourceError> {
        let closed = sink.clone();
        tokio::select! {
            () = self.follow_all(sink) => {}
            () = closed.closed() => {}
        }
        Ok(())
    }
}

impl Relay {
    /// Creates the source of the control plane with this epoch.
    #[must_use]
    pub fn new(
        config: Config,
        cover: Cover,
        token: Option<Follower<Token>>,
        epoch: u64,
        upstream: Upstream,
    ) -> Self {
        Self {
            config,
            cover,
            token,
            epoch,
            upstream,
            memory: Memory::default(),
            reported: Vec::new(),
        }
    }

    async fn follow_all(mut self, sink: mpsc::Sender<Batch>) {
        let mut last: Option<Target> = None;
        let mut pause = PAUSE.0;
        loop {
            let (targets, mut issues) = self.targets().await;
            let alone = targets.len() == 1;
            let mut followed = false;
            for target in in_turn(targets, last.as_ref()) {
                let (lost, taken) = self.follow(&target, alone, &sink).await;
                if matches!(lost, Lost::Stopping) {
                    return;
                }
                last = Some(target.clone());
                if taken {
                    info!(root = %target.address, reason = %lost, "the relay follows this control plane no more");
                    followed = true;
                    break;
                }
                let place = target.address;
                issues.push(Issue::of_source(
                    Reason::UpstreamFailing,
                    format!("the control plane at {place} cannot be followed: {lost}"),
                ));
            }
            if followed {
                pause = PAUSE.0;
            } else if self.report(issues, &sink).await.is_err() {
                return;
            }
            sleep(chance::between(Duration::ZERO, pause)).await;
            pause = (pause * 2).min(PAUSE.1);
        }
    }

    /// Returns all control planes that may be followed, and the problems with names.
    async fn targets(&self) -> (Vec<Target>, Vec<Issue>) {
        let (mut targets, mut issues) = (Vec::new(), Vec::new());
        for place in &self.config.flags.source_controlplane {
            let found = resolve(place).await;
            let found = found.and_then(|found| match found.is_empty() {
                true => Err(io::Error::other("the name has no address")),
                false => Ok(found),
            });
            match found {
                Ok(found) => targets.extend(found),
                Err(error) => issues.push(Issue::of_source(Reason::UpstreamFailing, format!(
                    "the control plane at {place} cannot be followed: cannot resolve its name: {error}"
                ))),
            }
        }
        targets.truncate(MAX_TARGETS);
        (targets, issues)
    }

    /// Follows a control plane to the end; also returns whether anything was taken from it.
    async fn follow(
        &mut self,
        target: &Target,
        alone: bool,
        sink: &mpsc::Sender<Batch>,
    ) -> (Lost, bool) {
        let mut taken = false;
        let opened = timeout(OPEN, self.open(target)).await;
        let lost = match opened.unwrap_or(Err(Lost::Late)) {
            Err(lost) => lost,
            Ok((client, stream)) => {
                let ask = pass_on_looks(self.upstream.looks(), client, self.token.clone());
                tokio::select! {
                    lost = self.read(stream, target, alone, &mut taken, sink) => lost,
                    lost = ask => lost,
                }
            }
        };
        (lost, taken)
    }

    async fn open(&self, target: &Target) -> Result<(Client, Stream), Lost> {
        let (dialer, cover, to) = (
            Dialer::new(self.config.mark),
            self.cover.clone(),
            target.clone(),
        );
        let connector = tower::service_fn(move |_| {
            let connected = connect(dialer, cover.clone(), to.clone());
            connected.map(|wire| wire.map(TokioIo::new))
        });
        // The connector ignores the address.
        let endpoint = Endpoint::from_static("http://root")
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW);
        let channel = endpoint.connect_with_connector_lazy(connector);
        let request = with_token(
            self.token.as_ref(),
            pb::WatchAllRequest {
                heartbeat_ms: HEARTBEAT_MS,
            },
        )?;
        let client = DesiredStateServiceClient::new(channel);
        let mut client = client.max_decoding_message_size(MAX_MESSAGE);
        let stream = client.watch_all(request).await;
        let stream = stream.map_err(|status| Lost::Refused(describe(&status)))?;
        Ok((client, stream.into_inner()))
    }

    async fn read(
        &mut self,
        mut stream: Stream,
        target: &Target,
        alone: bool,
        taken: &mut bool,
        sink: &mpsc::Sender<Batch>,
    ) -> Lost {
        let mut gathering = Gathering::default();
        loop {
            let message = match timeout(SILENCE, stream.message()).await {
                Ok(Ok(Some(message))) => message,
                Ok(Ok(None)) => return Lost::Closed,
                Ok(Err(status)) => return Lost::Refused(describe(&status)),
                Err(_) => return Lost::Silent,
            };
            match self.take(message, &mut gathering, target, alone) {
                Ok(None) => {}
                Ok(Some(batch)) => {
                    if !std::mem::replace(taken, true) {
                        info!(root = %target.address, "the relay follows this control plane");
                        if self.report(Vec::new(), sink).await.is_err() {
                            return Lost::Stopping;
                        }
                    }
                    if sink.send(batch).await.is_err() {
                        return Lost::Stopping;
                    }
                }
                Err(lost) => return lost,
            }
        }
    }

    /// Takes in a message; returns what is new when the picture is complete.
    fn take(
        &mut self,
        message: pb::LayeredState,
        gathering: &mut Gathering,
        target: &Target,
        alone: bool,
    ) -> Result<Option<Batch>, Lost> {
        let mut above = None;
        if let Some(source) = &message.source {
            self.check(source)?;
            above = Some(Above {
                address: target.address,
                path: source.path.clone(),
                names_nodes: source.names_nodes,
            });
            if !source.read && !alone {
                return Err(Lost::NotRead);
            }
        }
        let heard = gathering.add(message, Instant::now(), SystemTime::now())?;
        if let Some(heard) = &heard {
            self.memory.admit(target, heard, alone, Instant::now())?;
        }
        // Also of one that waits for its source: relays in a ring would wait for each other.
        if let Some(above) = above {
            self.upstream.set_above(above);
        }
        let Some(heard) = heard else {
            return Ok(None);
        };
        Ok(Some(Batch {
            events: vec![Event::Relayed(Box::new(heard))],
            observed_at: SystemTime::now(),
        }))
    }

    /// Checks that a control plane may be followed.
    fn check(&self, source: &pb::SourceState) -> Result<(), Lost> {
        if source.path.contains(&self.epoch) {
            return Err(Lost::Loop);
        }
        if source.path.len() > MAX_LEVELS {
            return Err(Lost::TooDeep(source.path.len()));
        }
        match (self.upstream.cluster_id(), &*source.cluster_id) {
            (_, "") => {}
            ("", theirs) => self.upstream.set_cluster_id(gather::cut(theirs)),
            (ours, theirs) if ours == theirs => {}
            (ours, theirs) => {
                return Err(Lost::OtherCluster {
                    ours: ours.to_owned(),
                    theirs: gather::cut(theirs),
                });
            }
        }
        Ok(())
    }

    /// Reports all current problems with the way to the other control planes.
    async fn report(&mut self, issues: Vec<Issue>, sink: &mpsc::Sender<Batch>) -> Result<(), ()> {
        if issues == self.reported {
            return Ok(());
        }
        self.reported.clone_from(&issues);
        let batch = Batch {
            events: vec![Event::Issues(issues)],
            observed_at: SystemTime::now(),
        };
        sink.send(batch).await.map_err(drop)
    }
}

/// Returns a request with the token of this relay, if it has one.
fn with_token<T>(token: Option<&Follower<Token>>, message: T) -> Result<Request<T>, Lost> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        let header = token.current().to_header();
        let header = header.map_err(|error| Lost::Refused(error.to_string()))?;
        let headers = HeaderMap::from_iter([(AUTHORIZATION, header)]);
        *request.metadata_mut() = MetadataMap::from_headers(headers);
    }
    Ok(request)
}

/// Asks the other control plane to read its source again whenever a part of this one wants that.
async fn pass_on_looks(
    mut looks: watch::Receiver<u64>,
    mut client: Client,
    token: Option<Follower<Token>>,
) -> Lost {
    loop {
        if looks.changed().await.is_err() {
            return Lost::Stopping;
        }
        let request = match with_token(token.as_ref(), pb::LookAgainRequest {}) {
            Ok(request) => request,
            Err(lost) => return lost,
        };
        if let Ok(Err(status)) = timeout(OPEN, client.look_again(request)).await {
            warn!(
                reason = describe(&status),
                "cannot ask the followed control plane to read its source again"
            );
        }
        sleep(LOOK_PAUSE).await;
    }
}

/// Returns the control planes in the order in which they are tried: those behind the last one first.
fn in_turn(mut targets: Vec<Target>, last: Option<&Target>) -> Vec<Target> {
    let place = last.and_then(|last| targets.iter().position(|target| target == last));
    let first = place.map_or(0, |place| place + 1);
    let first = first % targets.len().max(1);
    targets.rotate_left(first);
    targets
}
