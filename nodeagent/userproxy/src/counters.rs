//! Counters of the connections of a ServicePort (U56).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

pub use kplane_model::{ProxyCounts as Counts, ProxyFailure as Failure};

/// The counters of one ServicePort. They only grow, except for `open`.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) opened: AtomicU64,
    pub(crate) open: AtomicU64,
    pub(crate) failed: [AtomicU64; Failure::ALL.len()],
    pub(crate) retries: AtomicU64,
    pub(crate) avoided: AtomicU64,
    pub(crate) to_endpoints: AtomicU64,
    pub(crate) to_clients: AtomicU64,
    pub(crate) lost: AtomicU64,
    pub(crate) connect_us: AtomicU64,
}

impl Counters {
    pub(crate) fn fail(&self, why: Failure) {
        self.failed[why as usize].fetch_add(1, Relaxed);
    }

    pub(crate) fn read(&self) -> Counts {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        Counts {
            opened: get(&self.opened),
            open: get(&self.open),
            failed: Failure::ALL.map(|why| get(&self.failed[why as usize])),
            retries: get(&self.retries),
            avoided: get(&self.avoided),
            to_endpoints: get(&self.to_endpoints),
            to_clients: get(&self.to_clients),
            lost: get(&self.lost),
            connect_time: Duration::from_micros(get(&self.connect_us)),
        }
    }
}
