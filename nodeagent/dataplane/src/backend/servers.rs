//! Virtual servers and their real servers as a backend last saw them, for people: where the kernel
//! itself decides who serves, and endpoints that are gone keep their connections for a while.
//!
//! Two views, since a node may have tens of thousands of real servers whose connections change all
//! the time: [`ServerCounts`], a few numbers for every report, and [`Inspection`], everything about
//! one Service for whoever asks.

use std::sync::Arc;
use std::time::Duration;

use kplane_model::{EndpointAddr, ServiceKey};

/// All virtual servers of one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerCounts {
    /// Virtual servers.
    pub virtual_servers: u64,
    /// Their real servers.
    pub real_servers: u64,
    /// Those that keep their connections and get no new ones.
    pub draining: u64,
    /// Connections to all real servers.
    pub connections: Connections,
    /// The draining ones with the most connections, [`ServerCounts::DRAINS`] at most.
    pub drains: Arc<[Drain]>,
}

impl ServerCounts {
    /// How many draining real servers are named.
    pub const DRAINS: usize = 16;
}

/// Connections to real servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Connections {
    /// Established ones.
    pub active: u64,
    /// All others that are remembered: beginning, ending, UDP.
    pub inactive: u64,
}

/// A real server that drains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drain {
    /// Whose virtual server it is.
    pub key: ServiceKey,
    /// Where the virtual server is.
    pub server: EndpointAddr,
    /// The real server.
    pub at: EndpointAddr,
    /// What it waits for.
    pub connections: Connections,
}

/// What there is for one Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inspection {
    /// Sorted by address.
    pub servers: Vec<VirtualServer>,
    /// How long ago connections were counted.
    pub age: Duration,
    /// Why nothing, or not everything, is known; empty = it is.
    pub error: String,
}

/// One virtual server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualServer {
    /// Whose it is.
    pub key: ServiceKey,
    /// Where it is.
    pub at: EndpointAddr,
    /// How it spreads connections; empty if in a way that is not ours.
    pub scheduler: &'static str,
    /// A client keeps its real server for so many seconds.
    pub persistent_s: Option<u32>,
    /// Sorted by address.
    pub reals: Vec<RealServer>,
}

/// One real server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RealServer {
    /// Where it is.
    pub at: EndpointAddr,
    /// 0 gets no new connections.
    pub weight: u32,
    /// Connections to it.
    pub connections: Connections,
    /// It goes when its last connection has ended.
    pub draining: bool,
}
