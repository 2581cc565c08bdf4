//! Human-readable views of virtual servers and their real servers, as a backend last read them. They exist
//! where the kernel itself chooses real servers, and removed endpoints keep their connections for a while.
//!
//! There are two views, since a node may have tens of thousands of real servers whose connections change all
//! the time. [`ServerCounts`] holds a few numbers for every report. [`Inspection`] holds everything about one
//! Service, on request.

use std::sync::Arc;
use std::time::Duration;

use kplane_model::{EndpointAddr, ServiceKey};

/// The virtual servers of one family, in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerCounts {
    /// Number of virtual servers.
    pub virtual_servers: u64,
    /// Number of their real servers.
    pub real_servers: u64,
    /// Number of draining real servers, which keep their connections and get no new ones.
    pub draining: u64,
    /// Connections to all real servers.
    pub connections: Connections,
    /// The draining real servers with the most connections, at most [`ServerCounts::DRAINS`].
    pub drains: Arc<[Drain]>,
}

impl ServerCounts {
    /// Most draining real servers in a report.
    pub const DRAINS: usize = 16;
}

/// Connections to real servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Connections {
    /// Number of established connections.
    pub active: u64,
    /// Number of all other connections that the kernel remembers: beginning, ending, UDP.
    pub inactive: u64,
}

/// A draining real server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drain {
    /// The ServicePort of its virtual server.
    pub key: ServiceKey,
    /// The address of its virtual server.
    pub server: EndpointAddr,
    /// The address of the real server.
    pub at: EndpointAddr,
    /// The connections that it still has.
    pub connections: Connections,
}

/// The virtual servers of one Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inspection {
    /// The virtual servers, sorted by address.
    pub servers: Vec<VirtualServer>,
    /// Time since connections were counted.
    pub age: Duration,
    /// The reason why nothing, or not everything, is known; empty if everything is.
    pub error: String,
}

impl Inspection {
    /// Adds the virtual servers of the other family. The age is that of the older count.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.servers.extend(other.servers);
        self.age = self.age.max(other.age);
        if !other.error.is_empty() {
            self.error = other.error;
        }
        self
    }
}

/// One virtual server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualServer {
    /// The ServicePort.
    pub key: ServiceKey,
    /// The address.
    pub at: EndpointAddr,
    /// The scheduler, which spreads connections; empty for a mode that kplane never uses.
    pub scheduler: &'static str,
    /// Seconds for which a client keeps its real server.
    pub persistent_s: Option<u32>,
    /// The real servers, sorted by address.
    pub reals: Vec<RealServer>,
}

/// One real server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RealServer {
    /// The address.
    pub at: EndpointAddr,
    /// The weight; 0 gets no new connections.
    pub weight: u32,
    /// Connections to it.
    pub connections: Connections,
    /// Whether the real server goes away when its last connection has ended.
    pub draining: bool,
}
