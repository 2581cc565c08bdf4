//! When alerts fire, and when they do not: series of a healthy cluster, and what differs in each case.

/// A case of one alert. Times are minutes, and each series has one value a minute.
pub(super) struct Case {
    pub(super) alert: &'static str,
    /// Series that differ while something is wrong, and the minute at which the alert fires.
    pub(super) fires: (&'static [Series], u32),
    /// Series that differ in a case that is close to it, and the minute at which nothing fires.
    pub(super) quiet: (&'static [Series], u32),
}

/// A series without the labels of its target, which is behind the `@`, and its values.
pub(super) type Series = (&'static str, &'static str);

/// Two replicas with five nodes, and one of the agents.
pub(super) const HEALTHY: &[Series] = &[
    ("kplane_controlplane_nodes{state=\"in_sync\"}@a", "3x2000"),
    ("kplane_controlplane_nodes{state=\"in_sync\"}@b", "2x2000"),
    ("kplane_controlplane_nodes{state=\"no_agent\"}@a", "1x2000"),
    (DROPPING, "0x2000"),
    (
        "kplane_controlplane_node_findings{code=\"ReversePathFilter\"}@a",
        "3x2000",
    ),
    (
        "kplane_controlplane_nodes{state=\"disconnected\"}@a",
        "1x2000",
    ),
    ("kplane_controlplane_nodes{state=\"no_agent\"}@b", "3x2000"),
    (STREAMS, "3x2000"),
    ("kplane_controlplane_streams@b", "2x2000"),
    (LAG[0], "2x2000"),
    (LAG[1], "3x2000"),
    (
        "kplane_controlplane_applied_lag_seconds_bucket{le=\"131.072\"}@a",
        "3x2000",
    ),
    (
        "kplane_controlplane_applied_lag_seconds_bucket{le=\"+Inf\"}@a",
        "3x2000",
    ),
    (FAST, "0+10x2000"),
    (
        "kplane_controlplane_change_programmed_duration_seconds_bucket{le=\"16.384\"}@a",
        "0+10x2000",
    ),
    (
        "kplane_controlplane_change_programmed_duration_seconds_bucket{le=\"+Inf\"}@a",
        "0+10x2000",
    ),
    (SYNCED[0], "1x2000"),
    (SYNCED[1], "1x2000"),
    (
        "kplane_controlplane_build_info{version=\"0.1.0\",source=\"kubernetes\"}@a",
        "1x2000",
    ),
    (REPLICA, "1x2000"),
    (NODE_PORTS, "2x2000"),
    ("kplane_controlplane_node_ports@b", "2x2000"),
    (CLUSTER_IPS, "10x2000"),
    (SERVICE_ADDRESSES, "256x2000"),
    (SERVICES, "10x2000"),
    ("kplane_controlplane_services@b", "10x2000"),
    ("kplane_controlplane_endpoints@a", "20x2000"),
    ("kplane_controlplane_endpoints@b", "20x2000"),
    (AGE[0], "3x2000"),
    (AGE[1], "8x2000"),
    // Watches that begin anew, and writes that came too late, are usual.
    (
        "kplane_controlplane_source_failures_total{kind=\"Service\",reason=\"gone\"}@a",
        "0+1x2000",
    ),
    (
        "kplane_controlplane_api_failures_total{verb=\"patch\",reason=\"refused\"}@a",
        "0+1x2000",
    ),
    (HELD, "0x2000"),
    ("kplane_controlplane_held_without_endpoints@a", "0x2000"),
    (PARTIAL, "0x2000"),
    (
        "kplane_controlplane_refusals_total{port=\"agents\",reason=\"ended\"}@a",
        "0+1x2000",
    ),
    (
        "kplane_controlplane_refusals_total{port=\"status\",reason=\"no-right\"}@a",
        "0+1x2000",
    ),
    (
        "kplane_controlplane_connections_closed_total{port=\"agents\",reason=\"expired\"}@a",
        "0+1x2000",
    ),
    (CLOSED, "0x2000"),
    (
        "kplane_controlplane_accept_failures_total{port=\"agents\"}@a",
        "0x2000",
    ),
    // In 60 days.
    (CERTIFICATE, "5184000x2000"),
    (LINES, "0x2000"),
    (PANICS, "0x2000"),
    (AGENT_PANICS, "0x2000"),
    (HOOKS, "0x2000"),
    (STALE, "0x2000"),
    (FAILING, "0x2000"),
    ("kplane_agent_failures{state=\"degraded\"}@n1", "2x2000"),
    (FAILED, "0x2000"),
    (
        "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family=\"IPv4\"}@n1",
        "0+60x2000",
    ),
    (APPLIED, "0+60x2000"),
    (AGENT, "1x2000"),
    (VERIFIED, "0+60x2000"),
    (
        "kplane_agent_family_verified_timestamp_seconds{ip_family=\"IPv6\"}@n1",
        "0x2000",
    ),
    (REPAIRS, "0x2000"),
    (ENTRIES, "400x2000"),
    ("kplane_agent_conntrack_limit@n1", "1000x2000"),
    (HEALTH, "0x2000"),
];

/// One node of replica `a` in another state.
macro_rules! one_node {
    ($state:literal) => {
        &[
            ("kplane_controlplane_nodes{state=\"in_sync\"}@a", "2x2000"),
            (
                concat!("kplane_controlplane_nodes{state=\"", $state, "\"}@a"),
                "1x2000",
            ),
        ]
    };
}

const FAILURES: &str =
    "kplane_controlplane_source_failures_total{kind=\"Service\",reason=\"forbidden\"}@a";
const API_FAILURES: &str =
    "kplane_controlplane_api_failures_total{verb=\"create\",reason=\"unauthorized\"}@a";
const REFUSALS: &str =
    "kplane_controlplane_refusals_total{port=\"agents\",reason=\"no-such-node\"}@a";
const CLOSED: &str =
    "kplane_controlplane_connections_closed_total{port=\"agents\",reason=\"refused\"}@a";
const CERTIFICATE: &str = "kplane_controlplane_certificate_expires_timestamp_seconds@a";
const LINES: &str = "kplane_controlplane_audit_lines_dropped_total@a";
const PANICS: &str = "kplane_controlplane_panics_total@a";
const AGENT_PANICS: &str = "kplane_agent_panics_total@n1";
const HOOKS: &str = "kplane_agent_pre_stop_wait_duration_seconds_count{outcome=\"busy\"}@n1";
const PARTIAL: &str = "kplane_controlplane_picture_partial@a";
const STALE: &str = "kplane_agent_stale_since_timestamp_seconds@n1";
const FAILING: &str = "kplane_agent_family_failing{ip_family=\"IPv4\"}@n1";
const FAILED: &str = "kplane_agent_failures{state=\"failed\"}@n1";
const APPLIED: &str = "kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv4\"}@n1";
const AGENT: &str = "kplane_agent_build_info{version=\"0.1.0\",backend=\"nftables\"}@n1";
const NEWER_AGENT: &str = "kplane_agent_build_info{version=\"0.2.0\",backend=\"nftables\"}@n2";
const VERIFIED: &str = "kplane_agent_family_verified_timestamp_seconds{ip_family=\"IPv4\"}@n1";
const REPAIRS: &str = "kplane_agent_drift_repairs_total{ip_family=\"IPv4\"}@n1";
const ENTRIES: &str = "kplane_agent_conntrack_entries@n1";
const HEALTH: &str = "kplane_agent_service_health_servers{state=\"failing\"}@n1";
const DROPPING: &str = "kplane_controlplane_node_findings{code=\"ForwardPolicyDrop\"}@a";
const SUSPECTED: &str = "kplane_controlplane_suspected_nodes{mode=\"act\"}@a";
const STREAMS: &str = "kplane_controlplane_streams@a";
const AGE: [&str; 2] = [
    "kplane_controlplane_upstream_age_seconds@a",
    "kplane_controlplane_upstream_age_seconds@b",
];
const REPLICA: &str = "kplane_controlplane_build_info{version=\"0.1.0\",source=\"kubernetes\"}@b";
const LAG: [&str; 2] = [
    "kplane_controlplane_applied_lag_seconds_bucket{le=\"0.000125\"}@a",
    "kplane_controlplane_applied_lag_seconds_bucket{le=\"16.384\"}@a",
];
const FAST: &str = "kplane_controlplane_change_programmed_duration_seconds_bucket{le=\"0.008\"}@a";
const SYNCED: [&str; 2] = [
    "kplane_controlplane_synced@a",
    "kplane_controlplane_synced@b",
];
const SERVICES: &str = "kplane_controlplane_services@a";
const CLUSTER_IPS: &str = "kplane_controlplane_cluster_ips{ip_family=\"IPv4\"}@a";
const SERVICE_ADDRESSES: &str = "kplane_controlplane_service_addresses{ip_family=\"IPv4\"}@a";
const NODE_PORTS: &str = "kplane_controlplane_node_ports@a";
const HELD: &str = "kplane_controlplane_held_services@a";

const fn case(
    alert: &'static str,
    fires: (&'static [Series], u32),
    quiet: (&'static [Series], u32),
) -> Case {
    Case {
        alert,
        fires,
        quiet,
    }
}

/// A case whose series make the alert fire at one minute, and not at another.
const fn timed(alert: &'static str, series: &'static [Series], fires: u32, quiet: u32) -> Case {
    case(alert, (series, fires), (series, quiet))
}

/// All alerts, in the order of their file.
pub(super) const CASES: &[Case] = &[
    case(
        "KplaneAgentLost",
        (&[(STREAMS, "3x30 2x2000")], 55),
        (&[(STREAMS, "3x30 2x10 3x2000")], 55),
    ),
    timed("KplaneNodeWithoutAgent", &[(STREAMS, "2x2000")], 40, 25),
    timed("KplaneNodesFailing", one_node!("failing"), 10, 4),
    timed("KplaneNodesUnverified", one_node!("unverified"), 15, 9),
    timed("KplaneNodeNameConflict", one_node!("conflict"), 10, 4),
    timed("KplaneNodesFrozen", one_node!("frozen"), 1_500, 1_400),
    timed("KplaneNodeObstructed", &[(DROPPING, "2x2000")], 20, 14),
    case(
        "KplaneNodeSuspected",
        (&[(SUSPECTED, "1x2000")], 3),
        (&[(SUSPECTED, "0x2000")], 3),
    ),
    case(
        "KplaneKernelsLag",
        (&[(LAG[0], "2x2000"), (LAG[1], "2x2000")], 10),
        (&[(LAG[0], "0x2000")], 10),
    ),
    timed("KplaneProgrammingSlow", &[(FAST, "0+9x2000")], 30, 10),
    case(
        "KplaneControlPlaneAbsent",
        (&[(SYNCED[0], "_x2000"), (SYNCED[1], "_x2000")], 6),
        (&[(SYNCED[0], "_x2000")], 6),
    ),
    case(
        "KplaneReplicaLost",
        (&[(REPLICA, "1x30 _x2000")], 55),
        (&[(REPLICA, "1x30 _x10 1x2000")], 55),
    ),
    timed("KplaneReplicaNotReady", &[(SYNCED[0], "0x2000")], 11, 9),
    timed("KplaneReplicasDisagree", &[(SERVICES, "9x2000")], 16, 14),
    case(
        "KplaneSourceStale",
        (&[(AGE[0], "300x2000"), (AGE[1], "400x2000")], 4),
        (&[(AGE[0], "300x2000")], 9),
    ),
    case(
        "KplaneReplicaStale",
        (&[(AGE[0], "300x2000")], 11),
        (&[(AGE[0], "100x2000")], 20),
    ),
    case(
        "KplaneSourceRefused",
        (&[(FAILURES, "0+1x2000")], 15),
        (&[(FAILURES, "0x5 1x2000")], 17),
    ),
    case(
        "KplaneApiRequestsFail",
        (&[(API_FAILURES, "0+1x2000")], 40),
        (&[(API_FAILURES, "0x5 5x2000")], 30),
    ),
    timed("KplaneDeletionsHeld", &[(HELD, "12x2000")], 6, 4),
    timed("KplanePicturePartial", &[(PARTIAL, "1x2000")], 11, 9),
    case(
        "KplaneNodePortsRunOut",
        (&[(NODE_PORTS, "2215x2000")], 61),
        (&[(NODE_PORTS, "2214x2000")], 1_000),
    ),
    case(
        "KplaneClusterIPsRunOut",
        (
            &[(CLUSTER_IPS, "205x2000"), (SERVICE_ADDRESSES, "256x2000")],
            61,
        ),
        (
            &[(CLUSTER_IPS, "204x2000"), (SERVICE_ADDRESSES, "256x2000")],
            1_000,
        ),
    ),
    case(
        "KplaneAgentsRefused",
        (&[(REFUSALS, "0+1x2000")], 15),
        (&[(REFUSALS, "0x5 1x2000")], 17),
    ),
    case(
        "KplaneConnectionsRefused",
        (&[(CLOSED, "0+1x2000")], 15),
        (&[(CLOSED, "0x5 1x2000")], 17),
    ),
    // In 10 and in 15 days.
    case(
        "KplaneCertificateExpiresSoon",
        (&[(CERTIFICATE, "864000x2000")], 65),
        (&[(CERTIFICATE, "1296000x2000")], 65),
    ),
    timed("KplaneAuditLinesLost", &[(LINES, "0x5 1x2000")], 8, 30),
    timed(
        "KplaneControlPlanePanicked",
        &[(PANICS, "0x5 1x2000")],
        6,
        5,
    ),
    timed("KplaneAgentStale", &[(STALE, "60x2000")], 20, 12),
    timed("KplaneFamilyFailing", &[(FAILING, "1x2000")], 6, 4),
    timed("KplaneServicesNotServed", &[(FAILED, "2x2000")], 11, 9),
    // The same series of a kube-proxy are not kplane's.
    case(
        "KplaneChangesPending",
        (&[(APPLIED, "0x2000")], 10),
        (&[(APPLIED, "0x2000"), (AGENT, "_x2000")], 10),
    ),
    timed("KplaneKernelUnverified", &[(VERIFIED, "60x2000")], 30, 24),
    case(
        "KplaneRulesChangedByOthers",
        (&[(REPAIRS, "0+1x2000")], 40),
        (&[(REPAIRS, "0x5 3x2000")], 15),
    ),
    case(
        "KplaneConntrackFull",
        (&[(ENTRIES, "950x2000")], 6),
        (&[(ENTRIES, "850x2000")], 30),
    ),
    timed("KplaneHealthPortsClosed", &[(HEALTH, "1x2000")], 11, 9),
    timed("KplaneHooksBusy", &[(HOOKS, "0x5 1x2000")], 7, 30),
    timed(
        "KplaneVersionsDiffer",
        &[(NEWER_AGENT, "1x2000")],
        1_500,
        1_400,
    ),
    timed("KplaneAgentPanicked", &[(AGENT_PANICS, "0x5 1x2000")], 6, 5),
];
