//! Records when a control plane last confirmed what the node serves.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The time of the last update or heartbeat of a control plane from which the agent has everything,
/// milliseconds since 1970; 0 = never. The time of an earlier process counts until there is a newer one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Confirmation(Arc<AtomicU64>);

impl Confirmation {
    pub(crate) fn set(&self, at_ms: u64) {
        self.0.store(at_ms, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
