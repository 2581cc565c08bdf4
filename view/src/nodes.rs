//! Nodes: their state, what they hold, and why not.

pub mod state;

use std::time::Duration;

use kplane_proto::v1 as pb;
use serde::Serialize;

pub use self::state::NodeStateView;
use super::findings::FindingView;
use super::replicas::{MissingReplicaView, missing_text};
use super::servers::ServersView;
use super::{API_VERSION, KeyView, List, View, family, next_steps_text, progress};
use crate::style::Canvas;
use crate::table::{Column, Table};
use crate::text::Span;
use crate::time::{Time, human};

/// The next step in a fleet without nodes.
pub(crate) const NO_AGENT: &str = "no agent has connected yet: start kp-nodeagent on every node";

/// The revisions of one node. All but `wanted` are `null` if unknown, or if they belong to an earlier
/// start of the control plane, whose revisions do not compare.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RevisionsView {
    pub(crate) wanted: u64,
    pub(crate) received: Option<u64>,
    pub(crate) applied: Option<u64>,
    pub(crate) verified: Option<u64>,
    /// The number of revisions by which the node is behind.
    pub(crate) lag: Option<u64>,
}

/// Totals of what an agent holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectsView {
    pub(crate) services: u64,
    pub(crate) endpoints: u64,
}

/// The course of the last update.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SyncView {
    pub(crate) revision: u64,
    pub(crate) finished: Option<Time>,
    pub(crate) total_microseconds: u64,
    pub(crate) plan_microseconds: u64,
    pub(crate) encode_microseconds: u64,
    pub(crate) kernel_microseconds: u64,
    pub(crate) operations: u64,
    pub(crate) bytes: u64,
    /// Time from the change in the cluster until the kernel held it.
    pub(crate) end_to_end_milliseconds: Option<u64>,
}

/// The time that the latest changes in the cluster took until the kernel held them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProgrammingView {
    /// The number of these changes.
    pub(crate) count: u32,
    pub(crate) last_milliseconds: u64,
    pub(crate) p50_milliseconds: u64,
    pub(crate) max_milliseconds: u64,
    pub(crate) last_time: Option<Time>,
}

/// An object that the kernel does not hold as desired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FailureView {
    pub(crate) object: Option<KeyView>,
    pub(crate) reason: String,
    pub(crate) since: Option<Time>,
    pub(crate) degraded: bool,
}

/// Services that a node serves although the source does not name them (any more). If both numbers are
/// 0, the agent does not know what its kernel serves, and leaves the kernel as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldView {
    pub(crate) services: u64,
    pub(crate) without_endpoints: u64,
    pub(crate) reason: String,
    pub(crate) since: Option<Time>,
    /// A few of their names.
    pub(crate) examples: Vec<String>,
}

/// The state of one address family of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FamilyView {
    pub(crate) family: &'static str,
    pub(crate) programmed: bool,
    pub(crate) error: String,
    pub(crate) error_since: Option<Time>,
    /// The last time when the kernel was compared with what it should hold, and was equal.
    pub(crate) verified_time: Option<Time>,
    /// The number of repairs of other programs' changes since the agent started.
    pub(crate) repairs: u64,
    pub(crate) last_repair_time: Option<Time>,
    /// The last change that was repaired, and the program that made it; empty = none.
    pub(crate) last_repair: String,
    /// The rules; `null` for backends whose rules do not grow with the number of Services.
    pub(crate) rules: Option<RulesView>,
    /// The virtual servers; `null` for backends without them.
    pub(crate) ipvs: Option<ServersView>,
}

/// The numbers of rules of a backend that has rules for each Service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RulesView {
    pub(crate) rules: u64,
    pub(crate) lookups: u64,
    pub(crate) lookups_in_one_list: u64,
}

/// The state of one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    /// The name.
    pub name: String,
    /// The state.
    pub state: NodeStateView,
    pub(crate) since: Option<Time>,
    pub(crate) last_error: String,
    pub(crate) backend: String,
    pub(crate) agent_version: String,
    pub(crate) peer: String,
    /// The replica that serves the node; `null` = the one that was asked.
    pub(crate) replica: Option<String>,
    pub(crate) last_heard: Option<Time>,
    /// The zone; empty if it has none.
    pub zone: String,
    pub(crate) addresses: Vec<String>,
    #[serde(rename = "podCIDRs")]
    pub(crate) pod_cidrs: Vec<String>,
    pub(crate) revisions: RevisionsView,
    pub(crate) objects: Option<ObjectsView>,
    /// The Services that it holds; `null` when it serves exactly what the source names.
    pub(crate) held: Option<HeldView>,
    pub(crate) last_sync: Option<SyncView>,
    /// The programming times; `null` until the node has programmed a change whose time is known.
    pub(crate) network_programming: Option<ProgrammingView>,
    pub(crate) round_trip_microseconds: Option<u64>,
    pub(crate) syncs_ok: u64,
    pub(crate) syncs_failed: u64,
    pub(crate) unknown_kinds: u64,
    pub(crate) families: Vec<FamilyView>,
    pub(crate) failures: Vec<FailureView>,
    /// What stands in the way of packets on the node, besides Services.
    pub(crate) findings: Vec<FindingView>,
    /// Endpoints that its userspace proxy avoids.
    pub(crate) avoided: Vec<AvoidedView>,
}

/// An endpoint that the userspace proxy of a node avoids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AvoidedView {
    pub(crate) port: KeyView,
    pub(crate) address: String,
}

impl NodeView {
    /// Builds the view of a node, as the control plane of `epoch` sees it, or the replica that serves the node.
    pub fn new(node: pb::NodeStatus, epoch: u64) -> Self {
        let epoch = if node.epoch == 0 { epoch } else { node.epoch };
        let report = node.report.as_ref();
        let current = report.filter(|report| report.epoch == epoch);
        let revisions = RevisionsView {
            wanted: node.wanted_revision,
            received: current.map(|report| report.received_revision),
            applied: current.map(|report| report.applied_revision),
            verified: current.map(|report| report.verified_revision),
            lag: current.map(|r| node.wanted_revision.saturating_sub(r.applied_revision)),
        };
        let state = node.state().into();
        let report = node.report.unwrap_or_default();
        Self {
            name: node.name,
            state,
            since: Time::from_wire(node.since_ms),
            last_error: node.last_error,
            backend: node.backend,
            agent_version: node.agent_version,
            peer: node.peer,
            replica: Some(node.replica).filter(|replica| !replica.is_empty()),
            last_heard: Time::from_wire(node.last_heard_ms),
            zone: node.zone,
            addresses: node.addresses,
            pod_cidrs: node.pod_cidrs,
            revisions,
            objects: report.objects.map(|objects| ObjectsView {
                services: objects.services,
                endpoints: objects.endpoints,
            }),
            held: report.held.map(HeldView::from),
            last_sync: report.last_sync.map(SyncView::from),
            network_programming: node.network_programming.map(ProgrammingView::from),
            round_trip_microseconds: Some(report.round_trip_us).filter(|us| *us > 0),
            syncs_ok: report.syncs_ok,
            syncs_failed: report.syncs_failed,
            unknown_kinds: report.unknown_kinds,
            families: report.families.into_iter().map(FamilyView::from).collect(),
            failures: report.failures.into_iter().map(FailureView::from).collect(),
            findings: report.findings.into_iter().map(FindingView::from).collect(),
            avoided: report.avoided.into_iter().filter_map(avoided).collect(),
        }
    }

    /// Returns the name.
    pub fn name_span(&self) -> Span {
        Span::plain(&self.name)
    }

    /// Returns the state in its tone.
    pub fn state_span(&self) -> Span {
        Span::new(self.state.word(), self.state.tone())
    }

    /// Returns a sum over the virtual servers of all families; `None` without any.
    pub fn sum_of_servers(&self, of: fn(&ServersView) -> u64) -> Option<u64> {
        let families = self.families.iter();
        families
            .filter_map(|f| f.ipvs.as_ref())
            .map(of)
            .reduce(u64::saturating_add)
    }

    /// Returns when the kernel was last compared, for the family for which that is longest ago.
    pub fn verified_time(&self) -> Option<Time> {
        self.families.iter().filter_map(|f| f.verified_time).min()
    }

    /// Returns what stands in the way of packets on the node, unless the agent that found it is gone.
    pub(crate) fn obstacles(&self) -> impl Iterator<Item = &FindingView> {
        let findings = self.findings.iter().filter(|of| !of.is_info());
        findings.filter(|_| self.state != NodeStateView::Disconnected)
    }

    /// Returns whether something on the node drops packets.
    pub(crate) fn is_obstructed(&self) -> bool {
        self.obstacles().any(FindingView::is_error)
    }

    /// Returns the replica that serves the agent.
    fn replica_span(&self) -> Span {
        match &self.replica {
            _ if self.peer.is_empty() => Span::none(),
            Some(replica) => Span::plain(replica),
            None => Span::plain("the one asked"),
        }
    }

    /// Returns the applied revision, and the wanted one if that is newer.
    pub fn applied_span(&self) -> Span {
        progress(self.revisions.applied, self.revisions.wanted)
    }
}

fn avoided(of: pb::AvoidedEndpoint) -> Option<AvoidedView> {
    Some(AvoidedView {
        port: KeyView::from(of.key?),
        address: of.address,
    })
}

impl From<pb::Held> for HeldView {
    fn from(held: pb::Held) -> Self {
        Self {
            services: held.services,
            without_endpoints: held.without_endpoints,
            reason: held.reason,
            since: Time::from_wire(held.since_ms),
            examples: held.examples,
        }
    }
}

impl HeldView {
    /// Returns some of the names, and the number of the others.
    pub fn names(&self) -> Option<Span> {
        let all = self.services.saturating_add(self.without_endpoints);
        let more = all.saturating_sub(self.examples.len() as u64);
        let names = self.examples.join(", ");
        Some(match (self.examples.is_empty(), more) {
            (true, _) => return None,
            (false, 0) => Span::plain(format!("kept: {names}")),
            (false, more) => Span::plain(format!("kept: {names} and {more} more")),
        })
    }
}

impl From<pb::SyncStats> for SyncView {
    fn from(sync: pb::SyncStats) -> Self {
        Self {
            revision: sync.revision,
            finished: Time::from_wire(sync.finished_at_ms),
            total_microseconds: sync.total_us,
            plan_microseconds: sync.plan_us,
            encode_microseconds: sync.encode_us,
            kernel_microseconds: sync.kernel_us,
            operations: sync.operations,
            bytes: sync.bytes,
            end_to_end_milliseconds: Some(sync.end_to_end_ms).filter(|ms| *ms > 0),
        }
    }
}

impl From<pb::NetworkProgramming> for ProgrammingView {
    fn from(latencies: pb::NetworkProgramming) -> Self {
        Self {
            count: latencies.count,
            last_milliseconds: latencies.last_ms,
            p50_milliseconds: latencies.p50_ms,
            max_milliseconds: latencies.max_ms,
            last_time: Time::from_wire(latencies.last_at_ms),
        }
    }
}

impl From<pb::FamilyStatus> for FamilyView {
    fn from(status: pb::FamilyStatus) -> Self {
        Self {
            family: family(status.family()),
            programmed: status.programmed,
            error: status.error,
            error_since: Time::from_wire(status.error_since_ms),
            verified_time: Time::from_wire(status.verified_at_ms),
            repairs: status.repairs,
            last_repair_time: Time::from_wire(status.last_repair_ms),
            last_repair: status.last_repair,
            rules: status.rules.map(|stats| RulesView {
                rules: stats.rules,
                lookups: stats.lookups,
                lookups_in_one_list: stats.lookups_in_one_list,
            }),
            ipvs: status.servers.map(ServersView::from),
        }
    }
}

impl From<pb::ObjectFailure> for FailureView {
    fn from(failure: pb::ObjectFailure) -> Self {
        Self {
            object: failure.key.map(KeyView::from),
            reason: failure.reason,
            since: Time::from_wire(failure.since_ms),
            degraded: failure.degraded,
        }
    }
}

/// Returns the names of nodes for `-o name`.
pub fn names_of(nodes: &[NodeView]) -> Vec<String> {
    let names = nodes.iter().map(|node| format!("node/{}", node.name));
    names.collect()
}

/// The view of `kpctl get nodes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeListView {
    api_version: &'static str,
    kind: &'static str,
    items: Vec<NodeView>,
    /// Replicas that did not answer.
    missing_replicas: Vec<MissingReplicaView>,
    /// The current time, for ages.
    #[serde(skip)]
    now: Option<Time>,
}

impl From<pb::Fleet> for NodeListView {
    fn from(fleet: pb::Fleet) -> Self {
        let control_plane = fleet.control_plane.unwrap_or_default();
        let nodes = fleet.nodes.into_iter();
        Self {
            api_version: API_VERSION,
            kind: "NodeList",
            missing_replicas: MissingReplicaView::list(fleet.missing_replicas),
            items: nodes
                .map(|node| NodeView::new(node, control_plane.epoch))
                .collect(),
            now: Time::from_wire(control_plane.now_ms),
        }
    }
}

impl NodeListView {
    /// Keeps the nodes for which `keep` is true.
    pub fn retain(&mut self, keep: impl Fn(&NodeView) -> bool) {
        self.items.retain(keep);
    }
}

impl List for NodeListView {
    type Item = NodeView;

    fn items(&mut self) -> &mut Vec<NodeView> {
        &mut self.items
    }
}

impl View for NodeListView {
    fn names(&self) -> Option<Vec<String>> {
        Some(names_of(&self.items))
    }

    fn text(&self, canvas: &Canvas) -> String {
        if self.items.is_empty() {
            let missing = missing_text(&self.missing_replicas, canvas);
            return format!(
                "No nodes.\n{missing}{}",
                next_steps_text(&[NO_AGENT.to_owned()], canvas)
            );
        }
        let others = self.items.iter().any(|node| node.replica.is_some());
        let heard = |node: &NodeView| match (node.last_heard, self.now) {
            (Some(heard), Some(now)) => Span::plain(heard.age_text(now)),
            _ => Span::none(),
        };
        let table = Table::new(&self.items)
            .column(Column::new("NODE").elastic(24).names(), NodeView::name_span)
            .column(Column::new("STATE"), NodeView::state_span)
            .column(Column::new("ZONE").elastic(8).optional(3), |node| {
                Span::plain(&node.zone)
            })
            .column(Column::new("BACKEND").optional(1), |node| {
                Span::plain(&node.backend)
            })
            .column(Column::new("VERSION").elastic(7).optional(0), |node| {
                Span::plain(&node.agent_version)
            })
            .column(Column::new("HEARD").optional(2), heard)
            .column(Column::new("ADDRESS").optional(4), |node| {
                Span::plain(node.addresses.first().map_or("", String::as_str))
            })
            .column(Column::wide("OTHER-ADDRESSES"), |node| {
                Span::plain(node.addresses.get(1..).unwrap_or_default().join(","))
            })
            .column(Column::wide("POD-CIDRS"), |node| {
                Span::plain(node.pod_cidrs.join(","))
            })
            .column(Column::wide("PEER"), |node| Span::plain(&node.peer))
            .column_if(others, Column::wide("REPLICA"), NodeView::replica_span)
            .column(Column::wide("RTT"), |node| {
                let us = node.round_trip_microseconds;
                Span::plain(us.map_or(String::new(), |us| human(Duration::from_micros(us))))
            })
            .render(canvas);
        table + &missing_text(&self.missing_replicas, canvas)
    }
}
