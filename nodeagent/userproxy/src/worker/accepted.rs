//! A connection of a client that is accepted, and waits for an endpoint.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use super::socket::reset;
use crate::counters::Failure;
use crate::listening::ListenerId;
use crate::shares::Seat;
use crate::table::Route;

/// A connection that has no endpoint yet.
#[derive(Debug)]
pub(crate) struct Accepted {
    pub(super) listener: ListenerId,
    pub(super) socket: Socket,
    pub(super) client: SocketAddr,
    /// The address of this machine's end.
    pub(super) local: SocketAddr,
    pub(super) route: Arc<Route>,
    pub(super) at: Instant,
    /// Its place in the shares of its Service and namespace.
    pub(super) seat: Option<Seat>,
}

/// The client's socket, until the connection has an endpoint.
pub(super) type Socket = Option<OwnedFd>;

impl Accepted {
    /// Takes the socket out.
    pub(super) fn take(&mut self) -> Socket {
        self.socket.take()
    }

    /// Resets the connection, and counts why.
    pub(super) fn refuse(&self, why: Failure) {
        self.route.port.fail(why);
        if let Some(socket) = &self.socket {
            reset(socket);
        }
    }
}
