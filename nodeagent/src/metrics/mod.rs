//! Metrics (section (h)) and what else kube-proxy serves on port 10249 (G5).
//!
//! ```text
//! engine -> Counters (atomics) --.
//! engine -> Report --------------+-- collect, at each scrape -> /metrics
//! /proc/self --------------------'
//! ```
//!
//! Names, types, labels and buckets of `kubeproxy_*` are kube-proxy's; `kplane_agent_*` is ours.
//! No label has the name of a Service: the number of series does not grow with the cluster.

mod collect;
mod counters;
mod serve;

#[cfg(test)]
mod tests;

pub use counters::{Counter, Counters, FamilyCounters, Gauge, Histogram};
pub use serve::Metrics;

use std::sync::Arc;

use tokio::sync::watch;

use crate::connection::Connection;
use crate::healthz::Answers;
use crate::report::Report;
use kplane_dataplane::backend::Description;

/// Where the numbers come from.
#[derive(Clone, Debug)]
pub struct Sources {
    /// What is counted while the agent works.
    pub counters: Arc<Counters>,
    /// Of the engine.
    pub reports: watch::Receiver<Report>,
    /// To the control plane.
    pub connection: watch::Receiver<Connection>,
    /// Of the health port.
    pub answers: Arc<Answers>,
    /// The backend.
    pub backend: &'static Description,
}
