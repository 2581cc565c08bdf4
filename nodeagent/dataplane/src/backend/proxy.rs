//! The userspace proxy as the rest of the agent sees it: facts, settings, and a way to one that runs. Only programs with the
//! feature `userspace` have one (`userspace.rs`).

use std::any::Any;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use kplane_model::{
    EndpointAddr, ProxyConnection, ProxyCounts, ProxyEndpoints, ProxyPort, ServiceKey,
};
use parking_lot::Mutex;

use super::{Description, Failures, ModeMetrics};

/// The facts that hold for the way without rights on every machine.
pub(super) const LOOPBACK: Description = Description {
    name: "userspace-loopback",
    summary: "Sockets on loopback addresses and node ports, without any right: for laptops, CI and sandboxes",
    deprecation: None,
    programs_kernel: false,
    shares_names: false,
    has_virtual_servers: false,
    is_proxy: true,
    needs: &[],
    leaves_conntrack_entries: false,
    metrics: ModeMetrics {
        full_and_partial: true,
        failures: Failures::Nftables,
        rules: false,
    },
};

/// The facts that hold for the way with the right to change rules on every machine.
pub(super) const CAPTURE: Description = Description {
    name: "userspace",
    summary: "A proxy in the agent that tries another endpoint when one does not answer, with nftables behind it",
    programs_kernel: true,
    leaves_conntrack_entries: true,
    ..LOOPBACK
};

/// Settings of the userspace proxy alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserspaceSettings {
    /// The file that lists the addresses of Services, in the format of `/etc/hosts`.
    pub hosts_file: Option<PathBuf>,
    /// Number of threads; `None` = one for each processor.
    pub threads: Option<usize>,
    /// Time without a datagram after which a UDP flow ends; `None` = the default.
    pub udp_idle: Option<Duration>,
    /// Whether endpoints on this node see the client's address.
    pub transparent: bool,
    /// The endpoints to which the proxy may connect in front of a backend of the kernel.
    pub endpoints: ProxyEndpoints,
    /// The folder of the socket at which the next agent asks for connections; `None` = none is handed over.
    pub run_dir: Option<PathBuf>,
    /// Longest time for which an agent that is stopped goes on with its connections; 0 = it ends at once.
    pub drain: Duration,
    /// What the proxy before had open, for the next one.
    #[cfg(feature = "userspace")]
    pub inheritance: kplane_userproxy::Inheritance,
}

/// The action for each connection of a proxy, with the index of its ServicePort.
pub type Show = Box<dyn Fn(usize, ProxyConnection) + Send + Sync>;

/// A userspace proxy that runs.
pub trait Proxy: Any + Send + Sync {
    /// Returns the numbers of open connections and flows.
    fn open(&self) -> [usize; 2];

    /// Returns whether each thread came to its work within a time.
    fn is_alive(&self, within: Duration) -> bool;

    /// Returns the sum of the counts of all ServicePorts, and the number of endpoints that new connections avoid now.
    fn totals(&self) -> (ProxyCounts, usize);

    /// Returns the counts of at most `most` ServicePorts that ask for the proxy, in the order of their names.
    fn listed(&self, most: usize) -> Vec<(ServiceKey, ProxyCounts)>;

    /// Returns the ServicePorts of which clients were refused because of a limit, with the number of clients.
    fn limited(&self) -> Vec<(ServiceKey, u64)>;

    /// Returns at most `most` endpoints that new connections avoid, or avoided within the last minute.
    fn avoided(&self, most: usize) -> Vec<(ServiceKey, EndpointAddr)>;

    /// Returns counters and endpoints of a ServicePort.
    fn state(&self, key: &ServiceKey) -> Option<ProxyPort>;

    /// Shows each connection and flow of some ServicePorts, with the index of its ServicePort. Returns whether all were shown
    /// within a time; the others may be shown later.
    fn show(&self, keys: Vec<ServiceKey>, within: Duration, each: Show) -> bool;

    /// Returns the clients that a ServicePort remembers, their endpoints, and for how long they still are remembered.
    fn remembered(&self, key: &ServiceKey) -> Vec<(IpAddr, EndpointAddr, Duration)>;
}

/// A handle to a backend's userspace proxy. The proxy may start after the backend, and ends with it.
#[derive(Clone, Default)]
pub struct ProxyHandle {
    proxy: Arc<OnceLock<Weak<dyn Proxy>>>,
    lapse: Arc<Mutex<Option<Lapse>>>,
}

/// A moment in which the kernel served new connections in the proxy's place.
#[derive(Clone, Debug)]
pub struct Lapse {
    /// The reason, human-readable.
    pub reason: String,
    /// The moment.
    pub at: Instant,
}

impl ProxyHandle {
    /// Returns the proxy, if it runs.
    pub fn get(&self) -> Option<Arc<dyn Proxy>> {
        self.proxy.get()?.upgrade()
    }

    /// Returns the last moment in which the kernel served new connections in the proxy's place, if there was one.
    pub fn last_lapse(&self) -> Option<Lapse> {
        let lapse = self.lapse.lock();
        lapse.clone()
    }
}

#[cfg(feature = "userspace")]
impl ProxyHandle {
    /// Sets the proxy, which is the only one of the backend.
    pub(super) fn set(&self, proxy: &Arc<impl Proxy>) {
        let proxy = Arc::downgrade(proxy);
        let _ = self.proxy.set(proxy);
    }

    /// Notes that the kernel serves new connections now, and why.
    pub(super) fn note_lapse(&self, reason: &str) {
        let lapse = Lapse {
            reason: reason.to_owned(),
            at: Instant::now(),
        };
        *self.lapse.lock() = Some(lapse);
    }
}

impl fmt::Debug for ProxyHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.get().is_some();
        f.debug_struct("ProxyHandle").field("runs", &runs).finish()
    }
}
