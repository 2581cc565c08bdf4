//! Metrics (section (h)), and the other pages that kube-proxy serves on port 10249 (G5).
//!
//! ```text
//! engine -> Counters (atomics) --.
//! engine -> Report --------------+-- collect, at each scrape -> /metrics
//! conntrack -> ConntrackCounts --'
//! /proc/self --------------------'
//! ```
//!
//! Names, types, labels and buckets of `kubeproxy_*` are kube-proxy's; `kplane_agent_*` is kplane's
//! own. No label has the name of a Service, so the number of series does not grow with the cluster, except with
//! `--count-connections`, and for a few Services of the userspace proxy.

mod collect;
mod connections;
mod counters;
mod host;
mod loopback;
mod numbers;
mod policies;
mod proxy;
mod serve;
mod transactions;

#[cfg(test)]
mod tests;

pub use counters::{Counter, Counters, FamilyCounters, Gauge, Histogram};
pub(crate) use counters::{PrestopCounters, PrestopOutcome};
pub use serve::Metrics;
pub use transactions::Transactions;
pub(crate) use transactions::{NAMED, Transaction};

use std::sync::Arc;

use kplane_model::ServiceKey;
use tokio::sync::watch;

use crate::connection::Connection;
use crate::healthz::Answers;
use crate::report::Report;
use crate::service_connections::ServiceConnections;
use kplane_dataplane::backend::Description;
use kplane_dataplane::backend::ProxyHandle;
use kplane_dataplane::conntrack::ConntrackCounts;

/// The sources of the numbers.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The counters of the agent.
    pub counters: Arc<Counters>,
    /// The engine's reports.
    pub reports: watch::Receiver<Report>,
    /// The connection to the control plane.
    pub connection: watch::Receiver<Connection>,
    /// The counts of the health port's answers.
    pub answers: Arc<Answers>,
    /// The counts of deleted stale conntrack entries.
    pub conntrack: ConntrackCounts,
    /// The backend.
    pub backend: &'static Description,
    /// Connections by Service, if they are counted.
    pub connections: Option<Arc<ServiceConnections>>,
    /// The userspace proxy, if the backend has one.
    pub proxy: ProxyHandle,
}

/// Returns the labels of a ServicePort.
fn service_labels(key: &ServiceKey) -> [(&'static str, &str); 5] {
    [
        ("namespace", &*key.service.namespace),
        ("service", &*key.service.name),
        ("port", &*key.port_name),
        ("protocol", key.protocol.as_str()),
        ("ip_family", key.family.as_str()),
    ]
}
