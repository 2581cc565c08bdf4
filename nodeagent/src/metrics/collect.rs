//! All metrics with their names, written at each scrape.

use kplane_http::metrics::{Label, Metric, alone};
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
const FAMILIES: [[Label<'static>; 1]; 2] = [[("ip_family", "IPv4")], [("ip_family", "IPv6")]];

/// The labels of the internal and external policy of both families.
const POLICIES: [[[Label<'static>; 2]; 2]; 2] = [
    [
        [("ip_family", "IPv4"), ("traffic_policy", "internal")],
        [("ip_family", "IPv4"), ("traffic_policy", "external")],
    ],
    [
        [("ip_family", "IPv6"), ("traffic_policy", "internal")],
        [("ip_family", "IPv6"), ("traffic_policy", "external")],
    ],
];

const PHASES: [&str; 3] = ["plan", "encode", "kernel"];

type Series<T> = [([Label<'static>; 1], T); 2];

impl Sources {
    fn counters(&self) -> [&FamilyCounters; 2] {
        Family::ALL.map(|family| self.counters.family(family))
    }

    /// Returns one number for each family.
    fn each(&self, of: impl Fn(&FamilyCounters) -> f64) -> Series<f64> {
        let [v4, v6] = self.counters().map(of);
        [(FAMILIES[0], v4), (FAMILIES[1], v6)]
    }

    /// Returns one histogram for each family.
    fn each_histogram(&self, of: impl Fn(&FamilyCounters) -> &Histogram) -> Series<Distribution> {
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
        Metric::new("kubeproxy_sync_proxy_rules_duration_seconds")
            .help("Duration of one attempt to update the kernel")
            .histogram(to, from.each_histogram(|c| &c.sync))?;
        if from.backend.metrics.full_and_partial {
            self.full_and_partial(to)?;
        }
        Metric::new("kubeproxy_sync_proxy_rules_last_timestamp_seconds")
            .help("Last time at which the kernel held the desired state")
            .gauge(to, from.each(|c| seconds(c.synced_at_ms.get())))?;
        Metric::new("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds")
            .help("Last time at which a change arrived")
            .gauge(to, from.each(|c| seconds(c.queued_at_ms.get())))?;
        Metric::new("kubeproxy_network_programming_duration_seconds")
            .help("Time from the change of a Service or pod until the kernel held it")
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
        Metric::new("kubeproxy_sync_full_proxy_rules_duration_seconds")
            .help("Duration of one attempt that checked everything")
            .histogram(to, from.each_histogram(|c| &c.full))?;
        Metric::new("kubeproxy_sync_partial_proxy_rules_duration_seconds")
            .help("Duration of one attempt that checked only changes")
            .histogram(to, from.each_histogram(|c| &c.partial))
    }

    /// Writes the metrics of mode nftables alone.
    fn nftables(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let from = &self.0;
        Metric::new("kubeproxy_sync_proxy_rules_nftables_sync_failures")
            .help("Failed attempts to program the kernel")
            .counter(to, from.each(|c| float(c.failures.get())))?;
        // kplane has no separate clean-ups that could fail.
        Metric::new("kubeproxy_sync_proxy_rules_nftables_cleanup_failures")
            .help("Failed cleanups of stale chains; always 0, because kplane needs none")
            .counter(to, from.each(|_| 0.0))?;
        loopback::write(to)
    }

    /// Writes the metrics of modes iptables and IPVS.
    fn restores(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        Metric::new("kubeproxy_sync_proxy_rules_iptables_restore_failures")
            .help("Failed attempts to program the kernel")
            .counter(to, self.0.each(|c| float(c.failures.get())))
    }

    /// Writes the metrics of mode iptables alone.
    fn rules_of_iptables(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let from = &self.0;
        Metric::new("kubeproxy_sync_proxy_rules_iptables_partial_restore_failures")
            .help("Failed attempts to program only changes")
            .counter(to, from.each(|c| float(c.partial_failures.get())))?;
        // This is a gauge in spite of its name, as in kube-proxy.
        Metric::new("kubeproxy_sync_proxy_rules_iptables_total")
            .help("Rules of iptables that belong to kplane")
            .gauge(to, self.rules(|c| &c.rules))?;
        Metric::new("kubeproxy_sync_proxy_rules_iptables_last")
            .help("Rules of iptables that the last change wrote")
            .gauge(to, self.rules(|c| &c.rules_last))?;
        self.packets(to)
    }

    /// Writes the packets counted by rules (C7, C8), where the kernel counts them.
    fn packets(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let counts = PacketCounts::read();
        let one = |value: Option<u64>| value.map(|value| alone(float(value)));
        Metric::new("kubeproxy_iptables_ct_state_invalid_dropped_packets")
            .help("Packets dropped because connection tracking found them invalid")
            .counter(to, one(counts.invalid_dropped))?;
        Metric::new("kubeproxy_iptables_localhost_nodeports_accepted_packets")
            .help("Packets accepted for node ports on the loopback address")
            .counter(to, one(counts.localhost_accepted))
    }

    fn rules(&self, of: fn(&FamilyCounters) -> &[Gauge; 2]) -> Vec<([Label<'static>; 2], f64)> {
        self.0
            .counters()
            .into_iter()
            .zip(FAMILIES)
            .flat_map(|(counters, family)| {
                of(counters)
                    .iter()
                    .zip(RuleCounts::TABLES)
                    .map(move |(gauge, table)| ([family[0], ("table", table)], float(gauge.get())))
            })
            .collect()
    }

    fn changes(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let from = &self.0;
        let sum = |of: fn(&FamilyCounters) -> u64| from.counters().map(of).iter().sum::<u64>();
        let one = |value: u64| [alone(float(value))];
        Metric::new("kubeproxy_sync_proxy_rules_endpoint_changes_pending")
            .help("Changes of endpoints that the kernel does not hold yet")
            .gauge(to, one(sum(|c| c.endpoint_pending.get())))?;
        Metric::new("kubeproxy_sync_proxy_rules_endpoint_changes")
            .help("Changes of endpoints, counted for each ServicePort")
            .counter(to, one(sum(|c| c.endpoint_changes.get())))?;
        Metric::new("kubeproxy_sync_proxy_rules_service_changes_pending")
            .help("Changes of Services that the kernel does not hold yet")
            .gauge(to, one(sum(|c| c.service_pending.get())))?;
        Metric::new("kubeproxy_sync_proxy_rules_service_changes")
            .help("Changes of Services, counted for each ServicePort")
            .counter(to, one(sum(|c| c.service_changes.get())))
    }

    fn no_local_endpoints(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let families = self.0.counters().into_iter().zip(POLICIES);
        let series = families.flat_map(|(counters, labels)| {
            counters
                .no_local
                .iter()
                .zip(labels)
                .map(|(gauge, labels)| (labels, float(gauge.get())))
        });
        // This is a gauge in spite of its name, as in kube-proxy.
        Metric::new("kubeproxy_sync_proxy_rules_no_local_endpoints_total")
            .help(
                "ServicePorts with traffic policy Local that have endpoints, but none on this node",
            )
            .gauge(to, series)
    }

    fn conntrack(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let totals = self.0.conntrack.totals();
        let deleted = totals.each_ref().map(|totals| float(totals.deleted));
        Metric::new("kubeproxy_conntrack_reconciler_sync_duration_seconds")
            .help("Duration of one search for stale connection tracking entries")
            .histogram(to, FAMILIES.into_iter().zip(totals.map(|t| searches(&t))))?;
        Metric::new("kubeproxy_conntrack_reconciler_deleted_entries")
            .help("Stale connection tracking entries that were deleted")
            .counter(to, FAMILIES.into_iter().zip(deleted))
    }

    fn health(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        const CODES: [[Label<'static>; 1]; 2] = [[("code", "200")], [("code", "503")]];
        let series = |outcomes: &Outcomes| {
            let counts = outcomes.counts().map(|(_, count)| float(count));
            CODES.into_iter().zip(counts)
        };
        let answers = &self.0.answers;
        Metric::new("kubeproxy_proxy_healthz")
            .help("Answers of /healthz")
            .counter(to, series(&answers.healthz))?;
        Metric::new("kubeproxy_proxy_livez")
            .help("Answers of /livez")
            .counter(to, series(&answers.livez))
    }
}

/// Returns the durations of searches for outdated entries.
fn searches(totals: &ConntrackTotals) -> Distribution {
    let seconds = |bound: Option<Duration>| bound.map_or(f64::INFINITY, |b| b.as_secs_f64());
    let counts = totals
        .durations
        .iter()
        .enumerate()
        .map(|(bucket, count)| (seconds(bucket_bound(bucket)), *count));
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
        let prestop = self.0.counters.prestop.read();
        let waits = prestop.map(|(outcome, times)| ([("outcome", outcome)], times));
        Metric::new("kplane_agent_pre_stop_wait_duration_seconds")
            .help(
                "Time that preStop hooks of Pods waited until no kernel led to the Pod, by outcome",
            )
            .histogram(&mut to, waits)?;
        if let Some(panics) = kplane_http::panics::seen() {
            Metric::new("kplane_agent_panics")
                .help("Parts of the agent that ended by a bug")
                .counter(&mut to, [alone(float(panics.count))])?;
        }
        let version = [
            ("version", env!("CARGO_PKG_VERSION")),
            ("backend", self.0.backend.name),
        ];
        Metric::new("kplane_agent_build_info")
            .help("Version and backend of the agent; always 1")
            .gauge(&mut to, [(version, 1.0)])
    }
}

impl Agent {
    fn state(&self, to: &mut DescriptorEncoder<'_>, report: &Numbers) -> fmt::Result {
        let [held, applied, verified] = report.revisions.map(float);
        let revisions = [
            ([("state", "held")], held),
            ([("state", "applied")], applied),
            ([("state", "verified")], verified),
        ];
        Metric::new("kplane_agent_revision")
            .help(
                "Revision of the desired state that the agent has (held), that the kernel holds \
             (applied), that was read back from the kernel (verified)",
            )
            .gauge(to, revisions)?;
        let totals = self.0.conntrack.totals().into_iter().zip(FAMILIES);
        let ended = totals.flat_map(|(of, [family])| {
            let reasons = [
                ("half_open", of.half_open),
                ("dead_node", of.dead),
                ("denied", of.denied),
            ];
            reasons.map(|(reason, count)| ([family, ("reason", reason)], float(count)))
        });
        Metric::new("kplane_agent_ended_connections")
            .help("Connections that the agent ended in the kernel: half_open = without an answer from an endpoint that was taken out of service; dead_node = to an endpoint on a dead node; denied = no longer allowed by NetworkPolicies")
            .counter(to, ended)?;
        let families = |values: [bool; 2]| FAMILIES.into_iter().zip(values.map(f64::from));
        Metric::new("kplane_agent_family_programmed")
            .help("1 if the kernel holds the desired state of the family")
            .gauge(to, families(report.programmed))?;
        Metric::new("kplane_agent_family_failing")
            .help("1 while the family cannot be programmed, or differs after changes by another program")
            .gauge(to, families(report.failing))?;
        Metric::new("kplane_agent_family_verified_timestamp_seconds")
            .help("Last time at which the kernel was read back and held the desired state")
            .gauge(
                to,
                FAMILIES.into_iter().zip(report.verified_at_ms.map(seconds)),
            )?;
        let failures = [
            ([("state", "failed")], float(report.failed)),
            ([("state", "degraded")], float(report.degraded)),
        ];
        Metric::new("kplane_agent_failures")
            .help("Objects that are not served (failed), or not in every respect (degraded)")
            .gauge(to, failures)?;
        self.stream(to, report)?;
        let [unnamed, bare] = report.held.map(float);
        let held = [
            ([("lacks", "name")], unnamed),
            ([("lacks", "endpoints")], bare),
        ];
        Metric::new("kplane_agent_held_services")
            .help("Services that are served although they or their endpoints are missing from the source")
            .gauge(to, held)?;
        policies::encode(to, &report.policies, FAMILIES)?;
        Metric::new("kplane_agent_service_ports")
            .help("ServicePorts desired")
            .gauge(to, [alone(float(report.counts.services))])?;
        Metric::new("kplane_agent_endpoints")
            .help("Endpoints desired")
            .gauge(to, [alone(float(report.counts.endpoints))])
    }

    /// Encodes what the stream says.
    fn stream(&self, to: &mut DescriptorEncoder<'_>, report: &Numbers) -> fmt::Result {
        let connected = f64::from(self.0.connection.borrow().live);
        Metric::new("kplane_agent_connected")
            .help("1 if the agent is connected to the control plane")
            .gauge(to, [alone(connected)])?;
        let frozen = f64::from(self.0.connection.borrow().frozen.is_some());
        Metric::new("kplane_agent_frozen")
            .help("1 if an operator froze the node: it takes no newer Services until it is thawed")
            .gauge(to, [alone(frozen)])?;
        Metric::new("kplane_agent_stale_since_timestamp_seconds")
            .help(
                "Time since which no control plane confirms what the node serves; 0 while one does",
            )
            .gauge(to, [alone(seconds(report.stale_since_ms))])
    }

    fn work(&self, to: &mut DescriptorEncoder<'_>, report: &Numbers) -> fmt::Result {
        let from = &self.0;
        let families = from.counters().into_iter().zip(FAMILIES);
        let phases = families.flat_map(|(counters, family)| {
            PHASES
                .into_iter()
                .zip(&counters.phases)
                .map(move |(phase, took)| ([family[0], ("phase", phase)], took.read()))
        });
        Metric::new("kplane_agent_sync_phase_duration_seconds")
            .help("Duration of each step of a change that the kernel accepted")
            .histogram(to, phases)?;
        let outcomes = [
            ([("result", "ok")], float(report.syncs_ok)),
            ([("result", "failed")], float(report.syncs_failed)),
        ];
        Metric::new("kplane_agent_syncs")
            .help("Attempts to apply an update")
            .counter(to, outcomes)?;
        Metric::new("kplane_agent_kernel_operations")
            .help("Operations sent to the kernel")
            .counter(to, from.each(|c| float(c.operations.get())))?;
        Metric::new("kplane_agent_kernel_bytes")
            .help("Bytes sent to the kernel")
            .counter(to, from.each(|c| float(c.bytes.get())))?;
        Metric::new("kplane_agent_drift_repairs")
            .help("Changes by other programs that the agent repaired")
            .counter(to, FAMILIES.into_iter().zip(report.repairs.map(float)))?;
        Metric::new("kplane_agent_snapshots")
            .help(
                "Snapshots taken; an agent that connects again with an unchanged state needs none",
            )
            .counter(to, [alone(float(report.snapshots))])?;
        Metric::new("kplane_agent_older_states")
            .help("Times that a control plane showed an older state than the node holds; such a state is not applied")
            .counter(to, [alone(float(report.older_states))])?;
        Metric::new("kplane_agent_unknown_objects")
            .help("Objects of kinds that this version does not know")
            .counter(to, [alone(float(report.unknown_kinds))])
    }

    fn service_health(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let counters = &self.0.counters;
        let servers = [
            ([("state", "open")], &counters.service_health_open),
            ([("state", "failing")], &counters.service_health_closed),
        ];
        Metric::new("kplane_agent_service_health_servers")
            .help("Health check node ports, by family and Service")
            .gauge(
                to,
                servers.map(|(labels, count)| (labels, float(count.get()))),
            )?;
        let failures = float(counters.service_health_failures.get());
        Metric::new("kplane_agent_service_health_listen_failures")
            .help("Failed attempts to open a health check node port")
            .counter(to, [alone(failures)])
    }
}

/// Converts milliseconds since 1970 to seconds.
fn seconds(ms: u64) -> f64 {
    float(ms) / 1_000.0
}
