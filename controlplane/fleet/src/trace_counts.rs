//! Numbers of traces, for metrics.

use std::sync::atomic::AtomicU64;

/// Numbers of traces.
#[derive(Debug, Default)]
pub struct TraceCounts {
    /// Traces that the collector took.
    pub sent: AtomicU64,
    /// Traces that were lost: the collector did not take them, or too many changes waited.
    pub lost: AtomicU64,
}
