//! The report of the agent's state. The engine publishes a report after every step. The stream to the control
//! plane and the health checks read it. The latest report replaces the previous one.

pub(crate) mod affinity;
pub(crate) mod connected;
pub(crate) mod edges;
mod failures;
pub(crate) mod proxied;
pub(crate) mod servers;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kplane_model::fate::Setup;
use kplane_model::{DesiredKey, EndpointAddr, Family, NodeFacts, ServiceKey, ServiceName};
use kplane_proto::v1 as pb;
use prost::Message as _;

use self::failures::{clip, failures_to_wire};
use crate::desired::{Counts, Freshness, Held, Position, Reject, Resume};
use crate::host_checks::Finding;
use kplane_dataplane::backend::{RuleCounts, ServerCounts};
use kplane_dataplane::conntrack::EndedConnections;
use kplane_dataplane::policy::PolicyCounts;

/// Most bytes of a report on the wire, whatever the length of names, because the control plane ends a stream
/// whose messages are too large. The fields that only the stream knows need less than the rest.
const REPORT_BYTES: usize = kplane_proto::MAX_MESSAGE_BYTES - (32 << 10);

/// Go's zero time, which kube-proxy prints for events that never happened.
const NEVER: &str = "0001-01-01T00:00:00Z";

/// Least time between two reports of a read-back that found nothing new, in milliseconds.
const VERIFIED_NEWS_MS: u64 = 60_000;

/// The latest state of the engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The state from which a reconnect may continue.
    pub resume: Option<Resume>,
    /// The position of the state in effect; `None` before the first update, unless the agent serves from its cache
    /// file.
    pub held: Option<Position>,
    /// The time when a control plane last confirmed the state, milliseconds since 1970, if the state comes from
    /// the cache file and none has confirmed it since; 0 = the time is not known.
    pub stale_since_ms: Option<u64>,
    /// The cluster of the last control plane that named its cluster; empty = not known.
    pub cluster: Arc<str>,
    /// The newest changes of the source that the state contains.
    pub freshness: Freshness,
    /// The position that the kernel holds, except for `failures`. Never more than it holds.
    pub applied: Option<Position>,
    /// The position at which the kernel was last read back and compared.
    pub verified: Option<Position>,
    /// The objects that are not in the kernel as desired.
    pub failures: Vec<Failure>,
    /// The last attempt to apply.
    pub last_sync: Option<Sync>,
    /// Totals of both families, including what is kept.
    pub counts: Counts,
    /// The Services that are served although the control plane does not send them like this (any more).
    pub keeps: Option<Held>,
    /// Whether the control plane reports that its data may be incomplete.
    pub partial: bool,
    /// The state of each family, IPv4 first.
    pub families: [FamilyReport; 2],
    /// The number of objects of kinds that this version does not know, since the start.
    pub unknown_kinds: u64,
    /// The number of snapshots that were taken, since the start.
    pub snapshots: u64,
    /// The number of attempts in which no family failed, since the start.
    pub syncs_ok: u64,
    /// The number of attempts in which a family failed, since the start.
    pub syncs_failed: u64,
    /// Virtual and real servers of each family, in backends that have some. Connections come and go all the
    /// time, so a change of these alone wakes no receiver.
    pub servers: [Option<ServerCounts>; 2],
    /// The control plane's knowledge of the node; `None` like `held`.
    pub node: Option<NodeState>,
    /// The latest changes in the cluster that the kernel holds, oldest first.
    pub triggers: Arc<VecDeque<TriggerProgrammed>>,
    /// Whether the canary answers through the data path; `None` without a canary, and while that is not known.
    pub canary: Option<bool>,
    /// What stands in the way of packets on the node, besides Services.
    pub findings: Vec<Finding>,
    /// The endpoints that the userspace proxy avoids, 32 at most.
    pub avoided: Avoided,
    /// Numbers of connections that have ended, of the latest 64 Services.
    pub ended: Vec<(ServiceName, EndedConnections)>,
    /// Sizes of the NetworkPolicies that each family enforces.
    pub policies: [PolicyCounts; 2],
}

/// A change in the cluster whose results are in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TriggerProgrammed {
    /// A number that counts up from 1 since the start of the agent.
    pub number: u64,
    /// The epoch in which `id` is valid.
    pub epoch: u64,
    /// The control plane's identifier of the change.
    pub id: u64,
    /// Time from the change until the kernel's acknowledgement, in milliseconds by two clocks.
    pub latency_ms: u64,
}

/// The facts of the node that matter for its health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeState {
    /// Whether there is a Node object.
    pub known: bool,
    /// Whether the node is neither being deleted nor drained by an autoscaler.
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

/// Endpoints that new connections of the userspace proxy avoid, in the order of their ServicePorts.
pub type Avoided = Vec<(ServiceKey, EndpointAddr)>;

/// What a failure is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The node as a whole, or an object whose name is unreadable.
    Node,
    /// All NetworkPolicies of the node.
    Policies,
    /// One object.
    Object(DesiredKey),
}

/// The reason why one object is not in the kernel as desired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What fails.
    pub about: Subject,
    /// The problem, human-readable.
    pub reason: String,
    /// The start of the problem, milliseconds since 1970.
    pub since_ms: u64,
    /// Whether the object is served, but not in every respect.
    pub degraded: bool,
}

impl Failure {
    /// Returns the failure of a node that is served from the cache file.
    pub fn stale(since_ms: u64) -> Self {
        Self {
            about: Subject::Node,
            reason: format!(
                "no control plane has sent an update since the agent started: the node is served from the cache file, \
                 stale since {}",
                time(since_ms)
            ),
            since_ms,
            degraded: true,
        }
    }

    /// Returns the failure of an invalid object.
    pub fn rejected(object: Option<&DesiredKey>, reject: &Reject) -> Self {
        let reason = match object {
            Some(_) => reject.reason.clone(),
            None => format!("an object without a readable name: {}", reject.reason),
        };
        Self {
            about: object.cloned().map_or(Subject::Node, Subject::Object),
            reason,
            since_ms: reject.since_ms,
            degraded: false,
        }
    }
}

/// The course of one update, or of a retry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sync {
    /// The revision that was applied.
    pub revision: u64,
    /// The end of the attempt, milliseconds since 1970.
    pub finished_at_ms: u64,
    /// Time from the arrival of the update's last piece until the kernel's acknowledgement.
    pub total: Duration,
    /// Time for planning and comparing.
    pub plan: Duration,
    /// Time for encoding.
    pub encode: Duration,
    /// Time that the kernel took.
    pub kernel: Duration,
    /// The number of operations that the kernel was sent.
    pub operations: u64,
    /// The number of bytes that the kernel was sent.
    pub bytes: u64,
    /// Time from the change in the control plane until the acknowledgement, in milliseconds by two clocks; 0
    /// when not known.
    pub end_to_end_ms: u64,
}

/// The state of one address family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FamilyReport {
    /// Whether the kernel holds everything that is desired of this family.
    pub programmed: bool,
    /// Whether the node needs the family, or the family works: `Report::applied` waits for it. A kernel
    /// without IPv6 is no problem while no Service has IPv6 addresses.
    pub needed: bool,
    /// Whether the kernel has held a complete state once since the start.
    pub ever_programmed: bool,
    /// The last time when the kernel was known to hold the desired state, milliseconds since 1970; 0 = never.
    pub programmed_at_ms: u64,
    /// The arrival of the oldest update that the kernel does not hold; `None` when it holds everything (G2).
    pub behind_since: Option<Instant>,
    /// The current error.
    pub error: Option<LastingError>,
    /// The number of rules, in backends whose rules grow with the number of Services.
    pub rules: Option<RuleCounts>,
    /// The last time when the kernel was compared with what it should hold and was equal, milliseconds since
    /// 1970; 0 = never.
    pub verified_at_ms: u64,
    /// Repairs of other programs' changes, to all of the family's tables.
    pub repairs: Repairs,
    /// The settings that decide about packets; `None` until the node was planned.
    pub setup: Option<Setup>,
}

/// Repairs of other programs' changes, since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repairs {
    /// The number of repairs.
    pub count: u64,
    /// The time of the last repair, milliseconds since 1970; 0 = never.
    pub last_ms: u64,
    /// The last change that was repaired, and as far as the kernel reports it the program that made it,
    /// human-readable.
    pub last: String,
}

impl Repairs {
    pub(crate) fn add(&mut self, what: String, now_ms: u64) {
        self.count += 1;
        self.last_ms = now_ms;
        self.last = what;
    }

    /// Returns these repairs and others, of another table, as one sum.
    pub(crate) fn and(&self, other: &Self) -> Self {
        let later = if other.last_ms > self.last_ms { other } else { self };
        Self {
            count: self.count + other.count,
            ..later.clone()
        }
    }
}

/// An error that lasts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastingError {
    /// The problem, human-readable.
    pub reason: String,
    /// The start of the error, milliseconds since 1970.
    pub since_ms: u64,
    /// The start of the error, by the monotonic clock.
    pub since: Instant,
}

impl Report {
    /// Replaces an older report; returns whether the new one contains news. [`Report::servers`] is no news,
    /// and neither is a read-back soon after another one with the same result.
    pub(crate) fn replace(mut self, before: &mut Self) -> bool {
        let servers = std::mem::take(&mut self.servers);
        before.servers = Default::default();
        let (verified, reported) = (self.swap_verified([0, 0]), before.swap_verified([0, 0]));
        // A clock that was set back is news, too.
        let old = |(now, reported): (&u64, &u64)| {
            *reported == 0 || now.abs_diff(*reported) >= VERIFIED_NEWS_MS
        };
        let looked = verified != reported && verified.iter().zip(&reported).any(old);
        let news = looked || self != *before;
        self.swap_verified(if news { verified } else { reported });
        *before = Self { servers, ..self };
        news
    }

    /// Replaces the times of [`FamilyReport::verified_at_ms`], and returns the previous ones.
    fn swap_verified(&mut self, times: [u64; 2]) -> [u64; 2] {
        let [v4, v6] = &mut self.families;
        let [at_v4, at_v6] = times;
        [
            std::mem::replace(&mut v4.verified_at_ms, at_v4),
            std::mem::replace(&mut v6.verified_at_ms, at_v6),
        ]
    }

    /// Returns the report on the wire, without the fields that only the stream knows.
    pub fn to_wire(&self) -> pb::Report {
        let epoch = self.held.map_or(0, |held| held.epoch);
        // A position of another epoch means nothing in this one.
        let revision = |position: Option<Position>| {
            position
                .filter(|position| position.epoch == epoch)
                .map_or(0, |position| position.revision)
        };
        let families = Family::ALL.into_iter().zip(&self.families).zip(&self.servers);
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
            steps: Vec::new(),
            held: self.keeps.as_ref().map(held_to_wire),
            frozen: false,
            canary: match self.canary {
                None => pb::Canary::Unspecified,
                Some(true) => pb::Canary::Answers,
                Some(false) => pb::Canary::Silent,
            }
            .into(),
            findings: self.findings.iter().map(finding_to_wire).collect(),
            avoided: self.avoided.iter().map(avoided_to_wire).collect(),
            now_ms: 0,
            policies: policies_to_wire(&self.policies),
            ended: self.ended.iter().map(ended_to_wire).collect(),
        };
        let room = REPORT_BYTES.saturating_sub(report.encoded_len());
        report.failures = failures_to_wire(&self.failures, room);
        report
    }

    /// Returns the results that a control plane of this epoch has not received yet, if it received everything
    /// up to the given number.
    pub(crate) fn triggers_after(&self, epoch: u64, reported: u64) -> Vec<pb::TriggerProgrammed> {
        self.triggers
            .iter()
            .filter(|one| one.number > reported)
            .filter(|one| one.epoch == epoch)
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
            error: self.error.as_ref().map_or("", |e| clip(&e.reason)).to_owned(),
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
            masquerade: self.setup.map(|setup| pb::Masquerade {
                pods_known: setup.masquerade.pods_known,
                all: setup.masquerade.all,
            }),
            local_rule: self
                .setup
                .map_or(pb::LocalRule::Unspecified, |setup| setup.local.into())
                .into(),
        }
    }
}

fn finding_to_wire(finding: &Finding) -> pb::Finding {
    pb::Finding {
        code: finding.code.code().to_owned(),
        severity: pb::Severity::from(finding.severity).into(),
        text: clip(&finding.text).to_owned(),
        fix: clip(&finding.fix).to_owned(),
        nodes: Vec::new(),
        nodes_omitted: 0,
    }
}

fn avoided_to_wire((key, endpoint): &(ServiceKey, EndpointAddr)) -> pb::AvoidedEndpoint {
    pb::AvoidedEndpoint {
        key: Some(key.into()),
        address: endpoint.to_string(),
    }
}

fn ended_to_wire((service, ended): &(ServiceName, EndedConnections)) -> pb::EndedConnections {
    pb::EndedConnections {
        namespace: service.namespace.to_string(),
        name: service.name.to_string(),
        dead: ended.dead,
        half_open: ended.half_open,
    }
}

fn held_to_wire(held: &Held) -> pb::Held {
    pb::Held {
        services: held.services as u64,
        without_endpoints: held.without_endpoints as u64,
        reason: clip(&held.reason).to_owned(),
        since_ms: held.since_ms,
        examples: held.examples.clone(),
        policies: held.policies as u64,
    }
}

/// Returns what the node enforces; `None` without NetworkPolicies.
fn policies_to_wire([v4, v6]: &[PolicyCounts; 2]) -> Option<pb::EnforcedPolicies> {
    let enforced = pb::EnforcedPolicies {
        policies: v4.policies.max(v6.policies),
        pods: v4.pods.max(v6.pods),
        isolated: v4.isolated.max(v6.isolated),
        elements: v4.elements + v6.elements,
    };
    (enforced != pb::EnforcedPolicies::default()).then_some(enforced)
}

/// Formats a time as Go's `time.Time` becomes JSON: RFC 3339 in UTC, without zeros at the end of a
/// fraction. 0 = never.
pub(crate) fn time(ms: u64) -> String {
    if ms == 0 {
        return NEVER.to_owned();
    }
    let ms = i64::try_from(ms).unwrap_or(i64::MAX);
    jiff::Timestamp::from_millisecond(ms)
        .unwrap_or(jiff::Timestamp::MAX)
        .to_string()
}

/// Returns microseconds, the unit of the wire format.
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
