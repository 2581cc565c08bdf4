//! Nodes: their state, what they hold, and why not.

pub mod state;

use std::time::Duration;

use kplane_model::Reason;
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
use crate::wire::{FromWire, known, view_of};

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

view_of! {
    /// Totals of what an agent holds.
    pub struct ObjectsView: ObjectCounts {
        services: u64,
        endpoints: u64,
    }

    /// What a node enforces of the NetworkPolicies.
    pub struct EnforcedView: EnforcedPolicies {
        /// The number of policies that select a Pod of the node.
        policies: u64,
        /// The number of its Pods with addresses of their own, and how many of them some policy isolates.
        pods: u64,
        isolated_pods: u64 = isolated,
        /// The number of elements in the kernel.
        elements: u64,
    }

    /// The course of the last update.
    pub struct SyncView: SyncStats {
        revision: u64,
        finished: Option<Time> = finished_at_ms,
        total_microseconds: u64 = total_us,
        plan_microseconds: u64 = plan_us,
        encode_microseconds: u64 = encode_us,
        kernel_microseconds: u64 = kernel_us,
        operations: u64,
        bytes: u64,
        /// Time from the change in the cluster until the kernel held it.
        end_to_end_milliseconds: Option<u64> = end_to_end_ms,
    }

    /// The time that the latest changes in the cluster took until the kernel held them.
    pub struct ProgrammingView: NetworkProgramming {
        /// The number of these changes.
        count: u32,
        last_milliseconds: u64 = last_ms,
        p50_milliseconds: u64 = p50_ms,
        max_milliseconds: u64 = max_ms,
        last_time: Option<Time> = last_at_ms,
    }

    /// An object that the kernel does not hold as desired.
    pub struct FailureView: ObjectFailure {
        object: Option<KeyView> = key,
        reason: String,
        since: Option<Time> = since_ms,
        degraded: bool,
        /// Whether it is about NetworkPolicies.
        policies: bool,
    }

    /// Services that a node serves although the source does not name them (any more). If both numbers are
    /// 0, the agent does not know what its kernel serves, and leaves the kernel as it is.
    pub struct HeldView: Held {
        services: u64,
        without_endpoints: u64,
        reason: String,
        since: Option<Time> = since_ms,
        /// A few of their names.
        examples: Vec<String>,
    }

    /// The state of one address family of a node.
    pub struct FamilyView: FamilyStatus {
        family: &'static str => |of| family(known(of)),
        programmed: bool,
        error: String,
        error_since: Option<Time> = error_since_ms,
        /// The last time when the kernel was compared with what it should hold, and was equal.
        verified_time: Option<Time> = verified_at_ms,
        /// The number of repairs of other programs' changes since the agent started.
        repairs: u64,
        last_repair_time: Option<Time> = last_repair_ms,
        /// The last change that was repaired, and the program that made it; empty = none.
        last_repair: String,
        /// The rules; `null` for backends whose rules do not grow with the number of Services.
        rules: Option<RulesView>,
        /// The virtual servers; `null` for backends without them.
        ipvs: Option<ServersView> = servers,
    }

    /// The numbers of rules of a backend that has rules for each Service.
    pub struct RulesView: RuleStats {
        rules: u64,
        lookups: u64,
        lookups_in_one_list: u64,
    }
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
    /// The NetworkPolicies; `null` when the node enforces none.
    pub(crate) policies: Option<EnforcedView>,
}

view_of! {
    /// An endpoint that the userspace proxy of a node avoids.
    pub struct AvoidedView: AvoidedEndpoint {
        port: KeyView = key,
        address: String,
    }
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
        let mut report = node.report.unwrap_or_default();
        report.avoided.retain(|avoided| avoided.key.is_some());
        Self {
            name: node.name,
            state,
            since: Time::from_wire(node.since_ms),
            last_error: node.last_error,
            backend: node.backend,
            agent_version: node.agent_version,
            peer: node.peer,
            replica: FromWire::from_wire(node.replica),
            last_heard: Time::from_wire(node.last_heard_ms),
            zone: node.zone,
            addresses: node.addresses,
            pod_cidrs: node.pod_cidrs,
            revisions,
            objects: FromWire::from_wire(report.objects),
            held: FromWire::from_wire(report.held),
            last_sync: FromWire::from_wire(report.last_sync),
            network_programming: FromWire::from_wire(node.network_programming),
            round_trip_microseconds: FromWire::from_wire(report.round_trip_us),
            syncs_ok: report.syncs_ok,
            syncs_failed: report.syncs_failed,
            unknown_kinds: report.unknown_kinds,
            families: FromWire::from_wire(report.families),
            failures: FromWire::from_wire(report.failures),
            findings: FromWire::from_wire(report.findings),
            avoided: FromWire::from_wire(report.avoided),
            policies: FromWire::from_wire(report.policies),
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
        self.families
            .iter()
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
        self.findings
            .iter()
            .filter(|of| !of.is_info())
            .filter(|_| self.state != NodeStateView::Disconnected)
    }

    /// Returns whether something on the node drops packets.
    pub(crate) fn is_obstructed(&self) -> bool {
        self.obstacles().any(FindingView::is_error)
    }

    /// Returns whether the node does not enforce NetworkPolicies as they are written.
    pub(crate) fn misses_policies(&self) -> bool {
        self.failures.iter().any(|failure| failure.policies)
    }

    /// Returns whether the agent cannot tell which unknown Pods are the node's.
    pub(crate) fn lacks_pod_ranges(&self) -> bool {
        let unknown = Reason::PodRangeUnknown.code();
        self.obstacles().any(|finding| finding.code == unknown)
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

/// Returns the names of nodes for `-o name`.
pub fn names_of(nodes: &[NodeView]) -> Vec<String> {
    nodes.iter().map(|node| format!("node/{}", node.name)).collect()
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
            missing_replicas: FromWire::from_wire(fleet.missing_replicas),
            items: nodes.map(|node| NodeView::new(node, control_plane.epoch)).collect(),
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
        let enforces = self.items.iter().any(|node| node.policies.is_some());
        let heard = |node: &NodeView| match (node.last_heard, self.now) {
            (Some(heard), Some(now)) => Span::plain(heard.age_text(now)),
            _ => Span::none(),
        };
        let table = Table::new(&self.items)
            .column(Column::new("NODE").elastic(24).names(), NodeView::name_span)
            .column(Column::new("STATE"), NodeView::state_span)
            .text(Column::new("ZONE").elastic(8).optional(3), |node| {
                &node.zone
            })
            .text(Column::new("BACKEND").optional(1), |node| &node.backend)
            .text(Column::new("VERSION").elastic(7).optional(0), |node| {
                &node.agent_version
            })
            .column(Column::new("HEARD").optional(2), heard)
            .text(Column::new("ADDRESS").optional(4), |node| {
                node.addresses.first().map_or("", String::as_str)
            })
            .text(Column::wide("OTHER-ADDRESSES"), |node| {
                node.addresses.get(1..).unwrap_or_default().join(",")
            })
            .text(Column::wide("POD-CIDRS"), |node| node.pod_cidrs.join(","))
            .text(Column::wide("PEER"), |node| &node.peer)
            .column_if(others, Column::wide("REPLICA"), NodeView::replica_span)
            .column_if(enforces, Column::wide("POLICIES"), |node| {
                let policies = node.policies.as_ref();
                Span::plain(policies.map_or(String::new(), |of| of.policies.to_string()))
            })
            .column(Column::wide("RTT"), |node| {
                let us = node.round_trip_microseconds;
                Span::plain(us.map_or(String::new(), |us| human(Duration::from_micros(us))))
            })
            .render(canvas);
        table + &missing_text(&self.missing_replicas, canvas)
    }
}
