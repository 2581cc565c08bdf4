//! What the agent says of itself: published by the engine after every step, read by the stream to
//! the control plane and by the health checks. The latest report replaces the one before it.

pub(crate) mod servers;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kplane_model::{DesiredKey, Family, NodeFacts, ServiceKey};
use kplane_proto::v1 as pb;
use prost::Message as _;

use crate::desired::{Counts, Held, Position, Reject, Resume};
use kplane_dataplane::backend::{RuleCounts, ServerCounts};
use kplane_dataplane::conntrack::ConntrackTotals;

/// Failures that a report names at most.
const MAX_FAILURES: usize = 400;

/// Bytes of a report on the wire, whatever the length of names: the control plane ends a stream whose
/// messages are too large. What only the stream knows needs less than the rest.
const REPORT_BYTES: usize = kplane_proto::MAX_MESSAGE_BYTES - (32 << 10);

/// Bytes that the sentence about failures without a place takes, and more.
const OMISSION_BYTES: usize = 256;

/// Longest reason that is sent, in bytes.
const MAX_REASON_BYTES: usize = 300;

/// A look at the kernel that finds nothing new is told of when the last one that was is older than this.
const VERIFIED_NEWS_MS: u64 = 60_000;

/// The latest state of the engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// What a reconnect may go on from.
    pub resume: Option<Resume>,
    /// The last update taken; `None` before the first complete snapshot.
    pub held: Option<Position>,
    /// The kernel holds this position, except for `failures`. Never more than it holds.
    pub applied: Option<Position>,
    /// The kernel was read back and compared at this position.
    pub verified: Option<Position>,
    /// Objects that are not in the kernel as desired.
    pub failures: Vec<Failure>,
    /// The last attempt to apply.
    pub last_sync: Option<Sync>,
    /// Totals of both families, what is kept included.
    pub counts: Counts,
    /// What is served although the control plane does not say it (any more).
    pub keeps: Option<Held>,
    /// The control plane says that its picture may lack something.
    pub partial: bool,
    /// Each family, IPv4 first.
    pub families: [FamilyReport; 2],
    /// Objects of kinds that this version does not know, since the start.
    pub unknown_kinds: u64,
    /// Attempts in which no family failed, since the start.
    pub syncs_ok: u64,
    /// Attempts in which a family failed, since the start.
    pub syncs_failed: u64,
    /// Virtual and real servers of each family, in backends that have some. Connections come and go
    /// all the time, so nobody is woken for these alone.
    pub servers: [Option<ServerCounts>; 2],
    /// What the control plane knows of the node; `None` before the first complete snapshot.
    pub node: Option<NodeState>,
    /// Stale conntrack entries that were deleted, IPv4 first. Kept up to date in the latest report
    /// without waking anybody for it.
    pub conntrack: [ConntrackTotals; 2],
    /// The latest changes in the cluster that the kernel holds, oldest first.
    pub triggers: Arc<VecDeque<TriggerProgrammed>>,
}

/// What a change in the cluster led to is in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TriggerProgrammed {
    /// Counts up from 1 since the start of the agent.
    pub number: u64,
    /// The epoch in which `id` means something.
    pub epoch: u64,
    /// The control plane's name for it.
    pub id: u64,
    /// From the change until the kernel's acknowledgement, milliseconds by two clocks.
    pub latency_ms: u64,
}

/// What matters of the node for its health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeState {
    /// There is a Node object.
    pub known: bool,
    /// It is neither being deleted nor drained by an autoscaler.
    pub eligible: bool,
}

impl From<&NodeFacts> for NodeState {
    fn from(node: &NodeFacts) -> Self {
        Self {
            known: node.known,
            eligible: node.eligible,
        }
    }
}

/// Why one object is not in the kernel as desired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The object; `None` for the node as a whole, or when its name cannot be told.
    pub object: Option<DesiredKey>,
    /// What is wrong, for people.
    pub reason: String,
    /// Since when, milliseconds since 1970.
    pub since_ms: u64,
    /// It is served, but not in every respect.
    pub degraded: bool,
}

impl Failure {
    /// An object that makes no sense.
    #[must_use]
    pub fn rejected(object: Option<&DesiredKey>, reject: &Reject) -> Self {
        let reason = match object {
            Some(_) => reject.reason.clone(),
            None => format!("an object without a readable name: {}", reject.reason),
        };
        Self {
            object: object.cloned(),
            reason,
            since_ms: reject.since_ms,
            degraded: false,
        }
    }
}

/// How one update, or a retry, went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sync {
    /// Revision that was applied.
    pub revision: u64,
    /// When it was finished, milliseconds since 1970.
    pub finished_at_ms: u64,
    /// From the arrival of its last piece until the kernel's acknowledgement.
    pub total: Duration,
    /// Planning and comparing.
    pub plan: Duration,
    /// Encoding.
    pub encode: Duration,
    /// The kernel.
    pub kernel: Duration,
    /// Operations that the kernel was sent.
    pub operations: u64,
    /// Bytes that the kernel was sent.
    pub bytes: u64,
    /// From the change in the control plane until the acknowledgement, milliseconds by two
    /// clocks; 0 when not known.
    pub end_to_end_ms: u64,
}

/// One address family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FamilyReport {
    /// The kernel holds everything that is desired of this family.
    pub programmed: bool,
    /// The node needs it, or it works: `Report::applied` waits for it. A kernel without IPv6 is no
    /// problem while no Service has IPv6 addresses.
    pub needed: bool,
    /// It held a complete state once since the start.
    pub ever_programmed: bool,
    /// When it was last known to hold what was desired, milliseconds since 1970; 0 = never.
    pub programmed_at_ms: u64,
    /// When the oldest update came that it does not hold; `None` when it holds everything (G2).
    pub behind_since: Option<Instant>,
    /// What is wrong.
    pub error: Option<Standing>,
    /// Rules there are, in backends whose rules grow with the number of Services.
    pub rules: Option<RuleCounts>,
    /// When the kernel was last compared with what it should hold and was equal, milliseconds since 1970; 0 =
    /// never.
    pub verified_at_ms: u64,
    /// What others changed and was put right.
    pub repairs: Repairs,
}

/// What others changed and was put right, since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repairs {
    /// How often.
    pub count: u64,
    /// When last, milliseconds since 1970; 0 = never.
    pub last_ms: u64,
    /// What it was then, and as far as the kernel tells by whom, for people.
    pub last: String,
}

impl Repairs {
    pub(crate) fn add(&mut self, what: String, now_ms: u64) {
        self.count += 1;
        self.last_ms = now_ms;
        self.last = what;
    }
}

/// An error that lasts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// What is wrong, for people.
    pub reason: String,
    /// Since when, milliseconds since 1970.
    pub since_ms: u64,
    /// Since when, by a clock that nobody sets.
    pub since: Instant,
}

impl Report {
    /// Takes the place of an older one; returns whether it says anything that the other did not,
    /// [`Report::servers`] aside, and a look at the kernel soon after another that found the same.
    pub(crate) fn replace(mut self, before: &mut Self) -> bool {
        let servers = std::mem::take(&mut self.servers);
        before.servers = Default::default();
        let (verified, told) = (self.swap_verified([0, 0]), before.swap_verified([0, 0]));
        let old =
            |(now, told): (&u64, &u64)| *told == 0 || now.saturating_sub(*told) >= VERIFIED_NEWS_MS;
        let looked = verified != told && verified.iter().zip(&told).any(old);
        let news = looked || self != *before;
        self.swap_verified(if news { verified } else { told });
        *before = Self { servers, ..self };
        news
    }

    /// Puts times in the place of [`FamilyReport::verified_at_ms`], and returns these.
    fn swap_verified(&mut self, times: [u64; 2]) -> [u64; 2] {
        let [v4, v6] = &mut self.families;
        let [at_v4, at_v6] = times;
        [
            std::mem::replace(&mut v4.verified_at_ms, at_v4),
            std::mem::replace(&mut v6.verified_at_ms, at_v6),
        ]
    }

    /// The report on the wire, without what only the stream knows.
    #[must_use]
    pub fn to_wire(&self) -> pb::Report {
        let epoch = self.held.map_or(0, |held| held.epoch);
        // Positions of another epoch say nothing in this one.
        let revision = |position: Option<Position>| {
            let here = position.filter(|position| position.epoch == epoch);
            here.map_or(0, |position| position.revision)
        };
        let families = Family::ALL.into_iter().zip(&self.families);
        let families = families.zip(&self.servers);
        let mut report = pb::Report {
            epoch,
            received_revision: revision(self.held),
            applied_revision: revision(self.applied),
            verified_revision: revision(self.verified),
            failures: Vec::new(),
            last_sync: self.last_sync.as_ref().map(Sync::to_wire),
            objects: Some(pb::ObjectCounts {
                services: self.counts.services,
                endpoints: self.counts.endpoints,
            }),
            families: families
                .map(|((family, report), servers)| report.to_wire(family, servers.as_ref()))
                .collect(),
            unknown_kinds: self.unknown_kinds,
            round_trip_us: 0,
            syncs_ok: self.syncs_ok,
            syncs_failed: self.syncs_failed,
            triggers_programmed: Vec::new(),
            held: self.keeps.as_ref().map(held_to_wire),
        };
        let room = REPORT_BYTES.saturating_sub(report.encoded_len());
        report.failures = failures_to_wire(&self.failures, room);
        report
    }

    /// What a control plane of this epoch has not been told yet, if it was told everything up to
    /// number `told`.
    pub(crate) fn triggers_after(&self, epoch: u64, told: u64) -> Vec<pb::TriggerProgrammed> {
        let new = self.triggers.iter().filter(|one| one.number > told);
        new.filter(|one| one.epoch == epoch)
            .map(|one| pb::TriggerProgrammed {
                id: one.id,
                latency_ms: one.latency_ms,
            })
            .collect()
    }
}

impl Sync {
    fn to_wire(&self) -> pb::SyncStats {
        pb::SyncStats {
            revision: self.revision,
            finished_at_ms: self.finished_at_ms,
            total_us: micros(self.total),
            plan_us: micros(self.plan),
            encode_us: micros(self.encode),
            kernel_us: micros(self.kernel),
            operations: self.operations,
            bytes: self.bytes,
            end_to_end_ms: self.end_to_end_ms,
        }
    }
}

impl FamilyReport {
    fn to_wire(&self, family: Family, servers: Option<&ServerCounts>) -> pb::FamilyStatus {
        pb::FamilyStatus {
            family: pb::Family::from(family).into(),
            programmed: self.programmed,
            error: self
                .error
                .as_ref()
                .map_or("", |e| clip(&e.reason))
                .to_owned(),
            error_since_ms: self.error.as_ref().map_or(0, |error| error.since_ms),
            rules: self.rules.map(|counts| pb::RuleStats {
                rules: counts.total.iter().sum(),
                lookups: counts.lookups.now,
                lookups_in_one_list: counts.lookups.list,
            }),
            servers: servers.map(servers::counts),
            verified_at_ms: self.verified_at_ms,
            repairs: self.repairs.count,
            last_repair_ms: self.repairs.last_ms,
            last_repair: clip(&self.repairs.last).to_owned(),
            verification_overdue: false,
        }
    }
}

fn held_to_wire(held: &Held) -> pb::Held {
    pb::Held {
        services: held.services as u64,
        without_endpoints: held.without_endpoints as u64,
        reason: clip(&held.reason).to_owned(),
        since_ms: held.since_ms,
        examples: held.examples.clone(),
    }
}

/// As many failures as fit into `room` bytes, and how many there are besides.
fn failures_to_wire(failures: &[Failure], room: usize) -> Vec<pb::ObjectFailure> {
    let mut room = room.saturating_sub(OMISSION_BYTES);
    let mut wire = Vec::new();
    for failure in failures.iter().take(MAX_FAILURES) {
        let failure = failure_to_wire(failure);
        // With its tag and length in the report.
        let bytes = failure.encoded_len() + 4;
        if bytes > room {
            break;
        }
        room -= bytes;
        wire.push(failure);
    }
    if let Some(first) = failures.get(wire.len()) {
        let more = failures.len() - wire.len();
        wire.push(pb::ObjectFailure {
            key: None,
            reason: format!("{more} further objects are not applied and not listed"),
            since_ms: first.since_ms,
            degraded: false,
        });
    }
    wire
}

fn failure_to_wire(failure: &Failure) -> pb::ObjectFailure {
    let reason = clip(&failure.reason);
    let (key, reason) = match &failure.object {
        Some(DesiredKey::Service(key)) => (Some(key), reason.to_owned()),
        Some(DesiredKey::Local(key)) => (Some(key), format!("endpoints on the node: {reason}")),
        Some(DesiredKey::Node) => (None, format!("facts of the node: {reason}")),
        None => (None, reason.to_owned()),
    };
    pb::ObjectFailure {
        key: key.map(|key: &ServiceKey| key.into()),
        reason,
        since_ms: failure.since_ms,
        degraded: failure.degraded,
    }
}

/// The first [`MAX_REASON_BYTES`] of a text.
fn clip(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_REASON_BYTES)]
}

/// Microseconds, as the wire has them.
#[must_use]
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
