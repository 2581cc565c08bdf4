//! The control plane's metrics. No label contains the name of a Service or node, so the number of
//! series does not grow with the cluster.

use std::fmt;
use std::sync::Arc;

use kplane_fleet::hub::Hub;
use kplane_http::metrics::{Labels, Name, Process};
use kplane_model::Family;
use kplane_operate::server::census;
use kplane_picture::index::Totals;
use kplane_picture::k8s::Kind;
use kplane_picture::source::upstream::KindState;
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

const ALONE: &Labels<'_> = &[];

/// Writes how much of the ServiceCIDRs is taken.
fn ranges(totals: &Totals, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let by_family = |name, help, of: &dyn Fn(Family) -> f64, to: &mut DescriptorEncoder<'_>| {
        let labels = Family::ALL.map(|family| ([("ip_family", family.as_str())], of(family)));
        let series = labels.iter();
        Name(name, help).gauge(to, series.map(|(labels, value)| (&labels[..], *value)))
    };
    by_family(
        "kplane_controlplane_cluster_ips",
        "ClusterIPs of Services with a served port",
        &|family| totals.taken.cluster_ips.of(family) as f64,
        to,
    )?;
    by_family(
        "kplane_controlplane_service_addresses",
        "Addresses that Services can get, by the ServiceCIDRs",
        &|family| totals.service_addresses.of(family) as f64,
        to,
    )
}

impl Plane {
    fn published(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let head = *self.0.store.head().borrow();
        let summary = self.0.summary().borrow().clone();
        let mut gauge = |name, help, value: f64| Name(name, help).gauge(to, [(ALONE, value)]);
        gauge(
            "kplane_controlplane_revision",
            "Newest revision that was published",
            head.revision as f64,
        )?;
        gauge(
            "kplane_controlplane_synced",
            "1 if every kind has been listed, so that agents are served",
            f64::from(u8::from(head.synced)),
        )?;
        gauge(
            "kplane_controlplane_services",
            "Services with a served port",
            summary.totals.services as f64,
        )?;
        gauge(
            "kplane_controlplane_endpoints",
            "Endpoints of all served ports, counted for each family",
            summary.totals.endpoints as f64,
        )?;
        gauge(
            "kplane_controlplane_node_ports",
            "Node ports of Services, those of health checks included",
            summary.totals.taken.node_ports as f64,
        )?;
        gauge(
            "kplane_controlplane_network_policies",
            "NetworkPolicies and ClusterNetworkPolicies that nodes enforce",
            summary.totals.policies as f64,
        )?;
        gauge(
            "kplane_controlplane_policy_pods",
            "Pods with addresses of their own, if nodes enforce NetworkPolicies",
            summary.totals.policy_pods as f64,
        )?;
        gauge(
            "kplane_controlplane_issues",
            "Problems with the input or its source",
            self.0.issues().len() as f64,
        )?;
        let held = summary.held.as_deref();
        gauge(
            "kplane_controlplane_held_services",
            "Services that are served although they are missing from the source",
            held.map_or(0, |held| held.services) as f64,
        )?;
        gauge(
            "kplane_controlplane_held_without_endpoints",
            "Services whose endpoints are kept although all are missing from the source",
            held.map_or(0, |held| held.without_endpoints) as f64,
        )?;
        gauge(
            "kplane_controlplane_picture_partial",
            "1 if the source was not read completely, so that objects may be missing",
            f64::from(u8::from(self.0.store.trust().is_partial())),
        )?;
        ranges(&summary.totals, to)
    }

    fn agents(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let census = census(&self.0);
        let labels = census.states.keys().map(|state| [("state", *state)]);
        let labels: Vec<_> = labels.collect();
        let series = labels.iter().zip(census.states.values());
        let series = series.map(|(labels, count)| (&labels[..], *count as f64));
        Name(
            "kplane_controlplane_nodes",
            "Nodes by the state of their agent",
        )
        .gauge(to, series)?;
        let found = census.findings.iter();
        let found: Vec<_> = found
            .map(|(code, n)| ([("code", *code)], *n as f64))
            .collect();
        Name(
            "kplane_controlplane_node_findings",
            "Nodes of connected agents by what may stand in the way of their packets",
        )
        .gauge(
            to,
            found.iter().map(|(labels, count)| (&labels[..], *count)),
        )?;
        let connected = census.connected as f64;
        Name(
            "kplane_controlplane_streams",
            "Streams of agents, one for each connected agent",
        )
        .gauge(to, [(ALONE, connected)])?;
        Name(
            "kplane_controlplane_applied_lag_seconds",
            "Time for which the kernels of connected agents have lacked a change: the nodes at this moment, not a total",
        )
        .histogram(to, [(ALONE, census.lags.distribution())])?;
        let counts = self.0.snapshots.counts();
        let series: [(&Labels<'_>, f64); 2] = [
            (&[("result", "begun")], counts.begun as f64),
            (&[("result", "refused")], counts.refused as f64),
        ];
        Name(
            "kplane_controlplane_snapshots",
            "Agents that needed a snapshot: begun, and refused because too many needed one",
        )
        .counter(to, series)?;
        let series: [(&Labels<'_>, f64); 4] = [
            (&[("way", "equal")], counts.equal as f64),
            (&[("way", "changes")], counts.changes as f64),
            (&[("way", "ranges")], counts.ranges as f64),
            (&[("way", "snapshot")], counts.begun as f64),
        ];
        Name(
            "kplane_controlplane_resumes",
            "Agents that began to receive desired state, by what they got first",
        )
        .counter(to, series)
    }

    fn suspects(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let suspicions = self.0.suspects.now();
        let suspected = suspicions.nodes.len() as f64;
        let series: [(&Labels<'_>, f64); 2] = [
            (
                &[("mode", "act")],
                if suspicions.act { suspected } else { 0.0 },
            ),
            (
                &[("mode", "observe")],
                if suspicions.act { 0.0 } else { suspected },
            ),
        ];
        Name(
            "kplane_controlplane_suspected_nodes",
            "Nodes without a stream that their neighbours do not reach, by what is done about it (--dead-node)",
        )
        .gauge(to, series)?;
        Name(
            "kplane_controlplane_suspicions",
            "Nodes that were suspected since the start, each time they were",
        )
        .counter(to, [(ALONE, self.0.suspects.begun() as f64)])
    }

    fn timings(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let timings = &self.0.fleet.timings;
        let hops = timings.hops();
        let labels: Vec<_> = hops.iter().map(|(hop, _)| [("hop", *hop)]).collect();
        let hops = labels.iter().zip(&hops);
        Name(
            "kplane_controlplane_change_hop_duration_seconds",
            "Time that a change takes at each hop on its way to a kernel",
        )
        .histogram(
            to,
            hops.map(|(labels, (_, durations))| (&labels[..], durations.distribution())),
        )?;
        Name(
            "kplane_controlplane_change_programmed_duration_seconds",
            "Time from a change until the control plane had a node's report that its kernel holds it",
        )
        .histogram(to, [(ALONE, timings.programmed().distribution())])
    }

    fn upstream(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let age = self.0.upstream_age().as_secs_f64();
        Name(
            "kplane_controlplane_upstream_age_seconds",
            "Time since the data of the stalest kind was known to be current",
        )
        .gauge(to, [(ALONE, age)])?;
        let kinds = self.0.upstream.kinds();
        if kinds.is_empty() {
            return Ok(());
        }
        let mut gauge = |name, help, value: fn(&KindState) -> f64| {
            let all: Vec<_> = kinds.iter().map(|(k, s)| (label(*k), value(s))).collect();
            Name(name, help).gauge(to, all.iter().map(|(label, value)| (&label[..], *value)))
        };
        gauge(
            "kplane_controlplane_source_age_seconds",
            "Time since the data of a kind was known to be current",
            |s| s.current_at.unwrap_or(s.started).elapsed().as_secs_f64(),
        )?;
        gauge(
            "kplane_controlplane_source_synced",
            "1 if a kind has been listed",
            |s| f64::from(u8::from(s.synced)),
        )?;
        let mut counter = |name, help, value: fn(&KindState) -> u64| {
            let all = kinds.iter().map(|(k, s)| (label(*k), value(s) as f64));
            let all: Vec<_> = all.collect();
            Name(name, help).counter(to, all.iter().map(|(label, value)| (&label[..], *value)))
        };
        counter(
            "kplane_controlplane_source_lists",
            "Complete lists that were accepted",
            |s| s.counts.lists,
        )?;
        counter(
            "kplane_controlplane_source_events",
            "Changes that watches reported",
            |s| s.counts.events,
        )?;
        counter(
            "kplane_controlplane_source_replays",
            "Reported changes that were already known",
            |s| s.counts.replays,
        )?;
        let failures = kinds.iter().flat_map(|(kind, state)| {
            let reasons = state.counts.failures.iter();
            reasons.map(|(reason, count)| {
                (
                    [("kind", kind.as_str()), ("reason", *reason)],
                    *count as f64,
                )
            })
        });
        let failures: Vec<_> = failures.collect();
        Name(
            "kplane_controlplane_source_failures",
            "Failed requests, broken watches and doubtful lists",
        )
        .counter(
            to,
            failures.iter().map(|(labels, count)| (&labels[..], *count)),
        )
    }
}

fn label(kind: Kind) -> [(&'static str, &'static str); 1] {
    [("kind", kind.as_str())]
}
