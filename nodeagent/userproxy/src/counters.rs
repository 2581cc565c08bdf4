//! Counters of the connections of a ServicePort (U56).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The reason why a connection, or the first datagram of a flow, did not reach an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// There is no endpoint for this client.
    NoEndpoint,
    /// The Service's source ranges exclude the client (A8).
    Source,
    /// All endpoints refused, or could not be reached.
    Refused,
    /// No endpoint answered in time.
    Silent,
    /// A limit of connections, flows or files is reached.
    Limit,
}

impl Failure {
    /// All reasons.
    pub const ALL: [Self; 5] = [
        Self::NoEndpoint,
        Self::Source,
        Self::Refused,
        Self::Silent,
        Self::Limit,
    ];

    /// Returns the name for metrics and JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoEndpoint => "no_endpoint",
            Self::Source => "source",
            Self::Refused => "refused",
            Self::Silent => "silent",
            Self::Limit => "limit",
        }
    }
}

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

/// The counters of one ServicePort at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections and flows that reached an endpoint.
    pub opened: u64,
    /// Those that are open now.
    pub open: u64,
    /// Those that did not reach one, in the order of [`Failure::ALL`].
    pub failed: [u64; Failure::ALL.len()],
    /// Further attempts, after a failure or beside an endpoint that did not answer.
    pub retries: u64,
    /// Number of times that an endpoint was avoided from then on.
    pub avoided: u64,
    /// Bytes from clients to endpoints.
    pub to_endpoints: u64,
    /// Bytes from endpoints to clients.
    pub to_clients: u64,
    /// Datagrams to clients that the kernel did not take.
    pub lost: u64,
    /// Sum of the times until a connection to an endpoint was established, from the client's arrival.
    pub connect_time: Duration,
}

impl Counts {
    /// Adds other counts.
    pub(crate) fn add(&mut self, more: Self) {
        self.opened += more.opened;
        self.open += more.open;
        for (sum, count) in self.failed.iter_mut().zip(more.failed) {
            *sum += count;
        }
        self.retries += more.retries;
        self.avoided += more.avoided;
        self.to_endpoints += more.to_endpoints;
        self.to_clients += more.to_clients;
        self.lost += more.lost;
        self.connect_time += more.connect_time;
    }
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
