//! The control plane's metrics. No label contains the name of a Service or node, so the number of
//! series does not grow with the cluster.

use std::fmt;
use std::sync::Arc;

use kplane_agents::hub::Hub;
use kplane_desired_state::index::Totals;
use kplane_desired_state::source::upstream::KindState;
use kplane_http::metrics::{Metric, Process, alone};
use kplane_model::Family;
use kplane_status_api::server::census;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Registry;

use super::ports::Ports;
use super::work::{Own, Work};

/// Registers all metrics.
pub(super) fn registry(hub: Arc<Hub>, ports: Ports, own: Own) -> Registry {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Plane(Arc::clone(&hub))));
    registry.register_collector(Box::new(Work { hub, own }));
    registry.register_collector(Box::new(ports));
    registry.register_collector(Box::new(Process));
    registry
}

/// Metrics of the hub, read at each scrape.
#[derive(Debug)]
struct Plane(Arc<Hub>);

impl Collector for Plane {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        self.published(&mut to)?;
        self.agents(&mut to)?;
        self.suspects(&mut to)?;
        self.timings(&mut to)?;
        self.upstream(&mut to)
    }
}

/// Writes how much of the ServiceCIDRs is taken.
fn ranges(totals: &Totals, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let labels = |family: Family| [("ip_family", family.as_str())];
    let taken = |family| (labels(family), totals.taken.cluster_ips.of(family) as f64);
    Metric::new("kplane_controlplane_cluster_ips")
        .help("ClusterIPs of Services with a served port")
        .gauge(to, Family::ALL.map(taken))?;
    let all = |family| (labels(family), totals.service_addresses.of(family) as f64);
    Metric::new("kplane_controlplane_service_addresses")
        .help("Addresses that Services can get, by the ServiceCIDRs")
        .gauge(to, Family::ALL.map(all))
}

impl Plane {
    fn published(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let head = *self.0.store().head().borrow();
        let summary = self.0.index().summary().borrow().clone();
        let totals = &summary.totals;
        Metric::new("kplane_controlplane_revision")
            .help("Newest revision that was published")
            .gauge(to, [alone(head.revision as f64)])?;
        Metric::new("kplane_controlplane_synced")
            .help("1 if every kind has been listed, so that agents are served")
            .gauge(to, [alone(f64::from(head.synced))])?;
        Metric::new("kplane_controlplane_services")
            .help("Services with a served port")
            .gauge(to, [alone(totals.services as f64)])?;
        Metric::new("kplane_controlplane_endpoints")
            .help("Endpoints of all served ports, counted for each family")
            .gauge(to, [alone(totals.endpoints as f64)])?;
        Metric::new("kplane_controlplane_node_ports")
            .help("Node ports of Services, those of health checks included")
            .gauge(to, [alone(totals.taken.node_ports as f64)])?;
        Metric::new("kplane_controlplane_network_policies")
            .help("NetworkPolicies and ClusterNetworkPolicies that nodes enforce")
            .gauge(to, [alone(totals.policies as f64)])?;
        let enforces = self.0.replica().network_policies;
        Metric::new("kplane_controlplane_enforces_network_policies")
            .help("1 if the replica has nodes enforce NetworkPolicies")
            .gauge(to, [alone(f64::from(enforces))])?;
        Metric::new("kplane_controlplane_policy_pods")
            .help("Pods with addresses of their own, if nodes enforce NetworkPolicies")
            .gauge(to, [alone(totals.policy_pods as f64)])?;
        Metric::new("kplane_controlplane_issues")
            .help("Problems with the input or its source")
            .gauge(to, [alone(self.0.issues().len() as f64)])?;
        let held = summary.held.as_deref();
        let unserved = held.map_or(0, |held| held.without_endpoints);
        Metric::new("kplane_controlplane_held_services")
            .help("Services that are served although they are missing from the source")
            .gauge(to, [alone(held.map_or(0, |held| held.services) as f64)])?;
        Metric::new("kplane_controlplane_held_without_endpoints")
            .help("Services whose endpoints are kept although all are missing from the source")
            .gauge(to, [alone(unserved as f64)])?;
        Metric::new("kplane_controlplane_picture_partial")
            .help("1 if the source was not read completely, so that objects may be missing")
            .gauge(to, [alone(f64::from(self.0.store().trust().is_partial()))])?;
        ranges(totals, to)
    }

    fn agents(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let census = census(&self.0);
        let series =
            census.states.iter().map(|(state, count)| ([("state", *state)], *count as f64));
        Metric::new("kplane_controlplane_nodes")
            .help("Nodes by the state of their agent")
            .gauge(to, series)?;
        let found = census.findings.iter().map(|(code, n)| ([("code", *code)], *n as f64));
        Metric::new("kplane_controlplane_node_findings")
            .help("Nodes of connected agents by what may stand in the way of their packets")
            .gauge(to, found)?;
        let connected = census.connected as f64;
        Metric::new("kplane_controlplane_streams")
            .help("Streams of agents, one for each connected agent")
            .gauge(to, [alone(connected)])?;
        Metric::new("kplane_controlplane_applied_lag_seconds")
            .help("Time for which the kernels of connected agents have lacked a change: the nodes at this moment, not a total")
            .histogram(to, [alone(census.lags.distribution())])?;
        let counts = self.0.streams().snapshots.counts();
        let series = [
            ([("result", "begun")], counts.begun as f64),
            ([("result", "refused")], counts.refused as f64),
        ];
        Metric::new("kplane_controlplane_snapshots")
            .help("Agents that needed a snapshot: begun, and refused because too many needed one")
            .counter(to, series)?;
        let series = [
            ([("way", "equal")], counts.equal as f64),
            ([("way", "changes")], counts.changes as f64),
            ([("way", "ranges")], counts.ranges as f64),
            ([("way", "snapshot")], counts.begun as f64),
        ];
        Metric::new("kplane_controlplane_resumes")
            .help("Agents that began to receive desired state, by what they got first")
            .counter(to, series)
    }

    fn suspects(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let suspicions = self.0.suspects().now();
        let (act, suspected) = (suspicions.act, suspicions.nodes.len() as f64);
        let series = [
            ([("mode", "act")], if act { suspected } else { 0.0 }),
            ([("mode", "observe")], if act { 0.0 } else { suspected }),
        ];
        Metric::new("kplane_controlplane_suspected_nodes")
            .help("Nodes without a stream that their neighbours do not reach, by what is done about it (--dead-node)")
            .gauge(to, series)?;
        Metric::new("kplane_controlplane_suspicions")
            .help("Nodes that were suspected since the start, each time they were")
            .counter(to, [alone(self.0.suspects().begun() as f64)])
    }

    fn timings(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let timings = &self.0.agents().timings;
        let hops = timings.hops();
        let hops = hops.iter().map(|(hop, durations)| ([("hop", *hop)], durations.distribution()));
        Metric::new("kplane_controlplane_change_hop_duration_seconds")
            .help("Time that a change takes at each hop on its way to a kernel")
            .histogram(to, hops)?;
        Metric::new("kplane_controlplane_change_programmed_duration_seconds")
            .help("Time from a change until the control plane had a node's report that its kernel holds it")
            .histogram(to, [alone(timings.programmed().distribution())])
    }

    fn upstream(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let age = self.0.upstream_age().as_secs_f64();
        Metric::new("kplane_controlplane_upstream_age_seconds")
            .help("Time since the data of the stalest kind was known to be current")
            .gauge(to, [alone(age)])?;
        let kinds = self.0.upstream().kinds();
        if kinds.is_empty() {
            return Ok(());
        }
        let each = |value: fn(&KindState) -> f64| {
            kinds.iter().map(move |(kind, state)| ([("kind", kind.as_str())], value(state)))
        };
        Metric::new("kplane_controlplane_source_age_seconds")
            .help("Time since the data of a kind was known to be current")
            .gauge(
                to,
                each(|s| s.current_at.unwrap_or(s.started).elapsed().as_secs_f64()),
            )?;
        Metric::new("kplane_controlplane_source_synced")
            .help("1 if a kind has been listed")
            .gauge(to, each(|s| f64::from(s.synced)))?;
        Metric::new("kplane_controlplane_source_lists")
            .help("Complete lists that were accepted")
            .counter(to, each(|s| s.counts.lists as f64))?;
        Metric::new("kplane_controlplane_source_events")
            .help("Changes that watches reported")
            .counter(to, each(|s| s.counts.events as f64))?;
        Metric::new("kplane_controlplane_source_replays")
            .help("Reported changes that were already known")
            .counter(to, each(|s| s.counts.replays as f64))?;
        let failures = kinds.iter().flat_map(|(kind, state)| {
            state.counts.failures.iter().map(|(reason, count)| {
                let labels = [("kind", kind.as_str()), ("reason", *reason)];
                (labels, *count as f64)
            })
        });
        Metric::new("kplane_controlplane_source_failures")
            .help("Failed requests, broken watches and doubtful lists")
            .counter(to, failures)
    }
}
