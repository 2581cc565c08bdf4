//! Succession: a proxy's sockets and connections, on their way from one process to the next (`userspace.md`, U57).
//!
//! [`Proxy::pack`](crate::Proxy::pack) takes everything out of a proxy. No data moves from then on, and nothing is closed. Another
//! proxy continues from the [`Bundle`]: in the same process, or in another one, to which [`Successor::give`] passes it.
//! The receiver confirms that it has everything before it moves any data. So until then the giver may go on by itself.
//!
//! ```text
//! successor  Hello ─────────────▶ predecessor      each message is one record of a Unix socket
//!            ◀───────── Listener, Connection, ..   with the descriptors that it names
//!            ◀───────────────────────────── End
//!            Taken ─────────────▶                  the predecessor forgets what it gave
//! ```

mod channel;
mod listener;
mod wire;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kplane_model::{EndpointAddr, ServiceKey};
use parking_lot::Mutex;

pub use self::listener::{HandoverError, HandoverListener, Successor, ask};
use crate::listening::{ListenerId, Listening};

/// Everything that a proxy has open.
#[derive(Debug, Default)]
pub struct Bundle {
    pub(crate) listeners: Vec<Arc<Listening>>,
    pub(crate) connections: Vec<Connection>,
    pub(crate) clients: Vec<Client>,
    pub(crate) flows: Vec<FlowState>,
}

impl Bundle {
    /// Returns the numbers of listeners, of connections with those that have no endpoint yet, and of UDP flows.
    pub fn counts(&self) -> [usize; 3] {
        let connections = self.connections.len() + self.clients.len();
        [self.listeners.len(), connections, self.flows.len()]
    }
}

/// Data that was read and not sent.
#[derive(Debug)]
pub(crate) enum Unsent {
    None,
    Bytes(Box<[u8]>),
    /// A pipe with so many bytes: where to read them, and where they were written.
    Pipe([OwnedFd; 2], usize),
}

/// The state of one direction of a connection.
#[derive(Debug)]
pub(crate) struct WayState {
    /// The receiver has learnt that the sender has ended.
    pub(crate) has_ended: bool,
    /// The kernel never moves the data.
    pub(crate) is_plain: bool,
    pub(crate) unsent: Unsent,
}

/// A client's connection, and the one to its endpoint.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) key: ServiceKey,
    pub(crate) endpoint: EndpointAddr,
    /// The client's, and the endpoint's.
    pub(crate) ends: [OwnedFd; 2],
    /// To the endpoint, and to the client.
    pub(crate) ways: [WayState; 2],
}

/// A client's connection without an endpoint.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) listener: ListenerId,
    pub(crate) address: SocketAddr,
    pub(crate) socket: OwnedFd,
}

/// A UDP flow.
#[derive(Debug)]
pub(crate) struct FlowState {
    pub(crate) listener: ListenerId,
    /// The number of the listener's socket at which the client's datagrams arrive.
    pub(crate) number: usize,
    pub(crate) key: ServiceKey,
    pub(crate) endpoint: EndpointAddr,
    /// The client, and the address of this machine that the client wanted, if the socket has more than one.
    pub(crate) client: (SocketAddr, Option<IpAddr>),
    pub(crate) socket: OwnedFd,
}

/// A place for a bundle between the end of one proxy and the start of the next. Clones share it.
#[derive(Clone, Default)]
pub struct Inheritance(Arc<Mutex<Option<Bundle>>>);

impl Inheritance {
    /// Leaves a bundle for the next proxy.
    pub fn put(&self, bundle: Bundle) {
        *self.0.lock() = Some(bundle);
    }

    /// Takes the bundle, if there is one.
    pub fn take(&self) -> Option<Bundle> {
        self.0.lock().take()
    }

    /// Returns whether there is a bundle.
    pub fn is_there(&self) -> bool {
        let place = self.0.lock();
        place.is_some()
    }
}

impl fmt::Debug for Inheritance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Inheritance(is_there: {})", self.is_there())
    }
}

/// Two settings with the same place are equal.
impl PartialEq for Inheritance {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || !(self.is_there() || other.is_there())
    }
}

impl Eq for Inheritance {}
