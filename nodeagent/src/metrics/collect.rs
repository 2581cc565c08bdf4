//! All metrics with their names, written at each scrape.

use kplane_http::metrics::{Labels, Name};
use std::fmt;
use std::time::Duration;

use kplane_model::Family;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::counters::{Distribution, Gauge};
use super::numbers::{Numbers, float};
use super::{FamilyCounters, Histogram, Sources, connections, loopback, policies, proxy};
use crate::healthz::Outcomes;
use kplane_dataplane::backend::iptables::PacketCounts;
use kplane_dataplane::backend::{Failures, RuleCounts};
use kplane_dataplane::conntrack::{ConntrackTotals, bucket_bound};

/// kube-proxy's metrics (section (h)), as far as they belong to the backend's mode.
#[derive(Debug)]
pub(super) struct KubeProxy(pub(super) Sources);

/// kplane's own metrics.
#[derive(Debug)]
pub(super) struct Agent(pub(super) Sources);

/// The labels of the families, as kube-proxy writes them.
const FAMILIES: [&Labels<'static>; 2] = [&[("ip_family", "IPv4")], &[("ip_family", "IPv6")]];

/// The labels of the internal and external policy of both families.
const POLICIES: [[&Labels<'static>; 2]; 2] = [
    [
        &[("ip_family", "IPv4"), ("traffic_policy", "internal")],
        &[("ip_family", "IPv4"), ("traffic_policy", "external")],
    ],
    [
        &[("ip_family", "IPv6"), ("traffic_policy", "internal")],
        &[("ip_family", "IPv6"), ("traffic_policy", "external")],
    ],
];

const PHASES: [&str; 3] = ["plan", "encode", "kernel"];

type Label = (&'static str, &'static str);
type Series<'a, T> = [(&'a Labels<'a>, T); 2];

impl Sources {
    fn counters(&self) -> [&FamilyCounters; 2] {
        Family::ALL.map(|family| self.counters.family(family))
    }

    /// Returns one number for each family.
    fn each(&self, of: impl Fn(&FamilyCounters) -> f64) -> Series<'_, f64> {
        let [v4, v6] = self.counters().map(of);
        [(FAMILIES[0], v4), (FAMILIES[1], v6)]
    }

    /// Returns one histogram for each family.
    fn each_histogram(
        &self,
        of: impl Fn(&FamilyCounters) -> &Histogram,
    ) -> Series<'_, Distribution> {
        let [v4, v6] = self.counters();
        [(FAMILIES[0], of(v4).read()), (FAMILIES[1], of(v6).read())]
    }
}

impl Collector for KubeProxy {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        self.durations(&mut to)?;
        self.changes(&mut to)?;
        self.no_local_endpoints(&mut to)?;
        self.conntrack(&mut to)?;
        self.health(&mut to)
    }
}

impl KubeProxy {
    fn durations(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let from = &self.0;
        Name(
            "kubeproxy_sync_proxy_rules_duration_seconds",
            "Duration of one attempt to update the kernel",
        )
        .histogram(to, from.each_histogram(|c| &c.sync))?;
        if from.backend.metrics.full_and_partial {
            self.full_and_partial(to)?;
        }
        Name(
            "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
            "Last time at which the kernel held the desired state",
        )
        .gauge(to, from.each(|c| seconds(c.synced_at_ms.get())))?;
        Name(
            "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
            "Last time at which a change arrived",
        )
        .gauge(to, from.each(|c| seconds(c.queued_at_ms.get())))?;
        Name(
            "kubeproxy_network_programming_duration_seconds",
            "Time from the change of a Service or pod until the kernel held it",
        )
        .histogram(to, from.each_histogram(|c| &c.programming))?;
        match from.backend.metrics.failures {
            Failures::Nftables => self.nftables(to)?,
            Failures::Restore => self.restores(to)?,
        }
        if from.backend.metrics.rules {
            self.rules_of_iptables(to)?;
        }
        Ok(())
    }

    /// Writes the metrics of all modes but IPVS.
    fn full_and_partial(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let from = &self.0;
        Name(
            "kubeproxy_sync_full_proxy_rules_duration_seconds",
            "Duration of one attempt that checked everything",
        )
        .histogram(to, from.each_histogram(|c| &c.full))?;
        Name(
            "kubeproxy_sync_partial_proxy_rules_duration_seconds",
            "Duration of one attempt that checked only changes",
        )
        .histogram(to, from.each_histogram(|c| &c.partial))
    }

    /// Writes the metrics of mode nftables alone.
    fn nftables(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let from = &self.0;
        Name(
            "kubeproxy_sync_proxy_rules_nftables_sync_failures",
            "Failed attempts to program the kernel",
        )
        .counter(to, from.each(|c| float(c.failures.get())))?;
        // kplane has no separate clean-ups that could fail.
        Name(
            "kubeproxy_sync_proxy_rules_nftables_cleanup_failures",
            "Failed cleanups of stale chains; always 0, because kplane needs none",
        )
        .counter(to, from.each(|_| 0.0))?;
        loopback::write(to)
    }

    /// Writes the metrics of modes iptables and IPVS.
    fn restores(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        Name(
            "kubeproxy_sync_proxy_rules_iptables_restore_failures",
            "Failed attempts to program the kernel",
        )
        .counter(to, self.0.each(|c| float(c.failures.get())))
    }

    /// Writes the metrics of mode iptables alone.
    fn rules_of_iptables(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let from = &self.0;
        Name(
            "kubeproxy_sync_proxy_rules_iptables_partial_restore_failures",
            "Failed attempts to program only changes",
        )
        .counter(to, from.each(|c| float(c.partial_failures.get())))?;
        // This is a gauge in spite of its name, as in kube-proxy.
        Name(
            "kubeproxy_sync_proxy_rules_iptables_total",
            "Rules of iptables that belong to kplane",
        )
        .gauge(to, by_table(&self.rules(|c| &c.rules)))?;
        Name(
            "kubeproxy_sync_proxy_rules_iptables_last",
            "Rules of iptables that the last change wrote",
        )
        .gauge(to, by_table(&self.rules(|c| &c.rules_last)))?;
        self.packets(to)
    }

    /// Writes the packets counted by rules (C7, C8), where the kernel counts them.
    fn packets(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let counts = PacketCounts::read();
        let one = |value: Option<u64>| value.map(|value| (&[] as &Labels<'_>, float(value)));
        Name(
            "kubeproxy_iptables_ct_state_invalid_dropped_packets",
            "Packets dropped because connection tracking found them invalid",
        )
        .counter(to, one(counts.invalid_dropped))?;
        Name(
            "kubeproxy_iptables_localhost_nodeports_accepted_packets",
            "Packets accepted for node ports on the loopback address",
        )
        .counter(to, one(counts.localhost_accepted))
    }

    fn rules(&self, of: fn(&FamilyCounters) -> &[Gauge; 2]) -> Vec<([Label; 2], f64)> {
        let families = self.0.counters().into_iter().zip(FAMILIES);
        let series = families.flat_map(|(counters, family)| {
            let gauges = of(counters).iter().zip(RuleCounts::TABLES);
            gauges.map(|(gauge, table)| ([family[0], ("table", table)], float(gauge.get())))
        });
        series.collect()
    }

    fn changes(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let from = &self.0;
        let sum = |of: fn(&FamilyCounters) -> u64| from.counters().map(of).iter().sum::<u64>();
        let one = |value: u64| [(&[] as &Labels<'_>, float(value))];
        Name(
            "kubeproxy_sync_proxy_rules_endpoint_changes_pending",
            "Changes of endpoints that the kernel does not hold yet",
        )
        .gauge(to, one(sum(|c| c.endpoint_pending.get())))?;
        Name(
            "kubeproxy_sync_proxy_rules_endpoint_changes",
            "Changes of endpoints, counted for each ServicePort",
        )
        .counter(to, one(sum(|c| c.endpoint_changes.get())))?;
        Name(
            "kubeproxy_sync_proxy_rules_service_changes_pending",
            "Changes of Services that the kernel does not hold yet",
        )
        .gauge(to, one(sum(|c| c.service_pending.get())))?;
        Name(
            "kubeproxy_sync_proxy_rules_service_changes",
            "Changes of Services, counted for each ServicePort",
        )
        .counter(to, one(sum(|c| c.service_changes.get())))
    }

    fn no_local_endpoints(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let families = self.0.counters().into_iter().zip(POLICIES);
        let series = families.flat_map(|(counters, labels)| {
            let gauges = counters.no_local.iter().zip(labels);
            gauges.map(|(gauge, labels)| (labels, float(gauge.get())))
        });
        // This is a gauge in spite of its name, as in kube-proxy.
        Name(
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
            "ServicePorts with traffic policy Local that have endpoints, but none on this node",
        )
        .gauge(to, series)
    }

    fn conntrack(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let totals = self.0.conntrack.totals();
        let deleted = totals.each_ref().map(|totals| float(totals.deleted));
        Name(
            "kubeproxy_conntrack_reconciler_sync_duration_seconds",
            "Duration of one search for stale connection tracking entries",
        )
        .histogram(to, FAMILIES.into_iter().zip(totals.map(|t| searches(&t))))?;
        Name(
            "kubeproxy_conntrack_reconciler_deleted_entries",
            "Stale connection tracking entries that were deleted",
        )
        .counter(to, FAMILIES.into_iter().zip(deleted))
    }

    fn health(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        const CODES: [&Labels<'static>; 2] = [&[("code", "200")], &[("code", "503")]];
        let series = |outcomes: &Outcomes| {
            let counts = outcomes.counts().map(|(_, count)| float(count));
            CODES.into_iter().zip(counts).collect::<Vec<_>>()
        };
        let answers = &self.0.answers;
        Name("kubeproxy_proxy_healthz", "Answers of /healthz")
            .counter(to, series(&answers.healthz))?;
        Name("kubeproxy_proxy_livez", "Answers of /livez").counter(to, series(&answers.livez))
    }
}

fn by_table(series: &[([Label; 2], f64)]) -> impl Iterator<Item = (&Labels<'_>, f64)> {
    series.iter().map(|(labels, value)| (&labels[..], *value))
}

/// Returns the durations of searches for outdated entries.
fn searches(totals: &ConntrackTotals) -> Distribution {
    let seconds = |bound: Option<Duration>| bound.map_or(f64::INFINITY, |b| b.as_secs_f64());
    let counts = totals.durations.iter().enumerate();
    let counts = counts.map(|(bucket, count)| (seconds(bucket_bound(bucket)), *count));
    (totals.duration_sum.as_secs_f64(), counts.collect())
}

impl Collector for Agent {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let report = Numbers::of(&self.0.reports.borrow(), &self.0.connection.borrow());
        self.state(&mut to, &report)?;
        self.work(&mut to, &report)?;
        self.service_health(&mut to)?;
        if let Some(proxy) = self.0.proxy.get() {
            proxy::write(&*proxy, &mut to)?;
        }
        if let Some(connections) = &self.0.connections {
            connections::write(connections, &mut to)?;
        }
        let departing = self.0.counters.departing.read();
        let labels = departing
            .each_ref()
            .map(|(outcome, _)| [("outcome", *outcome)]);
        let series = labels.iter().zip(departing);
        Name(
            "kplane_agent_pre_stop_wait_duration_seconds",
            "Time that preStop hooks of Pods waited until no kernel led to the Pod, by outcome",
        )
        .histogram(
            &mut to,
            series.map(|(labels, (_, times))| (&labels[..], times)),
        )?;
        if let Some(panics) = kplane_http::panics::seen() {
            Name(
                "kplane_agent_panics",
                "Parts of the agent that ended by a bug",
            )
            .counter(&mut to, [(&[] as &Labels<'_>, float(panics.count))])?;
        }
        let version: &Labels<'_> = &[
            ("version", env!("CARGO_PKG_VERSION")),
            ("backend", self.0.backend.name),
        ];
        Name(
            "kplane_agent_build_info",
            "Version and backend of the agent; always 1",
        )
        .gauge(&mut to, [(version, 1.0)])
    }
}

impl Agent {
    fn state(&self, to: &mut DescriptorEncoder<'_>, report: &Numbers) -> fmt::Result {
        let [held, applied, verified] = report.revisions.map(float);
        let revisions: [(&Labels<'_>, _); 3] = [
            (&[("state", "held")], held),
            (&[("state", "applied")], applied),
            (&[("state", "verified")], verified),
        ];
        Name(
            "kplane_agent_revision",
            "Revision of the desired state that the agent has (held), that the kernel holds \
             (applied), that was read back from the kernel (verified)",
        )
        .gauge(to, revisions)?;
        let families = |values: [bool; 2]| FAMILIES.into_iter().zip(values.map(f64::from));
        Name(
            "kplane_agent_family_programmed",
            "1 if the kernel holds the desired state of the family",
        )
        .gauge(to, families(report.programmed))?;
        Name(
            "kplane_agent_family_failing",
            "1 while the family cannot be programmed, or differs after changes by another program",
        )
        .gauge(to, families(report.failing))?;
        Name(
            "kplane_agent_family_verified_timestamp_seconds",
            "Last time at which the kernel was read back and held the desired state",
        )
        .gauge(
            to,
            FAMILIES.into_iter().zip(report.verified_at_ms.map(seconds)),
        )?;
        let failures: [(&Labels<'_>, f64); 2] = [
            (&[("state", "failed")], float(report.failed)),
            (&[("state", "degraded")], float(report.degraded)),
        ];
        Name(
            "kplane_agent_failures",
            "Objects that are not served (failed), or not in every respect (degraded)",
        )
        .gauge(to, failures)?;
        self.stream(to, report)?;
        let [unnamed, bare] = report.held.map(float);
        let held: [(&Labels<'_>, f64); 2] = [
            (&[("lacks", "name")], unnamed),
            (&[("lacks", "endpoints")], bare),
        ];
        Name(
            "kplane_agent_held_services",
            "Services that are served although they or their endpoints are missing from the source",
        )
        .gauge(to, held)?;
        policies::encode(to, &report.policies, FAMILIES)?;
        Name("kplane_agent_service_ports", "ServicePorts desired")
            .gauge(to, [(&[] as &Labels<'_>, float(report.counts.services))])?;
        Name("kplane_agent_endpoints", "Endpoints desired")
            .gauge(to, [(&[] as &Labels<'_>, float(report.counts.endpoints))])
    }

    /// Encodes what the stream says.
    fn stream(&self, to: &mut DescriptorEncoder<'_>, report: &Numbers) -> fmt::Result {
        let connected = f64::from(self.0.connection.borrow().live);
        Name(
            "kplane_agent_connected",
            "1 if the agent is connected to the control plane",
        )
        .gauge(to, [(&[] as &Labels<'_>, connected)])?;
        let frozen = f64::from(self.0.connection.borrow().frozen.is_some());
        Name(
            "kplane_agent_frozen",
            "1 if an operator froze the node: it takes no newer Services until it is thawed",
        )
        .gauge(to, [(&[] as &Labels<'_>, frozen)])?;
        Name(
            "kplane_agent_stale_since_timestamp_seconds",
            "Time since which no control plane confirms what the node serves; 0 while one does",
        )
        .gauge(to, [(&[] as &Labels<'_>, seconds(report.stale_since_ms))])
    }

    fn work(&self, to: &mut DescriptorEncoder<'_>, report: &Numbers) -> fmt::Result {
        let from = &self.0;
        let phases: Vec<_> = from
            .counters()
            .into_iter()
            .zip(FAMILIES)
            .flat_map(|(counters, family)| {
                let phases = PHASES.iter().zip(&counters.phases);
                phases.map(move |(phase, took)| ([family[0], ("phase", *phase)], took))
            })
            .collect();
        Name(
            "kplane_agent_sync_phase_duration_seconds",
            "Duration of each step of a change that the kernel accepted",
        )
        .histogram(
            to,
            phases
                .iter()
                .map(|(labels, took)| (&labels[..], took.read())),
        )?;
        let outcomes: [(&Labels<'_>, f64); 2] = [
            (&[("result", "ok")], float(report.syncs_ok)),
            (&[("result", "failed")], float(report.syncs_failed)),
        ];
        Name("kplane_agent_syncs", "Attempts to apply an update").counter(to, outcomes)?;
        Name(
            "kplane_agent_kernel_operations",
            "Operations sent to the kernel",
        )
        .counter(to, from.each(|c| float(c.operations.get())))?;
        Name("kplane_agent_kernel_bytes", "Bytes sent to the kernel")
            .counter(to, from.each(|c| float(c.bytes.get())))?;
        Name(
            "kplane_agent_drift_repairs",
            "Changes by other programs that the agent repaired",
        )
        .counter(to, FAMILIES.into_iter().zip(report.repairs.map(float)))?;
        Name(
            "kplane_agent_snapshots",
            "Snapshots taken; an agent that connects again with an unchanged state needs none",
        )
        .counter(to, [(&[] as &Labels<'_>, float(report.snapshots))])?;
        Name(
            "kplane_agent_older_states",
            "Times that a control plane showed an older state than the node holds; such a state is not applied",
        )
        .counter(to, [(&[] as &Labels<'_>, float(report.older_states))])?;
        Name(
            "kplane_agent_unknown_objects",
            "Objects of kinds that this version does not know",
        )
        .counter(to, [(&[] as &Labels<'_>, float(report.unknown_kinds))])
    }

    fn service_health(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let counters = &self.0.counters;
        let servers: [(&Labels<'_>, f64); 2] = [
            (
                &[("state", "open")],
                float(counters.service_health_open.get()),
            ),
            (
                &[("state", "failing")],
                float(counters.service_health_closed.get()),
            ),
        ];
        Name(
            "kplane_agent_service_health_servers",
            "Health check node ports, by family and Service",
        )
        .gauge(to, servers)?;
        let failures = float(counters.service_health_failures.get());
        Name(
            "kplane_agent_service_health_listen_failures",
            "Failed attempts to open a health check node port",
        )
        .counter(to, [(&[] as &Labels<'_>, failures)])
    }
}

/// Converts milliseconds since 1970 to seconds.
fn seconds(ms: u64) -> f64 {
    float(ms) / 1_000.0
}
