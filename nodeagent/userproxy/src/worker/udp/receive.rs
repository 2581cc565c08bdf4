//! Reading many datagrams at once.

use std::io::IoSliceMut;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, MultiHeaders, RecvMsg, SockaddrStorage, recvmmsg,
};

/// Most datagrams of one call.
const BATCH: usize = 32;

/// Largest datagram in bytes.
const LARGEST: usize = 64 * 1024;

/// A datagram of a client.
pub(in crate::worker) struct Datagram<'a> {
    pub(super) client: SocketAddr,
    /// The address of this machine to which it came, if the socket has more than one.
    pub(super) local: Option<IpAddr>,
    pub(super) bytes: &'a [u8],
}

/// Room for the datagrams of one call.
pub(super) struct Room(Vec<u8>);

impl Default for Room {
    fn default() -> Self {
        Self(vec![0; BATCH * LARGEST])
    }
}

/// The part of a call's arguments that belongs to one socket: the kernel leaves in them the lengths of its addresses, for
/// which the next call has room.
pub(super) struct Receiver(MultiHeaders<SockaddrStorage>);

impl Default for Receiver {
    fn default() -> Self {
        // The larger of both families' addresses.
        let control = nix::cmsg_space!(nix::libc::in6_pktinfo);
        Self(MultiHeaders::preallocate(BATCH, Some(control)))
    }
}

/// The client, the address of this machine, and the number of bytes.
type Facts = (Option<SocketAddr>, Option<IpAddr>, usize);

impl Receiver {
    /// Reads the datagrams that wait. An error, such as that of an earlier answer, leaves them for the next call.
    pub(super) fn receive<'r>(
        &mut self,
        socket: &OwnedFd,
        room: &'r mut Room,
    ) -> impl Iterator<Item = Datagram<'r>> + use<'r> {
        let all = self.call(socket, room);
        room.0.chunks(LARGEST).zip(all).filter_map(|(chunk, (client, local, len))| {
            Some(Datagram {
                client: client?,
                local,
                bytes: &chunk[..len],
            })
        })
    }

    fn call(&mut self, socket: &OwnedFd, room: &mut Room) -> Vec<Facts> {
        let chunks = room.0.chunks_mut(LARGEST);
        let mut slices: Vec<_> = chunks.map(|chunk| [IoSliceMut::new(chunk)]).collect();
        let (socket, flags) = (socket.as_raw_fd(), MsgFlags::MSG_DONTWAIT);
        match recvmmsg(socket, &mut self.0, slices.iter_mut(), flags, None) {
            Ok(received) => received.map(|message| facts(&message)).collect(),
            Err(_) => Vec::new(),
        }
    }
}

fn facts(message: &RecvMsg<'_, '_, SockaddrStorage>) -> Facts {
    let from = message.address;
    let v4 =
        from.and_then(|from| from.as_sockaddr_in().copied().map(|at| SocketAddr::V4(at.into())));
    let client = v4.or_else(|| {
        from.and_then(|from| from.as_sockaddr_in6().copied().map(|at| SocketAddr::V6(at.into())))
    });
    (client, local(message), message.bytes)
}

/// Returns the address of this machine to which a datagram came.
fn local(message: &RecvMsg<'_, '_, SockaddrStorage>) -> Option<IpAddr> {
    let mut control = message.cmsgs().ok()?;
    control.find_map(|control| match control {
        ControlMessageOwned::Ipv4PacketInfo(info) => {
            Some(IpAddr::from(info.ipi_addr.s_addr.to_ne_bytes()))
        }
        ControlMessageOwned::Ipv6PacketInfo(info) => Some(IpAddr::from(info.ipi6_addr.s6_addr)),
        _ => None,
    })
}
