//! The page that lists all metrics: written from what the programs export.

use std::fmt::Write as _;

use anyhow::{Result, ensure};

use super::super::rendered::compare;
use super::exported::Exported;

const HEAD: &str = "# Metrics

Both programs export their metrics as text, for Prometheus and for OpenMetrics: the control plane on port 7467, the agent on port
10249 (`/metrics`). No label contains the name of a Service or a node, so the number of series does not grow with the cluster.
This page is written from what the programs export: `UPDATE_EXPECT=1 cargo test -p kplane-tests --test it -- chart`. [alerts.md](alerts.md)
has the alerts and dashboards that use them.

With `--count-connections` an agent also exports `kplane_agent_service_connections_total`: the connections that began and that
the node led to an endpoint, by `namespace`, `service`, `port`, `protocol` and `ip_family`. Only ServicePorts with connections
have a series. `kplane_agent_service_connections_losses_total` counts how often some were missed, because the kernel reported
more than the agent could read. Connections of mode ipvs are not counted. The kernel reports nothing if `net.netfilter.nf_conntrack_events` is 0. In the chart:
`agent.extraArgs={--count-connections}`.

Names of counters end with `_total`. A histogram `NAME` has the series `NAME_bucket`, `NAME_sum` and `NAME_count`.
`kplane_controlplane_applied_lag_seconds` counts the nodes at this moment: use it without `rate`.
";

/// The sections, and the prefixes of the metrics in them.
const SECTIONS: [(&str, &str, &str); 5] = [
    ("Control plane", "kplane_controlplane_", ""),
    (
        "Control plane, under the names of Kubernetes' own components",
        "rest_client_",
        "",
    ),
    ("Agent", "kplane_agent_", ""),
    (
        "Agent, under the names of kube-proxy",
        "kubeproxy_",
        "Modes iptables and ipvs have the names that kube-proxy has there: \
         [kube-proxy-compat.md](kube-proxy-compat.md).\n\n",
    ),
    ("Both", "process_", ""),
];

pub(in crate::chart) fn the_page_lists_all_metrics() -> Result<()> {
    let families = Exported::get()?.families();
    let mut page = HEAD.to_owned();
    let mut listed = 0;
    for (title, prefix, text) in SECTIONS {
        write!(
            page,
            "\n## {title}\n\n{text}| name | type | labels | meaning |\n|---|---|---|---|\n"
        )?;
        for (name, family) in families.iter().filter(|(name, _)| name.starts_with(prefix)) {
            let labels: Vec<String> = family
                .labels
                .iter()
                .filter(|label| *label != "le")
                .map(|label| format!("`{label}`"))
                .collect();
            let (kind, help) = (&family.kind, family.help.trim_end_matches('.'));
            writeln!(
                page,
                "| `{name}` | {kind} | {} | {help} |",
                labels.join(", ")
            )?;
            listed += 1;
        }
    }
    ensure!(listed == families.len(), "{listed} of {}", families.len());
    compare("docs/metrics.md", &page)
}
