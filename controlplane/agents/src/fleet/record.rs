//! What the control plane knows of one agent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kplane_model::is_hidden;
use kplane_proto::v1::{Capability, Hello, Report};
use tokio::time::Instant as Moment;

use super::{Clocks, CompetingAgent, Latencies, translate};

/// The capability to send beats, as a bit: capability N is bit N - 1.
pub(crate) const BEATS: u64 = 1 << (Capability::Beats as u64 - 1);

/// The record of one node's agent.
#[derive(Clone, Debug)]
pub struct AgentRecord {
    /// The agent has a stream at the moment.
    pub connected: bool,
    /// Time at which the agent connected, or at which its stream ended.
    pub since: Instant,
    /// Time of the last message from the agent.
    pub last_heard: Instant,
    /// Time of the last message, or of the end of the stream, by the clock of timers.
    pub sign: Moment,
    /// The agent sends beats and answers which nodes it reaches.
    pub beats: bool,
    /// Random number of the agent's process.
    pub instance: u64,
    /// The agent had received nothing when it connected: its process had just started.
    pub began_empty: bool,
    /// Address from which the stream comes; empty in the same process.
    pub peer: String,
    /// Version of the agent.
    pub version: String,
    /// Name of the agent's backend.
    pub backend: String,
    /// The reason why users should choose another backend; empty for most backends.
    pub backend_deprecation: String,
    /// Nobody chose the backend: the agent's file of kube-proxy names no mode.
    pub mode_unset: bool,
    /// The agent's latest report.
    pub report: Option<Arc<Report>>,
    /// The agent's clock, if it names its time. The times of the report are by that clock.
    pub clocks: Option<Clocks>,
    /// Time at which the applied revision last changed.
    pub applied_at: Instant,
    /// Time of the agent's last report of a new comparison of its kernel with the desired state.
    pub verified_at: Instant,
    /// Durations from recent changes in the cluster until the node's kernel held them.
    pub latencies: Latencies,
    /// Newest revision that the kernel was known to hold, for the measurement of later ones; 0 = none.
    pub(crate) measured_to: u64,
    /// Another agent that asked to speak for the node while this agent did.
    pub competing_agent: Option<CompetingAgent>,
}

/// Returns whether the last report lists virtual servers. Such an agent understands questions about them.
pub fn has_servers(record: &AgentRecord) -> bool {
    let report = record.report.as_ref();
    report.is_some_and(|report| report.families.iter().any(|family| family.servers.is_some()))
}

/// Returns when the kernel was last compared according to a report, in milliseconds since 1970 by the agent's
/// clock. The oldest comparison of all families counts. `None` = there was none, or the agent does not report it.
pub(super) fn verified(report: &Report) -> Option<u64> {
    report
        .families
        .iter()
        .map(|family| family.verified_at_ms)
        .filter(|at| *at > 0)
        .min()
}

impl AgentRecord {
    /// Returns the record of an agent that connects now and has reported nothing. `hello` is bounded.
    pub(super) fn begin(hello: &Hello, peer: String, now: Instant) -> Self {
        Self {
            connected: true,
            since: now,
            last_heard: now,
            sign: Moment::now(),
            beats: hello.capabilities & BEATS != 0,
            instance: hello.instance,
            began_empty: hello.resume.is_none() || hello.from_cache,
            peer,
            version: hello.agent_version.clone(),
            backend: hello.backend.clone(),
            backend_deprecation: hello.backend_deprecation.clone(),
            mode_unset: hello.mode_unset,
            report: None,
            clocks: None,
            applied_at: now,
            verified_at: now,
            latencies: Latencies::default(),
            measured_to: 0,
            competing_agent: None,
        }
    }

    /// Returns a time of the report by this machine's clock, in milliseconds since 1970; 0 stays 0.
    pub fn local_ms(&self, theirs_ms: u64) -> u64 {
        let clocks = self.clocks;
        clocks.map_or(theirs_ms, |clocks| clocks.local_ms(theirs_ms))
    }

    /// Returns a copy of the agent's latest report, with times by this machine's clock.
    pub fn local_report(&self) -> Option<Report> {
        let mut report = self.report.as_deref()?.clone();
        translate(&mut report, |ms| self.local_ms(ms));
        Some(report)
    }

    /// Returns the time since the control plane last learned of a comparison of the agent's kernel with the
    /// desired state; `None` for agents that do not report comparisons.
    pub fn unverified_for(&self, now: Instant) -> Option<Duration> {
        self.report.as_deref().and_then(verified)?;
        Some(now.saturating_duration_since(self.verified_at))
    }
}

/// Returns an agent's short text without hidden characters, cut to a length. kplane's agents send no longer text.
pub fn label(text: &str, max_bytes: usize) -> String {
    let mut label: String = text.chars().filter(|c| !is_hidden(*c)).collect();
    label.truncate(label.floor_char_boundary(max_bytes));
    label.shrink_to_fit();
    label
}
