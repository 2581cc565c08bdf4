//! The clients that the kernel remembers for session affinity, and the questions about them. Packets write them; no
//! plan contains them.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use kplane_model::{EndpointAddr, Family, ServiceKey};

/// Maximum number of clients in an answer.
pub(super) const MAX_CLIENTS: usize = 256;

/// A ServicePort with session affinity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AffinityPort {
    /// Identity.
    pub key: ServiceKey,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// The port on them.
    pub port: u16,
    /// The port on node addresses, if any.
    pub node_port: Option<u16>,
    /// Its endpoints.
    pub endpoints: Vec<EndpointAddr>,
}

impl AffinityPort {
    /// Returns whether connections to a destination belong to the ServicePort.
    pub(super) fn has(&self, at: SocketAddr) -> bool {
        let by_address = at.port() == self.port && self.addresses.contains(&at.ip());
        let family = Family::of(at.ip()) == self.key.family;
        by_address || (family && self.node_port == Some(at.port()))
    }
}

/// A client with its endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AffinityClient {
    /// Index of the ServicePort.
    pub port: usize,
    /// The client.
    pub client: IpAddr,
    /// The endpoint of its connections; `None` while the kernel has only a part of it.
    pub endpoint: Option<EndpointAddr>,
    /// Time until the kernel forgets the client, if it says so.
    pub expires: Option<Duration>,
}

/// The clients that are remembered, a few of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AffinityClients {
    /// The clients, 256 at most.
    pub clients: Vec<AffinityClient>,
    /// Number of further ones.
    pub more: u64,
}

impl AffinityClients {
    /// Adds a client if there is room and it is not there yet.
    pub(super) fn add(&mut self, client: AffinityClient) {
        let same = |known: &AffinityClient| {
            (known.port, known.client, known.endpoint)
                == (client.port, client.client, client.endpoint)
        };
        if self.clients.iter().any(same) {
            return;
        }
        if self.clients.len() < MAX_CLIENTS {
            self.clients.push(client);
        } else {
            self.more += 1;
        }
    }
}

/// The clients that a question is about, and the time for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientQuery {
    /// Only this client; `None` = all.
    pub(super) client: Option<IpAddr>,
    /// Time at which reading ends.
    pub(super) until: Instant,
}

impl ClientQuery {
    pub(super) fn wants(&self, client: IpAddr) -> bool {
        self.client.is_none_or(|wanted| wanted == client)
    }
}

/// The text of an error about a table that is too large.
pub(super) const LATE: &str =
    "so many clients are remembered that they cannot be read in time: ask for one client";
