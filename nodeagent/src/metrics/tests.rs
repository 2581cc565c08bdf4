//! Names, types, labels and buckets (section (h)), and the other paths of the port (G5).

use kplane_dataplane::conntrack::ConntrackCounts;
use kplane_kube_proxy_config::KubeProxyConfiguration;
use std::collections::BTreeSet;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::Request;
use kplane_model::Family;

use super::*;
use crate::desired::{Changes, Held, Position};
use crate::report::{Failure, Subject};
use kplane_dataplane::backend::{Applied, Kind, Lookups, RuleCounts};

/// kube-proxy's metrics of the nftables mode, written down from section (h): type, name, labels.
const KUBE_PROXY: &str = "\
histogram kubeproxy_conntrack_reconciler_sync_duration_seconds ip_family
counter kubeproxy_conntrack_reconciler_deleted_entries_total ip_family
histogram kubeproxy_network_programming_duration_seconds ip_family
counter kubeproxy_nftables_localhost_nodeport_listener_creation_failures_total ip_family
gauge kubeproxy_nftables_localhost_nodeport_listeners ip_family
counter kubeproxy_nftables_localhost_nodeport_rejected_packets_total
counter kubeproxy_proxy_healthz_total code
counter kubeproxy_proxy_livez_total code
histogram kubeproxy_sync_full_proxy_rules_duration_seconds ip_family
histogram kubeproxy_sync_partial_proxy_rules_duration_seconds ip_family
histogram kubeproxy_sync_proxy_rules_duration_seconds ip_family
gauge kubeproxy_sync_proxy_rules_endpoint_changes_pending
counter kubeproxy_sync_proxy_rules_endpoint_changes_total
gauge kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds ip_family
gauge kubeproxy_sync_proxy_rules_last_timestamp_seconds ip_family
counter kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total ip_family
counter kubeproxy_sync_proxy_rules_nftables_sync_failures_total ip_family
gauge kubeproxy_sync_proxy_rules_no_local_endpoints_total ip_family,traffic_policy
gauge kubeproxy_sync_proxy_rules_service_changes_pending
counter kubeproxy_sync_proxy_rules_service_changes_total
";

const OURS: &str = "\
gauge kplane_agent_build_info backend,version
gauge kplane_agent_connected
gauge kplane_agent_conntrack_entries
gauge kplane_agent_conntrack_limit
counter kplane_agent_drift_repairs_total ip_family
counter kplane_agent_ended_connections_total ip_family,reason
gauge kplane_agent_endpoints
gauge kplane_agent_failures state
gauge kplane_agent_family_failing ip_family
gauge kplane_agent_family_programmed ip_family
gauge kplane_agent_family_verified_timestamp_seconds ip_family
gauge kplane_agent_frozen
gauge kplane_agent_held_services lacks
counter kplane_agent_kernel_bytes_total ip_family
counter kplane_agent_kernel_operations_total ip_family
gauge kplane_agent_network_policies
counter kplane_agent_older_states_total
counter kplane_agent_panics_total
counter kplane_agent_policy_denied_packets_total direction,ip_family
gauge kplane_agent_policy_elements ip_family
gauge kplane_agent_policy_pods isolated
histogram kplane_agent_pre_stop_wait_duration_seconds outcome
gauge kplane_agent_revision state
counter kplane_agent_service_health_listen_failures_total
gauge kplane_agent_service_health_servers state
gauge kplane_agent_service_ports
counter kplane_agent_snapshots_total
gauge kplane_agent_stale_since_timestamp_seconds
histogram kplane_agent_sync_phase_duration_seconds ip_family,phase
counter kplane_agent_syncs_total result
counter kplane_agent_unknown_objects_total
counter process_cpu_seconds_total
gauge process_max_fds
gauge process_open_fds
gauge process_resident_memory_bytes
gauge process_start_time_seconds
gauge process_virtual_memory_bytes
";

/// A port with its sources, kept alive.
struct Rig {
    counters: Arc<Counters>,
    conntrack: ConntrackCounts,
    reports: watch::Sender<Report>,
    _connection: watch::Sender<Connection>,
    metrics: Metrics,
}

impl Rig {
    fn new() -> Self {
        Self::of(Kind::Nftables)
    }

    fn of(backend: Kind) -> Self {
        kplane_http::panics::install();
        let backend = backend.describe();
        let counters = Arc::<Counters>::default();
        let (reports, follow) = watch::channel(Report::default());
        let (_connection, connection) = watch::channel(Connection {
            live: true,
            since_ms: 1,
            ..Connection::default()
        });
        let conntrack = ConntrackCounts::default();
        let sources = Sources {
            counters: counters.clone(),
            reports: follow,
            connection,
            answers: Arc::default(),
            conntrack: conntrack.clone(),
            backend,
            connections: None,
            proxy: ProxyHandle::default(),
        };
        let configuration = KubeProxyConfiguration {
            mode: backend.name.into(),
            ..KubeProxyConfiguration::default()
        };
        let (_configuration, configuration) = watch::channel(Arc::new(configuration));
        Self {
            counters,
            conntrack,
            reports,
            _connection,
            metrics: Metrics::new(sources, configuration),
        }
    }

    async fn get(&self, path: &str, accept: &str) -> (u16, String, String) {
        let request = Request::builder().uri(path).header("Accept", accept);
        let answer = self.metrics.respond(&request.body(()).unwrap());
        let kind = answer.headers()["content-type"].to_str().unwrap().to_owned();
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (status, kind, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn scrape(&self) -> String {
        self.get("/metrics", "*/*").await.2
    }

    /// The value of one series.
    async fn value(&self, series: &str) -> String {
        let text = self.scrape().await;
        let values: Vec<_> = text
            .lines()
            .filter_map(|line| line.strip_prefix(series))
            .filter_map(|rest| rest.strip_prefix(' '))
            .collect();
        assert_eq!(values.len(), 1, "{series} in\n{text}");
        values[0].to_owned()
    }
}

/// Returns type, name and labels of everything in a text, as above. Every sample must belong to a
/// type.
fn described(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let (mut head, mut labels) = (String::new(), BTreeSet::new());
    let mut close = |head: &str, labels: &BTreeSet<String>| {
        let labels: Vec<_> = labels.iter().map(String::as_str).collect();
        let line = format!("{head} {}", labels.join(","));
        found.insert(line.trim_end().to_owned());
    };
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            if !head.is_empty() {
                close(&head, &labels);
            }
            let (name, kind) = rest.split_once(' ').unwrap();
            head = format!("{kind} {name}");
            labels.clear();
        } else if !line.starts_with("# HELP ") {
            let (_, name) = head.split_once(' ').unwrap();
            assert!(line.starts_with(name), "{line} below {head}");
            let (_, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
            if let Some((_, rest)) = line.split_once('{') {
                let pairs = rest.split_once('}').unwrap().0;
                let names = pairs.split(',').map(|pair| pair.split_once('=').unwrap().0);
                labels.extend(names.filter(|name| *name != "le").map(str::to_owned));
            }
        }
    }
    close(&head, &labels);
    found
}

#[tokio::test]
async fn h_every_name_type_and_label() {
    let text = Rig::new().scrape().await;
    let expected: BTreeSet<_> = KUBE_PROXY.lines().chain(OURS.lines()).map(str::to_owned).collect();
    let found = described(&text);
    let missing: Vec<_> = expected.difference(&found).collect();
    let foreign: Vec<_> = found.difference(&expected).collect();
    assert!(
        missing.is_empty() && foreign.is_empty(),
        "missing {missing:?}, not listed {foreign:?}"
    );
    // Each metric is described once, and no label has a Service's name.
    assert_eq!(text.matches("# TYPE").count(), expected.len());
    assert_eq!(text.matches("# HELP").count(), expected.len());
}

#[tokio::test]
async fn h_durations_fall_into_kube_proxys_buckets() {
    let rig = Rig::new();
    let counters = rig.counters.family(Family::V4);
    let applied = Applied {
        operations: 5,
        bytes: 600,
        plan: Duration::from_micros(20),
        ..Applied::default()
    };
    counters.attempted(Duration::from_micros(1_500), false, Some(&applied));
    counters.attempted(Duration::from_millis(3), true, None);
    let text = rig.scrape().await;
    let bounds: Vec<_> = text
        .lines()
        .filter_map(|line| {
            line.strip_prefix("kubeproxy_sync_proxy_rules_duration_seconds_bucket{le=\"")?
                .split_once("\",ip_family=\"IPv4\"}")
        })
        .map(|(le, n)| format!("{le}:{}", n.trim()))
        .collect();
    assert_eq!(
        bounds.join(" "),
        "0.001:0 0.002:1 0.004:2 0.008:2 0.016:2 0.032:2 0.064:2 0.128:2 0.256:2 0.512:2 1.024:2 \
         2.048:2 4.096:2 8.192:2 16.384:2 +Inf:2"
    );
    for (series, value) in [
        (
            "kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}",
            "2",
        ),
        (
            "kubeproxy_sync_proxy_rules_duration_seconds_sum{ip_family=\"IPv4\"}",
            "0.0045",
        ),
        (
            "kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}",
            "1",
        ),
        (
            "kubeproxy_sync_partial_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}",
            "1",
        ),
        (
            "kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family=\"IPv4\"}",
            "1",
        ),
        (
            "kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family=\"IPv6\"}",
            "0",
        ),
        ("kplane_agent_kernel_bytes_total{ip_family=\"IPv4\"}", "600"),
    ] {
        assert_eq!(rig.value(series).await, value, "{series}");
    }
}

#[tokio::test]
async fn numbers_come_from_report_and_counters() {
    let rig = Rig::new();
    let at = |revision| Some(Position { epoch: 1, revision });
    let failure = |degraded| Failure {
        about: Subject::Node,
        reason: "x".into(),
        since_ms: 1,
        degraded,
    };
    rig.reports.send_replace(Report {
        held: at(9),
        applied: at(8),
        verified: Some(Position {
            epoch: 0,
            revision: 77,
        }),
        failures: vec![failure(true), failure(true), failure(false)],
        keeps: Some(Held {
            services: 3,
            without_endpoints: 4,
            ..Held::default()
        }),
        ..Report::default()
    });
    let changes = Changes {
        services: 2,
        endpoints: 3,
    };
    rig.conntrack.count(Family::V6, 6, None, Duration::ZERO);
    rig.conntrack.ended(Family::V6, 2, 4, 3);
    let v6 = rig.counters.family(Family::V6);
    v6.queued(changes, 1_700_000_000_500);
    v6.set_no_local([4, 5]);
    for (series, value) in [
        ("kplane_agent_revision{state=\"held\"}", "9"),
        ("kplane_agent_revision{state=\"applied\"}", "8"),
        ("kplane_agent_revision{state=\"verified\"}", "0"),
        ("kplane_agent_failures{state=\"failed\"}", "1"),
        ("kplane_agent_failures{state=\"degraded\"}", "2"),
        ("kplane_agent_held_services{lacks=\"name\"}", "3"),
        ("kplane_agent_held_services{lacks=\"endpoints\"}", "4"),
        ("kplane_agent_connected", "1"),
        ("kubeproxy_sync_proxy_rules_service_changes_pending", "2"),
        ("kubeproxy_sync_proxy_rules_endpoint_changes_total", "3"),
        (
            "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family=\"IPv6\"}",
            "1700000000.5",
        ),
        (
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family=\"IPv6\",traffic_policy=\"external\"}",
            "5",
        ),
        (
            "kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family=\"IPv6\"}",
            "6",
        ),
        (
            "kplane_agent_ended_connections_total{ip_family=\"IPv6\",reason=\"half_open\"}",
            "2",
        ),
        (
            "kplane_agent_ended_connections_total{ip_family=\"IPv6\",reason=\"dead_node\"}",
            "4",
        ),
        (
            "kplane_agent_ended_connections_total{ip_family=\"IPv6\",reason=\"denied\"}",
            "3",
        ),
    ] {
        assert_eq!(rig.value(series).await, value, "{series}");
    }
}

#[tokio::test]
async fn g5_paths() {
    let rig = Rig::new();
    let text = "text/plain; charset=utf-8".to_owned();
    let plain = |body: &str| (200, text.clone(), body.to_owned());
    assert_eq!(rig.get("/healthz", "*/*").await, plain("ok"));
    assert_eq!(rig.get("/proxyMode", "*/*").await, plain("nftables"));
    let (status, kind, body) = rig.get("/configz", "*/*").await;
    assert_eq!((status, kind.as_str()), (200, "application/json"));
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    let configuration = &body["kubeproxy.config.k8s.io"];
    assert_eq!(configuration["mode"], "nftables");
    assert_eq!(configuration["metricsBindAddress"], "127.0.0.1:10249");
    let (status, _, body) = rig.get("/transactions", "*/*").await;
    let page: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &page["kept"]), (200, &serde_json::json!(256)));
    for path in ["/", "/debug/pprof/", "/flagz", "/statusz", "/metrics/slis"] {
        assert_eq!(rig.get(path, "*/*").await.0, 404, "{path}");
    }
}

#[tokio::test]
async fn open_metrics_for_whoever_asks() {
    let rig = Rig::new();
    let (_, kind, body) = rig.get("/metrics", "*/*").await;
    assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8");
    assert!(!body.contains("# EOF"));
    let asked = "application/openmetrics-text;version=1.0.0;q=0.6,*/*;q=0.1";
    let (_, kind, body) = rig.get("/metrics", asked).await;
    assert!(kind.starts_with("application/openmetrics-text; version=1.0.0"));
    assert!(body.ends_with("# EOF\n"));
    assert!(body.contains("# TYPE kubeproxy_proxy_healthz counter\n"));
}

/// Section (h), mode I.
#[tokio::test]
async fn h_mode_iptables_has_metrics_of_its_own() {
    let rig = Rig::of(Kind::Iptables);
    let applied = Applied {
        rules: Some(RuleCounts {
            total: [7, 70],
            last: [1, 3],
            lookups: Lookups::default(),
        }),
        ..Applied::default()
    };
    let counters = rig.counters.family(Family::V6);
    counters.attempted(Duration::from_millis(1), true, Some(&applied));
    counters.attempted(Duration::from_millis(1), true, None);
    counters.attempted(Duration::from_millis(1), false, None);
    let prefix = "kubeproxy_sync_proxy_rules_iptables";
    for (series, value) in [
        ("_restore_failures_total{ip_family=\"IPv6\"}", "2"),
        ("_partial_restore_failures_total{ip_family=\"IPv6\"}", "1"),
        ("_partial_restore_failures_total{ip_family=\"IPv4\"}", "0"),
        ("_total{ip_family=\"IPv6\",table=\"nat\"}", "70"),
        ("_total{ip_family=\"IPv6\",table=\"filter\"}", "7"),
        ("_last{ip_family=\"IPv6\",table=\"nat\"}", "3"),
    ] {
        assert_eq!(
            rig.value(&format!("{prefix}{series}")).await,
            value,
            "{series}"
        );
    }
    assert!(!rig.scrape().await.contains("nftables_sync"));
    for counted in ["ct_state_invalid_dropped", "localhost_nodeports_accepted"] {
        let name = format!("# TYPE kubeproxy_iptables_{counted}_packets_total counter");
        assert!(rig.scrape().await.contains(&name), "{name}");
    }
    assert!(!Rig::new().scrape().await.contains("iptables"));
}

/// Section (h), mode V.
#[tokio::test]
async fn h_mode_ipvs_has_no_metrics_of_other_modes() {
    let rig = Rig::of(Kind::Ipvs);
    let counters = rig.counters.family(Family::V4);
    counters.attempted(Duration::from_millis(1), true, None);
    let failures = "kubeproxy_sync_proxy_rules_iptables_restore_failures_total";
    let series = format!("{failures}{{ip_family=\"IPv4\"}}");
    assert_eq!(rig.value(&series).await, "1");
    let text = rig.scrape().await;
    for other in [
        "nftables_sync",
        "iptables_total",
        "iptables_partial",
        "sync_full",
    ] {
        assert!(!text.contains(other), "{other}");
    }
}
