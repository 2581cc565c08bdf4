//! What a userspace proxy knows of the ServicePorts that it serves, for operators (`userspace.md`, U56).

use std::net::SocketAddr;
use std::time::Duration;

use crate::net::EndpointAddr;

/// The reason why a connection, or the first datagram of a flow, did not reach an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProxyFailure {
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

impl ProxyFailure {
    /// All reasons.
    pub const ALL: [Self; 5] = [
        Self::NoEndpoint,
        Self::Source,
        Self::Refused,
        Self::Silent,
        Self::Limit,
    ];

    /// Returns the name for metrics and JSON.
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

/// The counters of one ServicePort at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProxyCounts {
    /// Connections and flows that reached an endpoint.
    pub opened: u64,
    /// Those that are open now.
    pub open: u64,
    /// Those that did not reach one, in the order of [`ProxyFailure::ALL`].
    pub failed: [u64; ProxyFailure::ALL.len()],
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

impl ProxyCounts {
    /// Adds other counts.
    pub fn add(&mut self, more: Self) {
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

/// The state of a ServicePort, for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProxyPort {
    /// Counts of its connections.
    pub counts: ProxyCounts,
    /// Its endpoints.
    pub endpoints: Vec<ProxyEndpoint>,
}

/// The state of one endpoint, for operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyEndpoint {
    /// The endpoint.
    pub addr: EndpointAddr,
    /// Open connections.
    pub open: u32,
    /// Time for which new connections still avoid it; `None` if they do not.
    pub avoided_for: Option<Duration>,
}

/// A connection or flow of a client that a proxy leads to an endpoint, for operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyConnection {
    /// The client.
    pub client: SocketAddr,
    /// The endpoint.
    pub endpoint: EndpointAddr,
    /// The part of its life.
    pub stage: ProxyStage,
    /// Time since the client came; `None` if an earlier proxy accepted it.
    pub age: Option<Duration>,
    /// Bytes to the endpoint and to the client since this proxy has it; `None` for flows of UDP.
    pub bytes: Option<[u64; 2]>,
}

/// A part of the life of a connection through a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyStage {
    /// The endpoint has not answered.
    Unanswered,
    /// The endpoint has answered.
    Open,
    /// One side has closed the connection.
    Closing,
}
