//! One ServicePort: its endpoints and options, and what its connections have shown.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kplane_model::{Cidr, EndpointAddr, FrontendAddr, ProxyPort, ServiceKey};
use parking_lot::{Mutex, MutexGuard};

use crate::affinity::Affinity;
use crate::budget::Budget;
use crate::counters::{Counters, Counts, Failure};
use crate::picker::{Choice, Endpoints, Picker, Pool};
use crate::shares::Owners;

/// Most clients that a ServicePort with session affinity remembers.
const AFFINITY_CLIENTS: usize = 65_536;

/// A ServicePort, as desired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortSpec {
    /// The identity.
    pub key: ServiceKey,
    /// The endpoints.
    pub endpoints: Endpoints,
    /// All places where its connections arrive.
    pub routes: Vec<RouteSpec>,
    /// Treatment of its connections.
    pub options: Options,
    /// Whether its counts are among [`Table::listed`](crate::Table::listed).
    pub is_listed: bool,
}

/// A place where connections arrive, and what happens to them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteSpec {
    /// The place.
    pub at: FrontendAddr,
    /// Endpoints for clients outside of the cluster.
    pub outside: Pool,
    /// Endpoints for pods and for the node itself (A16).
    pub inside: Pool,
    /// Clients that may use the place; empty = all (A8).
    pub sources: Vec<Cidr>,
}

/// Treatment of the connections of a ServicePort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Session affinity: time without a connection after which a client is forgotten (A11).
    pub affinity: Option<Duration>,
    /// Whether another endpoint is tried when the first does not take a connection (U52).
    pub retry: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            affinity: None,
            retry: true,
        }
    }
}

/// A ServicePort in use. Its state stays when it is configured anew.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) key: ServiceKey,
    pub(crate) counters: Counters,
    /// Its Service and namespace, with all that these have.
    pub(crate) owners: Owners,
    version: AtomicU64,
    suspects: Arc<Suspects>,
    state: Mutex<PortState>,
}

/// The ServicePorts with endpoints that were avoided since the last look, so that a look does not visit all others.
#[derive(Debug, Default)]
pub(crate) struct Suspects(Mutex<BTreeSet<ServiceKey>>);

impl Suspects {
    fn add(&self, key: &ServiceKey) {
        let mut keys = self.0.lock();
        if !keys.contains(key) {
            keys.insert(key.clone());
        }
    }

    /// Visits all in the order of their names, and forgets those for which `is_one` returns `false`. Ports may be locked
    /// meanwhile: they add themselves when they hold no lock.
    pub(crate) fn retain(&self, is_one: impl FnMut(&ServiceKey) -> bool) {
        let mut keys = self.0.lock();
        keys.retain(is_one);
    }
}

/// The state that all threads share.
#[derive(Debug)]
struct PortState {
    options: Options,
    picker: Picker,
    /// Further endpoints to which UDP flows may go on.
    serving: Vec<EndpointAddr>,
    /// Whether the ServicePort is gone.
    is_gone: bool,
    budget: Budget,
    affinity: Option<Affinity>,
}

impl Port {
    /// Creates a ServicePort without endpoints, which adds itself to the suspects when one of its endpoints is avoided.
    pub(crate) fn new(
        key: ServiceKey,
        owners: Owners,
        suspects: Arc<Suspects>,
        now: Instant,
    ) -> Self {
        Self {
            key,
            counters: Counters::default(),
            owners,
            version: AtomicU64::new(0),
            suspects,
            state: Mutex::new(PortState {
                options: Options::default(),
                picker: Picker::new(rand::random()),
                serving: Vec::new(),
                is_gone: false,
                budget: Budget::new(now),
                affinity: None,
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, PortState> {
        self.state.lock()
    }

    /// Puts endpoints and options into effect.
    pub(crate) fn configure(&self, endpoints: &Endpoints, options: Options) {
        let mut state = self.state();
        state.options = options;
        state.picker.configure(endpoints);
        state.serving.clone_from(&endpoints.serving);
        match (options.affinity, &mut state.affinity) {
            (None, affinity) => *affinity = None,
            (Some(timeout), Some(affinity)) => affinity.set_timeout(timeout),
            (Some(timeout), none) => *none = Some(Affinity::new(timeout, AFFINITY_CLIENTS)),
        }
        drop(state);
        self.version.fetch_add(1, Relaxed);
    }

    /// Ends the flows of a ServicePort that is gone. A connection that has just arrived still finds an endpoint. Returns
    /// what has happened to its connections, without those that are still open.
    pub(crate) fn retire(&self) -> Counts {
        self.state().is_gone = true;
        self.version.fetch_add(1, Relaxed);
        Counts {
            open: 0,
            ..self.counters.read()
        }
    }

    /// Chooses the endpoint for a client's first attempt.
    pub(crate) fn first(
        &self,
        pool: Pool,
        client: IpAddr,
        now: Instant,
    ) -> (Option<Choice>, Options) {
        let mut state = self.state();
        state.budget.earn();
        let wished = state.affinity.as_ref().and_then(|all| all.get(client, now));
        let choice = state.picker.pick(pool, wished, &[], now);
        (choice, state.options)
    }

    /// Chooses another endpoint, if the ServicePort may make another attempt.
    pub(crate) fn another(
        &self,
        pool: Pool,
        tried: &[EndpointAddr],
        now: Instant,
    ) -> Option<Choice> {
        let mut state = self.state();
        let choice = state.picker.pick(pool, None, tried, now)?;
        if !state.budget.spend(now) {
            return None;
        }
        self.counters.retries.fetch_add(1, Relaxed);
        Some(choice)
    }

    /// Records that a client has a connection to an endpoint, or a flow. `waited` is the time since the client came.
    pub(crate) fn opened(
        &self,
        endpoint: EndpointAddr,
        client: IpAddr,
        waited: Duration,
        now: Instant,
    ) {
        let mut state = self.state();
        state.picker.opened(endpoint);
        if let Some(affinity) = &mut state.affinity {
            affinity.set(client, endpoint, now);
        }
        drop(state);
        let waited = u64::try_from(waited.as_micros()).unwrap_or(u64::MAX);
        self.counters.connect_us.fetch_add(waited, Relaxed);
        self.counters.opened.fetch_add(1, Relaxed);
        self.counters.open.fetch_add(1, Relaxed);
    }

    /// Records a connection or a flow that an earlier proxy opened.
    pub(crate) fn inherited(&self, endpoint: EndpointAddr) {
        self.state().picker.opened(endpoint);
        self.counters.open.fetch_add(1, Relaxed);
    }

    /// Records that an endpoint answered an attempt, after so long.
    pub(crate) fn answered(&self, endpoint: EndpointAddr, took: Duration, now: Instant) {
        self.state().picker.answered(endpoint, took, now);
    }

    /// Records the end of a connection.
    pub(crate) fn closed(&self, endpoint: EndpointAddr) {
        self.state().picker.closed(endpoint);
        self.counters.open.fetch_sub(1, Relaxed);
    }

    /// Records a failed attempt.
    pub(crate) fn failed(&self, endpoint: EndpointAddr, now: Instant) {
        let is_avoided = self.state().picker.failed(endpoint, now);
        if is_avoided {
            self.counters.avoided.fetch_add(1, Relaxed);
            self.suspects.add(&self.key);
        }
    }

    /// Returns the endpoints that new connections avoid, or avoided within the last minute without a success since.
    pub(crate) fn avoided_lately(&self, now: Instant) -> Vec<EndpointAddr> {
        self.state().picker.avoided_lately(now).collect()
    }

    /// Returns a number that changes whenever the ServicePort is configured.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Relaxed)
    }

    /// Returns whether a UDP flow to an endpoint may go on (F2).
    pub(crate) fn serves(&self, endpoint: EndpointAddr) -> bool {
        let state = self.state();
        !state.is_gone && (state.picker.has(endpoint) || state.serving.contains(&endpoint))
    }

    /// Returns the clients that are remembered, their endpoints, and for how long they still are.
    pub(crate) fn remembered(&self, now: Instant) -> Vec<(IpAddr, EndpointAddr, Duration)> {
        let state = self.state();
        state.affinity.iter().flat_map(|all| all.clients(now)).collect()
    }

    /// Returns counters and the state of endpoints.
    pub(crate) fn counts(&self) -> Counts {
        self.counters.read()
    }

    pub(crate) fn read(&self, now: Instant) -> ProxyPort {
        ProxyPort {
            counts: self.counts(),
            endpoints: self.state().picker.states(now),
        }
    }

    /// Records that a client reached no endpoint.
    pub(crate) fn fail(&self, why: Failure) {
        self.counters.fail(why);
    }
}
