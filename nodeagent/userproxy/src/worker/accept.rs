//! Connections of clients, from the socket on which they arrive to the thread that serves them.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kplane_model::{Family, Protocol};
use rustix::io::Errno;
use rustix::net::{SocketFlags, acceptfrom_with, getsockname, sockopt};

use super::Command;
use super::accepted::Accepted;
use super::core::Core;
use super::socket::reset;
use crate::counters::Failure;
use crate::listening::{Listening, Role};
use crate::shares::Kind;

/// Most connections that are accepted for one event.
const ACCEPTS: usize = 64;

/// A socket on which connections arrive.
pub(super) struct Listener(Arc<Listening>);

impl Listener {
    pub(super) fn new(listening: Arc<Listening>) -> Self {
        Self(listening)
    }

    pub(super) fn listening(&self) -> &Arc<Listening> {
        &self.0
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.0.socket
    }

    pub(super) fn at(&self) -> SocketAddr {
        self.0.at
    }

    /// Accepts what waits, as long as there are files.
    pub(super) fn accept(&self, core: &mut Core) {
        for _ in 0..ACCEPTS {
            if !self.accept_one(core) {
                return;
            }
        }
    }

    /// Accepts one connection; returns false if none waits.
    fn accept_one(&self, core: &mut Core) -> bool {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, from) = loop {
            match acceptfrom_with(self.socket(), flags) {
                Ok(accepted) => break accepted,
                Err(Errno::AGAIN) => return false,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    core.full = true;
                    return false;
                }
                // The connection ended while it waited, or the network had an error for it (accept(2)).
                Err(_) => {}
            }
        };
        let client = from.and_then(|from| SocketAddr::try_from(from).ok());
        core.shared.connections.force();
        self.take(core, socket, client);
        true
    }

    /// Takes a connection that is counted already.
    pub(super) fn take(&self, core: &mut Core, socket: OwnedFd, client: Option<SocketAddr>) {
        match client.and_then(|client| self.admit(core, client, &socket)) {
            Some(admitted) => dispatch(core, admitted(socket)),
            None => {
                reset(&socket);
                core.shared.connections.leave();
            }
        }
    }

    /// Finds out to which ServicePort a client wants, and whether it may.
    fn admit(
        &self,
        core: &Core,
        client: SocketAddr,
        socket: &OwnedFd,
    ) -> Option<impl FnOnce(OwnedFd) -> Accepted + use<>> {
        let local = if self.0.at.ip().is_unspecified() {
            SocketAddr::try_from(getsockname(socket).ok()?).ok()?
        } else {
            self.0.at
        };
        let table = &core.shared.table;
        let route = match self.0.role {
            Role::Place(at) => table.route(Family::of(local.ip()), at)?,
            Role::Captured => table.route_to(Protocol::Tcp, original(socket, local)?)?,
        };
        if !route.admits(client.ip()) {
            route.port.fail(Failure::Source);
            return None;
        }
        // This connection counts already.
        let others = core.shared.connections.get().saturating_sub(1);
        let free = core.shared.limits.connections.saturating_sub(others);
        let Some(seat) = route.port.owners.seat(Kind::Connections, free) else {
            route.port.fail(Failure::Limit);
            return None;
        };
        let (listener, at) = (self.0.id, core.now);
        Some(move |socket| Accepted {
            listener,
            socket: Some(socket),
            client,
            local,
            route,
            at,
            seat: Some(seat),
        })
    }
}

/// Gives a connection to the thread that has fewest: this one, unless another has clearly fewer.
fn dispatch(core: &mut Core, accepted: Accepted) {
    let inboxes = &core.shared.inboxes;
    let open = |index: usize| inboxes[index].open();
    let idlest = (0..inboxes.len()).min_by_key(|index| open(*index));
    let waiting = core.accepted.len();
    let is_idler = |index: usize| open(index) + 1 < open(core.index) + waiting;
    match idlest.filter(|index| *index != core.index && is_idler(*index)) {
        Some(index) => inboxes[index].send(Command::Adopt(accepted)),
        None => core.accepted.push(accepted),
    }
}

/// Returns the address that the client wanted, before a rule led the connection to the proxy's own socket. `None` for a
/// client that connects to that socket itself.
fn original(socket: &OwnedFd, local: SocketAddr) -> Option<SocketAddr> {
    let to = match Family::of(local.ip()) {
        Family::V4 => SocketAddr::V4(sockopt::ip_original_dst(socket).ok()?),
        Family::V6 => SocketAddr::V6(sockopt::ipv6_original_dst(socket).ok()?),
    };
    (to != local).then_some(to)
}
