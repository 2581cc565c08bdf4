//! An open stream.
//!
//! One step handles one event. While too much waits for the engine, the agent does not read the
//! stream. It still sends pings and reports, so that the control plane knows that the agent is
//! alive.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{BoxFuture, OptionFuture};
use kplane_model::{RangeDigests, is_number_of_ranges};
use kplane_proto::v1 as pb;
use kplane_proto::v1::agent_message::Kind;
use kplane_proto::v1::server_message;
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
    since: Instant,
    intake: Intake,
    pending: Pending,
    /// Questions about Pods that wait to end.
    prestop: Prestop,
    reporting: Reporting,
    alive: Keepalive,
    /// The messages to send as soon as there is room: the latest of each kind, if it is known already.
    due: BTreeMap<Outgoing, Option<Kind>>,
}

/// The messages of a stream, in the order in which they are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outgoing {
    Pong,
    /// The answer to an urgent question.
    UrgentInspection,
    Inspection,
    Leaving,
    Ranges,
    Renewal,
    Ping,
    Report,
    Beat,
}

/// Updates on their way to the engine.
struct Intake {
    collector: Collector,
    waiting: Waiting,
    /// The last update that arrived, taken or not.
    received: Option<Position>,
}

/// The control plane's questions that the engine has not answered.
#[derive(Default)]
struct Pending {
    /// The last urgent question.
    urgent: Option<PendingInspection>,
    /// The last other question.
    inspection: Option<PendingInspection>,
    /// The question about ranges.
    comparison: Option<Comparison>,
}

impl Pending {
    /// Returns the question whose answer is this message.
    fn of(&mut self, answer: Outgoing) -> &mut Option<PendingInspection> {
        match answer {
            Outgoing::UrgentInspection => &mut self.urgent,
            _ => &mut self.inspection,
        }
    }
}

/// What the control plane learns of the engine.
struct Reporting {
    reports: watch::Receiver<Report>,
    report_pacing: ReportPacing,
    /// The counts of real servers that the control plane last received.
    servers_reported: [Option<ServerCounts>; 2],
}

/// The signs of life of both sides.
struct Keepalive {
    /// The time of the control plane's last message.
    heard: Instant,
    next_ping: Instant,
    /// The last ping, until it is answered.
    asked: Option<(u64, Instant)>,
    /// Longest time between two messages to the control plane; `None` = it does not ask for beats.
    beat: Option<Duration>,
    /// The time of the last message to the control plane.
    sent: Instant,
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
    Answered(Outgoing, Result<pb::Inspection, Stopped>),
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
        let now = Instant::now();
        Self {
            link,
            since: now,
            intake: Intake {
                collector,
                waiting: Waiting::default(),
                received: None,
            },
            pending: Pending::default(),
            prestop: Prestop::default(),
            reporting: Reporting {
                reports,
                report_pacing: ReportPacing::default(),
                servers_reported: Default::default(),
            },
            alive: Keepalive {
                heard: now,
                next_ping: now,
                asked: None,
                beat: (beat_ms > 0).then(|| beat.max(MIN_BEAT)),
                sent: now,
            },
            // A new connection starts with a report.
            due: BTreeMap::from([(Outgoing::Report, None)]),
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
                self.alive.heard = Instant::now();
                return self.message(message, shared);
            }
            Event::Heard(Some(Err(status))) => return Err(Lost::Broken(Box::new(status))),
            Event::Heard(None) | Event::Room(Err(_)) => return Err(Lost::Closed),
            // The stream may be read again.
            Event::Taken(None) => {}
            Event::Taken(Some(taken)) => {
                // The agent may not have read the stream meanwhile, so the silence was not the control
                // plane's.
                self.alive.heard = Instant::now();
                taken??;
                return Ok(StepOutcome::UpdateTaken);
            }
            Event::Answered(which, reported) => {
                *self.pending.of(which) = None;
                self.due.insert(which, Some(Kind::Inspection(reported?)));
            }
            Event::Compared(digests) => {
                self.pending.comparison = None;
                let digests = digests?.map_or_else(Vec::new, |digests| digests.to_bytes());
                self.due.insert(Outgoing::Ranges, Some(Kind::Ranges(pb::Ranges { digests })));
            }
            Event::Prestop => {
                self.due.remove(&Outgoing::Leaving);
                self.send_if(self.prestop.is_due(), Outgoing::Leaving);
            }
            Event::PingDue => {
                self.alive.next_ping = Instant::now() + PING_INTERVAL;
                self.send_if(true, Outgoing::Ping);
                let is_stale = self.link.token.as_ref().is_some_and(Presented::is_stale);
                self.send_if(is_stale, Outgoing::Renewal);
                // A change of the servers wakes no receiver: see `Report::servers`.
                let servers =
                    self.reporting.reports.borrow().servers != self.reporting.servers_reported;
                let over = |notice: &mut Notice| notice.until <= self.alive.next_ping;
                let is_over = shared.notice.take_if(over).is_some();
                self.send_if(servers || is_over, Outgoing::Report);
            }
            Event::Silent => return Err(Lost::Silent(SILENCE)),
            Event::Reported(Ok(())) => {
                let of = &mut self.reporting;
                let is_urgent = of.report_pacing.observe(&of.reports.borrow_and_update());
                self.send_if(is_urgent, Outgoing::Report);
            }
            Event::BeatDue => self.send_if(true, Outgoing::Beat),
            Event::ReportDue => self.send_if(true, Outgoing::Report),
            Event::Reported(Err(_)) => return Err(Stopped.into()),
            Event::Room(Ok(permit)) => self.send(permit, shared),
        }
        Ok(StepOutcome::Nothing)
    }

    async fn event(&mut self, shared: &mut LastingState) -> Event {
        let Self {
            link,
            intake,
            pending,
            prestop,
            reporting,
            alive,
            due,
            ..
        } = self;
        let (engine, questions) = (&shared.engine, &mut shared.prestop);
        let reads = intake.waiting.has_room();
        let urgent = OptionFuture::from(pending.urgent.as_mut());
        let answered = OptionFuture::from(pending.inspection.as_mut());
        let compared = OptionFuture::from(pending.comparison.as_mut());
        let report_due = OptionFuture::from(reporting.report_pacing.due().map(sleep_until));
        let beat_due = alive.beat.map(|beat| sleep_until(alive.sent + beat));
        let beat_due = OptionFuture::from(beat_due);
        let outbox = link.outbox.clone();
        // The control plane's messages come after everything that is bounded by itself, so that no flood of them delays
        // a report. They come before the silence, which does not count if this process was stopped meanwhile.
        tokio::select! {
            biased;
            taken = intake.waiting.next(engine) => Event::Taken(taken),
            Some(reported) = urgent => Event::Answered(Outgoing::UrgentInspection, reported),
            Some(reported) = answered => Event::Answered(Outgoing::Inspection, reported),
            Some(digests) = compared => Event::Compared(digests),
            changed = reporting.reports.changed() => Event::Reported(changed),
            permit = outbox.reserve_owned(), if !due.is_empty() => Event::Room(permit),
            () = sleep_until(alive.next_ping) => Event::PingDue,
            Some(()) = beat_due, if due.is_empty() => Event::BeatDue,
            Some(()) = report_due, if !due.contains_key(&Outgoing::Report) => Event::ReportDue,
            () = prestop.next(questions) => Event::Prestop,
            message = link.inbox.next(), if reads => Event::Heard(message),
            () = sleep_until(alive.heard + SILENCE), if reads => Event::Silent,
        }
    }

    fn message(
        &mut self,
        message: pb::ServerMessage,
        shared: &mut LastingState,
    ) -> Result<StepOutcome, Lost> {
        match message.kind {
            Some(server_message::Kind::Update(piece)) => {
                if let Some(update) = self.intake.collector.push(piece)? {
                    self.hand_over(update);
                }
            }
            Some(server_message::Kind::Ping(pb::Ping { token })) => {
                let pong = Kind::Pong(pb::Pong { token });
                self.due.insert(Outgoing::Pong, Some(pong));
            }
            Some(server_message::Kind::Pong(pong)) => {
                let is_last = |(token, _): &mut (u64, Instant)| *token == pong.token;
                if let Some((_, at)) = self.alive.asked.take_if(is_last) {
                    shared.round_trip = at.elapsed();
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
        let report_pacing = &mut self.reporting.report_pacing;
        report_pacing.spread_over(heartbeat.report_within_ms);
        self.intake.collector.hear(&heartbeat.freshness);
        if let Some(lag) = lag(&self.intake.collector, &self.reporting.reports.borrow()) {
            let in_touch = age < CUT_OFF;
            return Err(Lost::Behind { lag, in_touch });
        }
        let frozen = heartbeat.frozen.map(Frozen::from);
        if frozen != shared.frozen {
            tell(frozen.as_ref());
            shared.frozen = frozen;
            self.send_if(true, Outgoing::Report);
        }
        // A frozen node may lack newer updates.
        let intake = &self.intake;
        if intake.received.is_some() && intake.waiting.is_empty() && shared.frozen.is_none() {
            shared.engine.confirmation().set(now_ms());
        }
        Ok(StepOutcome::UpstreamAge(age))
    }

    /// Hands a complete update to the engine, and reports that it arrived.
    fn hand_over(&mut self, update: Update) {
        self.intake.received = Some(update.position);
        let is_urgent = self.reporting.report_pacing.progress();
        self.send_if(is_urgent, Outgoing::Report);
        self.intake.waiting.push(update);
    }

    /// Hands a question to the engine. A new question replaces an unanswered one, but an urgent one no other.
    fn ask(&mut self, inspect: &pb::Inspect, shared: &LastingState) {
        let engine = shared.engine.clone();
        let (peer_probe, connections) = (self.link.peer_probe.clone(), shared.connections.clone());
        let answer = answers::answer(engine, peer_probe, connections, inspect.clone());
        let which = if inspect.urgent { Outgoing::UrgentInspection } else { Outgoing::Inspection };
        *self.pending.of(which) = Some(Box::pin(answer));
    }

    /// Asks the engine for the digests of ranges.
    fn compare(&mut self, compare: pb::Compare, shared: &LastingState) -> Result<(), Lost> {
        let count = Some(compare.ranges).filter(|count| is_number_of_ranges(*count));
        let count = count
            .and_then(|count| u16::try_from(count).ok())
            .ok_or_else(|| Lost::Protocol(format!("a comparison of {} ranges", compare.ranges)))?;
        let engine = shared.engine.clone();
        self.pending.comparison = Some(Box::pin(async move { engine.ranges(count).await }));
        Ok(())
    }

    /// Adds a message to those to send if it is due.
    fn send_if(&mut self, is_due: bool, message: Outgoing) {
        if is_due {
            self.due.entry(message).or_default();
        }
    }

    fn send(&mut self, permit: mpsc::OwnedPermit<pb::AgentMessage>, shared: &mut LastingState) {
        let kind = match self.due.pop_first() {
            Some((_, Some(known))) => Some(known),
            Some((Outgoing::Leaving, None)) => self.leaving(),
            Some((Outgoing::Renewal, None)) => self.renewal(),
            Some((Outgoing::Ping, None)) => Some(self.ping()),
            Some((Outgoing::Report, None)) => Some(Kind::Report(self.report(shared))),
            _ => None,
        };
        let kind = kind.unwrap_or(Kind::Beat(pb::Beat {}));
        // Any message is as good as a beat.
        self.due.remove(&Outgoing::Beat);
        self.alive.sent = Instant::now();
        permit.send(pb::AgentMessage { kind: Some(kind) });
    }

    /// Takes the next question about a Pod.
    fn leaving(&mut self) -> Option<Kind> {
        let leaving = self.prestop.take();
        self.send_if(self.prestop.is_due(), Outgoing::Leaving);
        leaving.map(Kind::Leaving)
    }

    /// Takes the newer token.
    fn renewal(&mut self) -> Option<Kind> {
        let token = self.link.token.as_mut()?.renew().as_str().to_owned();
        tracing::debug!("sending the renewed token");
        Some(Kind::Renewal(pb::Renewal { token }))
    }

    fn ping(&mut self) -> Kind {
        let token = rand::random();
        self.alive.asked = Some((token, Instant::now()));
        Kind::Ping(pb::Ping { token })
    }

    /// Returns the engine's latest report, with the fields that only the stream knows.
    fn report(&mut self, shared: &mut LastingState) -> pb::Report {
        let mut report = {
            let latest = self.reporting.reports.borrow_and_update();
            let mut report = latest.to_wire();
            report.steps = self.reporting.report_pacing.send(&latest);
            self.reporting.servers_reported.clone_from(&latest.servers);
            let epoch = self.intake.collector.epoch();
            report.triggers_programmed = latest.triggers_after(epoch, shared.triggers_reported);
            let newest = latest.triggers.back().map_or(0, |newest| newest.number);
            shared.triggers_reported = newest;
            report
        };
        if let Some(received) = self.intake.received {
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

impl fmt::Debug for Live {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Live")
            .field("epoch", &self.intake.collector.epoch())
            .finish_non_exhaustive()
    }
}
