//! One Service on one node: by the agent's report here, or by the answer of another replica.
//!
//! Another replica's answer counts only if its digest of the Service is that of the replica that was asked.

use std::collections::BTreeMap;

use kplane_agents::fleet::{AgentRecord, Durations, has_servers};
use kplane_agents::hub::Hub;
use kplane_agents::peers::{Answer, Collected};
use kplane_desired_state::publish::Followed;
use kplane_model::{NodeName, ServiceName};
use kplane_proto::v1 as pb;
use kplane_proto::v1::LagState;

use super::lag::{Lag, failure_of, lag, lag_of_unknown, report_of};
use super::pages::{Elsewhere, MAY_BE_ELSEWHERE, Node};
use super::wall_ms;

/// A Service's state on a node, by the revisions of the replica that serves the node.
#[derive(Clone, Debug)]
pub(super) struct ServiceOnNode {
    /// The reason why the kernel does not hold the newest state, if it does not.
    pub(super) lag: Option<Lag>,
    pub(super) applied: u64,
    pub(super) verified: u64,
    pub(super) wanted: u64,
    /// The respect in which the Service is not served as desired; empty otherwise.
    pub(super) degraded: String,
    pub(super) last_change: Option<pb::ProgrammedChange>,
    /// The agent can be asked for virtual servers.
    has_servers: bool,
    /// Endpoints of the Service that the node's userspace proxy avoids, if its agent is connected.
    pub(super) avoided: Vec<pb::AvoidedEndpoint>,
    /// Connections of the Service that the node's agent has ended, if it is connected.
    pub(super) ended: Option<pb::EndedConnections>,
    /// Errors and warnings about the node itself, if its agent is connected.
    pub(super) around: Vec<pb::Finding>,
}

impl ServiceOnNode {
    /// Returns the state on a node whose agent is known here, or nowhere.
    pub(super) fn here(
        hub: &Hub,
        followed: &Followed,
        node: &NodeName,
        record: Option<&AgentRecord>,
    ) -> Self {
        let name = followed.service();
        let wanted = hub.store().wanted_of_service(node, followed);
        let lag = if followed.is_known() {
            lag(hub, name, record, wanted.max(1))
        } else {
            lag_of_unknown(hub, name, record)
        };
        let lag = lag.map(|lag| lag.of_frozen(hub.overrides().frozen(node).as_ref()));
        let report = report_of(hub.store(), record);
        let degraded = report.and_then(|report| failure_of(name, report, true));
        let last_change = record.and_then(|record| record.latencies.of(name));
        Self {
            lag,
            applied: report.map_or(0, |report| report.applied_revision),
            verified: report.map_or(0, |report| report.verified_revision),
            wanted,
            degraded: degraded.map_or_else(String::new, |failure| failure.reason.clone()),
            last_change: last_change.map(|change| pb::ProgrammedChange {
                latency_ms: change.latency_ms.into(),
                at_ms: wall_ms(change.at),
            }),
            has_servers: record.is_some_and(|record| record.connected && has_servers(record)),
            avoided: record.map_or_else(Vec::new, |record| avoided(name, record)),
            ended: record.and_then(|record| ended(name, record)),
            around: record.map_or_else(Vec::new, around),
        }
    }

    /// Returns the state for other replicas.
    pub(super) fn to_wire(&self) -> pb::PeerStanding {
        let lag = self.lag.as_ref();
        pb::PeerStanding {
            lag: lag.map_or(LagState::Unspecified, |lag| lag.state).into(),
            since_ms: lag.map_or(0, |lag| lag.since_ms),
            reason: lag.map_or_else(String::new, |lag| lag.reason.clone()),
            applied_revision: self.applied,
            verified_revision: self.verified,
            wanted_revision: self.wanted,
            degraded: self.degraded.clone(),
            last_change: self.last_change,
            has_servers: self.has_servers,
            avoided: self.avoided.clone(),
            ended: self.ended.clone(),
            around: self.around.clone(),
        }
    }

    /// Reads the answer of another replica.
    fn of_wire(reported: &pb::PeerStanding, answer: &Answer) -> Self {
        let lag = Lag {
            state: reported.lag(),
            since_ms: answer.local(reported.since_ms),
            reason: reported.reason.clone(),
        };
        Self {
            lag: (lag.state != LagState::Unspecified).then_some(lag),
            applied: reported.applied_revision,
            verified: reported.verified_revision,
            wanted: reported.wanted_revision,
            degraded: reported.degraded.clone(),
            last_change: reported.last_change.map(|change| pb::ProgrammedChange {
                at_ms: answer.local(change.at_ms),
                ..change
            }),
            has_servers: reported.has_servers,
            avoided: reported.avoided.clone(),
            ended: reported.ended.clone(),
            around: reported.around.clone(),
        }
    }
}

/// Returns the report of a connected agent, if there is one.
fn connected_report(record: &AgentRecord) -> impl Iterator<Item = &pb::Report> {
    record.report.as_deref().into_iter().filter(|_| record.connected)
}

/// Returns the endpoints of a Service that a connected agent's proxy avoids, according to its report.
fn avoided(name: &ServiceName, record: &AgentRecord) -> Vec<pb::AvoidedEndpoint> {
    let all = connected_report(record).flat_map(|report| &report.avoided);
    let of_service = |one: &&pb::AvoidedEndpoint| {
        let key = one.key.as_ref();
        key.is_some_and(|key| *key.namespace == *name.namespace && *key.name == *name.name)
    };
    all.filter(of_service).cloned().collect()
}

/// Returns how many connections of a Service a connected agent has ended, according to its report.
fn ended(name: &ServiceName, record: &AgentRecord) -> Option<pb::EndedConnections> {
    let mut all = connected_report(record).flat_map(|report| &report.ended);
    let is_its =
        |of: &&pb::EndedConnections| *of.namespace == *name.namespace && *of.name == *name.name;
    all.find(is_its).cloned()
}

/// Returns what stands in the way of packets on the node of a connected agent, according to its report.
fn around(record: &AgentRecord) -> Vec<pb::Finding> {
    let all = connected_report(record).flat_map(|report| &report.findings);
    let matters = |finding: &&pb::Finding| finding.severity() != pb::Severity::Info;
    all.filter(matters).cloned().collect()
}

/// One Service at all replicas.
pub(super) struct Standings<'a> {
    hub: &'a Hub,
    followed: &'a Followed,
    /// Whether nodes may be served by a replica that did not answer.
    incomplete: bool,
    /// The index of the Service in the answer of each replica, and whether the replica publishes the same of it.
    replicas: BTreeMap<u64, (usize, bool)>,
}

impl<'a> Standings<'a> {
    pub(super) fn new(hub: &'a Hub, followed: &'a Followed, of: &Collected) -> Self {
        let digest = hub.store().digest_of_service(followed);
        let replicas = of.answers.iter().filter_map(|answer| {
            let index = answer.index_of(followed.service())?;
            Some((answer.epoch, (index, answer.agrees(index, digest))))
        });
        Self {
            hub,
            followed,
            incomplete: !of.missing.is_empty(),
            replicas: replicas.collect(),
        }
    }

    /// Returns the Service's state on a node.
    pub(super) fn of(&self, name: &NodeName, node: &Node<'_>) -> ServiceOnNode {
        let mut service_on_node = match node.elsewhere {
            None => ServiceOnNode::here(self.hub, self.followed, name, node.record.as_deref()),
            Some(elsewhere) => self.elsewhere(elsewhere),
        };
        if self.incomplete && !node.is_connected() {
            service_on_node.lag = Some(Lag {
                state: LagState::Unknown,
                since_ms: 0,
                reason: MAY_BE_ELSEWHERE.to_owned(),
            });
        }
        service_on_node
    }

    fn elsewhere(&self, Elsewhere { answer, agent }: Elsewhere<'_>) -> ServiceOnNode {
        let found = self
            .replicas
            .get(&answer.epoch)
            .and_then(|(index, agrees)| Some((agent.services.get(*index)?, *agrees)));
        let nothing = (&pb::PeerStanding::default(), false);
        let (reported, agrees) = found.unwrap_or(nothing);
        let mut service_on_node = ServiceOnNode::of_wire(reported, answer);
        if !agrees && service_on_node.lag.is_none() {
            service_on_node.lag = Some(Lag {
                state: LagState::Behind,
                since_ms: 0,
                reason: format!(
                    "the replica {}, which serves the node, has not seen the same state of the Service",
                    answer.address
                ),
            });
        }
        service_on_node
    }

    /// Adds the durations of the last change that other replicas have measured.
    pub(super) fn add_durations(&self, durations: &mut Durations, of: &Collected) {
        for answer in &of.answers {
            let found = self.replicas.get(&answer.epoch);
            if let Some((index, true)) = found
                && let Some(theirs) = answer.durations(*index)
            {
                durations.merge(theirs);
            }
        }
    }
}
