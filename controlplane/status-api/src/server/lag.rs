//! Why a node does not hold the newest state of a Service, according to its agent.

use std::time::Instant;

use kplane_agents::fleet::{AgentRecord, holding};
use kplane_agents::hub::Hub;
use kplane_agents::overrides::Override;
use kplane_desired_state::publish::Store;
use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use kplane_proto::v1::LagState;

use super::wall_ms;

/// The reason why a node does not hold the newest state of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lag {
    pub(super) state: LagState,
    /// Start of the state, milliseconds since 1970.
    pub(super) since_ms: u64,
    pub(super) reason: String,
}

impl Lag {
    fn new(state: LagState, since: Instant, reason: impl Into<String>) -> Self {
        Self {
            state,
            since_ms: wall_ms(since),
            reason: reason.into(),
        }
    }

    /// Names the order that freezes the node, if that is why the node is behind.
    pub(super) fn of_frozen(self, order: Option<&Override>) -> Self {
        if self.state == LagState::Behind
            && let Some(order) = order
        {
            Self {
                reason: format!("{order}; {}", self.reason),
                ..self
            }
        } else {
            self
        }
    }
}

/// Returns the failure that an agent reports for a Service: not served, or (`degraded`) not served in every
/// respect.
pub(super) fn failure_of<'a>(
    name: &ServiceName,
    report: &'a pb::Report,
    degraded: bool,
) -> Option<&'a pb::ObjectFailure> {
    let is_its = |key: &pb::ServiceKey| key.namespace == *name.namespace && key.name == *name.name;
    report
        .failures
        .iter()
        .filter(|f| f.degraded == degraded)
        .find(|f| f.key.as_ref().is_some_and(is_its))
}

/// Returns the report of an agent, if it is about this control plane's revisions.
pub(super) fn report_of<'a>(
    store: &Store,
    record: Option<&'a AgentRecord>,
) -> Option<&'a pb::Report> {
    let report = record.and_then(|record| record.report.as_deref());
    report.filter(|report| report.epoch == store.epoch())
}

/// Returns the reason why a node does not hold revision `wanted` of a Service, if it does not.
pub(super) fn lag(
    hub: &Hub,
    name: &ServiceName,
    record: Option<&AgentRecord>,
    wanted: u64,
) -> Option<Lag> {
    let Some(record) = record else {
        let reason = "no agent has connected for this node";
        let since = hub.replica().started_at;
        return Some(Lag::new(LagState::NoAgent, since, reason));
    };
    let not_connected = |reason: &str| Lag::new(LagState::Disconnected, record.since, reason);
    let Some(report) = report_of(hub.store(), Some(record)) else {
        let reason = "the agent has not reported to this control plane yet";
        return Some(if record.connected {
            Lag::new(LagState::Behind, record.since, reason)
        } else {
            not_connected(reason)
        });
    };
    if let Some(failure) = failure_of(name, report, false) {
        return Some(Lag {
            state: LagState::Failing,
            since_ms: record.local_ms(failure.since_ms),
            reason: failure.reason.clone(),
        });
    }
    if report.applied_revision >= wanted {
        let unknown = "unknown: the agent is not connected; its last report said that it holds the \
                       newest state";
        return (!record.connected).then(|| not_connected(unknown));
    }
    let behind = format!("applied revision {} of {wanted}", report.applied_revision);
    let family = report.families.iter().find(|f| !f.error.is_empty());
    Some(match (record.connected, family) {
        (false, _) => not_connected(&format!("{behind}; the agent is not connected")),
        (true, Some(family)) => Lag {
            state: LagState::Failing,
            since_ms: record.local_ms(family.error_since_ms),
            reason: format!("{behind}; {}", family.error),
        },
        (true, None) => {
            let since = hub.store().changed_after(report.applied_revision);
            Lag::new(LagState::Behind, since.unwrap_or(record.since), behind)
        }
    })
}

/// Returns the reason why a node may still serve a Service that the control plane does not know.
pub(super) fn lag_of_unknown(
    hub: &Hub,
    name: &ServiceName,
    record: Option<&AgentRecord>,
) -> Option<Lag> {
    let held = report_of(hub.store(), record).and_then(|report| report.held.as_ref());
    let holds = held.map(|held| Lag {
        state: LagState::Holding,
        since_ms: record.map_or(0, |record| record.local_ms(held.since_ms)),
        reason: holding::describe(held),
    });
    // The first update of a control plane is a complete snapshot without the Service.
    lag(hub, name, record, 1).or(holds)
}
