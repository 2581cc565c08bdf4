//! Sockets to endpoints, and the way in which sockets end.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use kplane_model::EndpointAddr;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};
use socket2::SockRef;

/// Opens a socket for an endpoint, with the mark of the proxy's own connections if there is one.
pub(super) fn outgoing(
    endpoint: EndpointAddr,
    kind: SocketType,
    mark: Option<u32>,
) -> Result<OwnedFd, Errno> {
    let family = match endpoint.ip.is_ipv4() {
        true => AddressFamily::INET,
        false => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, kind, flags, None)?;
    if let Some(mark) = mark {
        // Without the right to do so, there are no rules that would catch the connection, either.
        let _ = SockRef::from(&socket).set_mark(mark);
    }
    Ok(socket)
}

/// Returns whether an error means that this process or machine lacks something, and says nothing about an endpoint.
pub(super) fn is_own(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS | Errno::ADDRNOTAVAIL
    )
}

/// Has the kernel send a reset when a connection is closed, which is next.
pub(super) fn reset(socket: impl AsFd) {
    // A socket that is broken needs none.
    let _ = sockopt::set_socket_linger(socket, Some(Duration::ZERO));
}
