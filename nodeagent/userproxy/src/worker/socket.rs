//! Sockets to endpoints, and the way in which sockets end.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use kplane_model::EndpointAddr;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{IpBindAddressNoPort, IpTransparent};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};
use socket2::SockRef;

/// Opens a socket for an endpoint, with the mark of the proxy's own connections if there is one. `source` is its address
/// if that is not this machine's.
pub(super) fn outgoing(
    endpoint: EndpointAddr,
    kind: SocketType,
    mark: Option<u32>,
    source: Option<IpAddr>,
) -> Result<OwnedFd, Errno> {
    let family = if endpoint.ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, kind, flags, None)?;
    if let Some(mark) = mark {
        // Without the right to do so, there are no rules that would catch the connection, either.
        let _ = SockRef::from(&socket).set_mark(mark);
    }
    if let Some(source) = source {
        bind_foreign(&socket, source)?;
    }
    Ok(socket)
}

/// Gives a socket an address that is not this machine's. The kernel chooses the port as the socket connects, so that
/// the same port serves for several endpoints.
fn bind_foreign(socket: &OwnedFd, source: IpAddr) -> Result<(), Errno> {
    // Linux takes these options of level IP for sockets of both families.
    setsockopt(socket, IpTransparent, &true)
        .and_then(|()| setsockopt(socket, IpBindAddressNoPort, &true))
        .map_err(|errno| Errno::from_raw_os_error(errno as i32))?;
    bind(socket, &SocketAddr::new(source, 0))
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
