//! An open stream.
//!
//! One step handles one event. While too much waits for the engine, the agent does not read the
//! stream. It still sends pings and reports, so that the control plane knows that the agent is
//! alive.

use std::fmt;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use kplane_model::{RangeDigests, is_number_of_ranges};
use kplane_proto::v1 as pb;
use kplane_proto::v1::{agent_message, server_message};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tonic::Status;

use super::prestop::Prestop;
use super::replicas::CUT_OFF;
use super::report_pacing::ReportPacing;
use super::transport::Presented;
use super::waiting::{UpdateResult, Waiting};
use super::{LastingState, Link, Lost, Notice, answers};
use crate::connection::Frozen;
use crate::desired::{Collector, Lag, Position, Update, now_ms};
use crate::engine::Stopped;
use crate::report::{Report, micros, time};
use kplane_dataplane::backend::ServerCounts;

/// Interval of pings to the control plane.
const PING_INTERVAL: Duration = Duration::from_secs(5);

/// Shortest time between two beats that a control plane may ask for.
const MIN_BEAT: Duration = Duration::from_millis(500);

/// Longest silence of a control plane, three pings, before it counts as gone. Together with the
/// connection attempt that follows, this stays below the 20 s of the fleet's rules.
const SILENCE: Duration = Duration::from_secs(15);

/// A comparison of ranges on its way through the engine.
type Comparison = BoxFuture<'static, Result<Option<RangeDigests>, Stopped>>;

/// The answer to a question, on its way through the engine and the kernel.
type PendingInspection = BoxFuture<'static, Result<pb::Inspection, Stopped>>;

pub(super) struct Live {
    link: Link,
    epoch: u64,
    reports: watch::Receiver<Report>,
    collector: Collector,
    waiting: Waiting,
    /// The last question, until it is answered.
    question: Option<PendingInspection>,
    /// The control plane's question about ranges, until the engine has answered it.
    comparison: Option<Comparison>,
    /// Questions about Pods that wait to end.
    prestop: Prestop,
    /// The counts of real servers that the control plane last received.
    servers_reported: [Option<ServerCounts>; 2],
    /// The last update that arrived, taken or not.
    received: Option<Position>,
    since: Instant,
    /// The time of the control plane's last message.
    heard: Instant,
    next_ping: Instant,
    /// Longest time between two messages to the control plane; `None` = it does not ask for beats.
    beat: Option<Duration>,
    /// The time of the last message to the control plane.
    sent: Instant,
    /// The last ping, until it is answered.
    asked: Option<(u64, Instant)>,
    due: Due,
    report_pacing: ReportPacing,
}

/// The messages to send as soon as there is room: the latest of each kind.
#[derive(Debug, Default)]
struct Due {
    pong: Option<u64>,
    inspection: Option<pb::Inspection>,
    ranges: Option<pb::Ranges>,
    renewal: bool,
    ping: bool,
    beat: bool,
    report: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepOutcome {
    Nothing,
    /// The engine took a complete update.
    UpdateTaken,
    /// The control plane said how long ago its source was last in touch with its origin.
    UpstreamAge(Duration),
}

#[allow(
    clippy::large_enum_variant,
    reason = "there is one at a time, and the largest are taken apart at once"
)]
enum Event {
    Heard(Option<Result<pb::ServerMessage, Status>>),
    Taken(Option<UpdateResult>),
    Answered(Result<pb::Inspection, Stopped>),
    Compared(Result<Option<RangeDigests>, Stopped>),
    Prestop,
    PingDue,
    BeatDue,
    ReportDue,
    Silent,
    Reported(Result<(), watch::error::RecvError>),
    Room(Result<mpsc::OwnedPermit<pb::AgentMessage>, mpsc::error::SendError<()>>),
}

impl Live {
    /// Begins with a stream on which the agent is welcome; `beat_ms` is the control plane's wish.
    pub(super) fn new(
        link: Link,
        collector: Collector,
        reports: watch::Receiver<Report>,
        beat_ms: u32,
    ) -> Self {
        let beat = Duration::from_millis(beat_ms.into());
        let beat = Some(beat.max(MIN_BEAT)).filter(|_| beat_ms > 0);
        let now = Instant::now();
        Self {
            link,
            epoch: collector.epoch(),
            reports,
            collector,
            waiting: Waiting::default(),
            question: None,
            comparison: None,
            prestop: Prestop::default(),
            servers_reported: Default::default(),
            received: None,
            since: now,
            heard: now,
            next_ping: now,
            beat,
            sent: now,
            asked: None,
            // A new connection starts with a report.
            due: Due {
                report: true,
                ..Due::default()
            },
            report_pacing: ReportPacing::default(),
        }
    }

    /// Returns how long the stream has been open.
    pub(super) fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// Waits for one event and handles it.
    pub(super) async fn step(&mut self, shared: &mut LastingState) -> Result<StepOutcome, Lost> {
        match self.event(shared).await {
            Event::Heard(Some(Ok(message))) => {
                self.heard = Instant::now();
                return self.message(message, shared);
            }
            Event::Heard(Some(Err(status))) => return Err(Lost::Broken(Box::new(status))),
            Event::Heard(None) | Event::Room(Err(_)) => return Err(Lost::Closed),
            // The stream may be read again.
            Event::Taken(None) => {}
            Event::Taken(Some(taken)) => {
                // The agent may not have read the stream meanwhile, so the silence was not the control
                // plane's.
                self.heard = Instant::now();
                taken??;
                return Ok(StepOutcome::UpdateTaken);
            }
            Event::Answered(reported) => {
                self.question = None;
                self.due.inspection = Some(reported?);
            }
            Event::Compared(digests) => {
                self.comparison = None;
                let digests = digests?.map_or_else(Vec::new, |digests| digests.to_bytes());
                self.due.ranges = Some(pb::Ranges { digests });
            }
            Event::Prestop => {}
            Event::PingDue => {
                self.next_ping = Instant::now() + PING_INTERVAL;
                self.due.ping = true;
                self.due.renewal |= self.link.token.as_ref().is_some_and(Presented::is_stale);
                // A change of the servers wakes no receiver: see `Report::servers`.
                self.due.report |= self.reports.borrow().servers != self.servers_reported;
                let over = |notice: &mut Notice| notice.until <= self.next_ping;
                self.due.report |= shared.notice.take_if(over).is_some();
            }
            Event::Silent => return Err(Lost::Silent(SILENCE)),
            Event::Reported(Ok(())) => {
                self.due.report |= self.report_pacing.observe(&self.reports.borrow_and_update());
            }
            Event::BeatDue => self.due.beat = true,
            Event::ReportDue => self.due.report = true,
            Event::Reported(Err(_)) => return Err(Stopped.into()),
            Event::Room(Ok(permit)) => self.send(permit, shared),
        }
        Ok(StepOutcome::Nothing)
    }

    async fn event(&mut self, shared: &mut LastingState) -> Event {
        let Self {
            link,
            waiting,
            question,
            comparison,
            reports,
            due,
            prestop,
            ..
        } = self;
        let (engine, questions) = (&shared.engine, &mut shared.prestop);
        let reads = waiting.has_room();
        let answered = async {
            match question {
                Some(answer) => answer.await,
                None => std::future::pending().await,
            }
        };
        let compared = async {
            match comparison {
                Some(comparison) => comparison.await,
                None => std::future::pending().await,
            }
        };
        let report_at = self.report_pacing.due();
        let report_due = async {
            match report_at {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let beat_at = self.beat.map(|beat| self.sent + beat);
        let beat_due = async {
            match beat_at {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let outbox = link.outbox.clone();
        // The control plane's messages come after everything that is bounded by itself, so that no flood of them delays
        // a report. They come before the silence, which does not count if this process was stopped meanwhile.
        tokio::select! {
            biased;
            taken = waiting.next(engine) => Event::Taken(taken),
            reported = answered => Event::Answered(reported),
            digests = compared => Event::Compared(digests),
            changed = reports.changed() => Event::Reported(changed),
            permit = outbox.reserve_owned(), if due.any() || prestop.is_due() => Event::Room(permit),
            () = sleep_until(self.next_ping) => Event::PingDue,
            () = beat_due, if !due.any() => Event::BeatDue,
            () = report_due, if !due.report => Event::ReportDue,
            () = prestop.next(questions) => Event::Prestop,
            message = link.inbox.next(), if reads => Event::Heard(message),
            () = sleep_until(self.heard + SILENCE), if reads => Event::Silent,
        }
    }

    fn message(
        &mut self,
        message: pb::ServerMessage,
        shared: &mut LastingState,
    ) -> Result<StepOutcome, Lost> {
        match message.kind {
            Some(server_message::Kind::Update(piece)) => {
                if let Some(update) = self.collector.push(piece)? {
                    self.hand_over(update);
                }
            }
            Some(server_message::Kind::Ping(ping)) => self.due.pong = Some(ping.token),
            Some(server_message::Kind::Pong(pong)) => {
                if let Some((token, at)) = self.asked
                    && token == pong.token
                {
                    shared.round_trip = at.elapsed();
                    self.asked = None;
                }
            }
            Some(server_message::Kind::Inspect(inspect)) => self.ask(&inspect, shared),
            Some(server_message::Kind::Compare(compare)) => self.compare(compare, shared)?,
            Some(server_message::Kind::Left(left)) => self.prestop.answered(left),
            Some(server_message::Kind::Heartbeat(heartbeat)) => {
                return self.heartbeat(heartbeat, shared);
            }
            Some(server_message::Kind::ComeBackLater(mut later)) => {
                shared.named = std::mem::take(&mut later.replicas);
                return Err(later.into());
            }
            Some(server_message::Kind::Welcome(_)) => {
                return Err(Lost::Protocol("a second Welcome".to_owned()));
            }
            None => shared.unknown_messages += 1,
        }
        Ok(StepOutcome::Nothing)
    }

    fn heartbeat(
        &mut self,
        mut heartbeat: pb::Heartbeat,
        shared: &mut LastingState,
    ) -> Result<StepOutcome, Lost> {
        shared.named = std::mem::take(&mut heartbeat.replicas);
        let age = Duration::from_millis(heartbeat.upstream_age_ms);
        tracing::trace!(revision = heartbeat.revision, ?age, "heartbeat");
        self.report_pacing.spread_over(heartbeat.report_within_ms);
        self.collector.hear(&heartbeat.freshness);
        if let Some(lag) = lag(&self.collector, &self.reports.borrow()) {
            let in_touch = age < CUT_OFF;
            return Err(Lost::Behind { lag, in_touch });
        }
        let frozen = heartbeat.frozen.map(Frozen::from);
        if frozen != shared.frozen {
            tell(frozen.as_ref());
            shared.frozen = frozen;
            self.due.report = true;
        }
        // A frozen node may lack newer updates.
        if self.received.is_some() && self.waiting.is_empty() && shared.frozen.is_none() {
            shared.engine.confirmation().set(now_ms());
        }
        Ok(StepOutcome::UpstreamAge(age))
    }

    /// Hands a complete update to the engine, and reports that it arrived.
    fn hand_over(&mut self, update: Update) {
        self.received = Some(update.position);
        self.due.report |= self.report_pacing.progress();
        self.waiting.push(update);
    }

    /// Hands a question to the engine. A new question replaces an unanswered one.
    fn ask(&mut self, inspect: &pb::Inspect, shared: &LastingState) {
        let engine = shared.engine.clone();
        let (peer_probe, connections) = (self.link.peer_probe.clone(), shared.connections.clone());
        let answer = answers::answer(engine, peer_probe, connections, inspect.clone());
        self.question = Some(Box::pin(answer));
    }

    /// Asks the engine for the digests of ranges.
    fn compare(&mut self, compare: pb::Compare, shared: &LastingState) -> Result<(), Lost> {
        let count = Some(compare.ranges).filter(|count| is_number_of_ranges(*count));
        let count = count.and_then(|count| u16::try_from(count).ok());
        let count = count
            .ok_or_else(|| Lost::Protocol(format!("a comparison of {} ranges", compare.ranges)))?;
        let engine = shared.engine.clone();
        self.comparison = Some(Box::pin(async move { engine.ranges(count).await }));
        Ok(())
    }

    fn send(&mut self, permit: mpsc::OwnedPermit<pb::AgentMessage>, shared: &mut LastingState) {
        let kind = if let Some(token) = self.due.pong.take() {
            agent_message::Kind::Pong(pb::Pong { token })
        } else if let Some(inspection) = self.due.inspection.take() {
            agent_message::Kind::Inspection(inspection)
        } else if let Some(leaving) = self.prestop.take() {
            agent_message::Kind::Leaving(leaving)
        } else if let Some(ranges) = self.due.ranges.take() {
            agent_message::Kind::Ranges(ranges)
        } else if let Some(token) = self.renewal() {
            agent_message::Kind::Renewal(token)
        } else if std::mem::take(&mut self.due.ping) {
            let token = rand::random();
            self.asked = Some((token, Instant::now()));
            agent_message::Kind::Ping(pb::Ping { token })
        } else if !self.due.report {
            agent_message::Kind::Beat(pb::Beat {})
        } else {
            self.due.report = false;
            agent_message::Kind::Report(self.report(shared))
        };
        // Any message is as good as a beat.
        (self.due.beat, self.sent) = (false, Instant::now());
        permit.send(pb::AgentMessage { kind: Some(kind) });
    }

    /// Takes the newer token if it is due.
    fn renewal(&mut self) -> Option<pb::Renewal> {
        let is_due = std::mem::take(&mut self.due.renewal);
        let presented = self.link.token.as_mut().filter(|_| is_due)?;
        let token = presented.renew().as_str().to_owned();
        tracing::debug!("sending the renewed token");
        Some(pb::Renewal { token })
    }

    /// Returns the engine's latest report, with the fields that only the stream knows.
    fn report(&mut self, shared: &mut LastingState) -> pb::Report {
        let mut report = {
            let latest = self.reports.borrow_and_update();
            let mut report = latest.to_wire();
            report.steps = self.report_pacing.send(&latest);
            self.servers_reported.clone_from(&latest.servers);
            report.triggers_programmed =
                latest.triggers_after(self.epoch, shared.triggers_reported);
            let newest = latest.triggers.back().map_or(0, |newest| newest.number);
            shared.triggers_reported = newest;
            report
        };
        if let Some(received) = self.received {
            if report.epoch != received.epoch {
                // The engine is still in another epoch, so nothing of this one is in the kernel.
                report.epoch = received.epoch;
                report.applied_revision = 0;
                report.verified_revision = 0;
                report.received_revision = 0;
            }
            report.received_revision = report.received_revision.max(received.revision);
        }
        let notice = shared.notice.as_ref().map(|notice| pb::ObjectFailure {
            key: None,
            reason: notice.text.clone(),
            since_ms: notice.since_ms,
            degraded: true,
            policies: false,
        });
        report.failures.extend(notice);
        report.frozen = shared.frozen.is_some();
        report.unknown_kinds += shared.unknown_messages;
        report.round_trip_us = micros(shared.round_trip);
        report.now_ms = now_ms();
        report
    }
}

fn tell(frozen: Option<&Frozen>) {
    match frozen {
        Some(order) => tracing::warn!(
            since = time(order.since_ms),
            by = order.by,
            reason = order.reason,
            "an operator froze this node: it keeps the Services that it serves, and takes no newer ones until \
             `kpctl thaw`"
        ),
        None => tracing::info!("this node is not frozen any more"),
    }
}

/// Returns how far the stream is behind the state that the report says the node holds; `None` if it is not behind.
pub(super) fn lag(collector: &Collector, report: &Report) -> Option<Lag> {
    collector.lag(&report.cluster, &report.freshness)
}

impl Due {
    fn any(&self) -> bool {
        let answers = self.pong.is_some() || self.inspection.is_some() || self.ranges.is_some();
        answers || self.renewal || self.ping || self.beat || self.report
    }
}

impl fmt::Debug for Live {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Live").field("epoch", &self.epoch).finish_non_exhaustive()
    }
}
