//! Clients that ask by UDP. One thread has a number of queries under way at any time.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use anyhow::Result;
use nix::libc::{in_addr, in_pktinfo};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, SockaddrStorage, sendmsg, setsockopt, sockopt};

use crate::proxies::load::Done;
use crate::proxies::target::CLIENTS;

/// Bytes of a query.
const QUERY: usize = 48;

/// Time after which a query counts as lost, and is repeated.
const LOST: Duration = Duration::from_millis(50);

/// Ports of the client with which each of its addresses is another flow.
const PORTS: u16 = 16;

/// Queries of flows that stay, each with a socket of its own.
pub(crate) fn flows(
    to: SocketAddr,
    flows: usize,
    done: &Done,
    stop: &dyn Fn() -> bool,
) -> Result<()> {
    let sockets: Result<Vec<_>> = (0..flows)
        .map(|_| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.connect(to)?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        })
        .collect();
    let sockets = sockets?;
    // An error is that of an earlier datagram; a lost query is repeated.
    let ask = |socket: &UdpSocket| drop(socket.send(&[b'q'; QUERY]));
    sockets.iter().for_each(ask);
    let timeout = PollTimeout::try_from(LOST)?;
    let mut answer = [0; 2048];
    let mut polled: Vec<_> = sockets
        .iter()
        .map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN))
        .collect();
    while !stop() {
        if poll(&mut polled, timeout)? == 0 {
            done.failed.fetch_add(1, Relaxed);
            sockets.iter().for_each(ask);
            continue;
        }
        for (socket, polled) in sockets.iter().zip(&polled) {
            if polled.any() == Some(true) && socket.recv(&mut answer).is_ok() {
                done.ok.fetch_add(1, Relaxed);
                ask(socket);
            }
        }
    }
    Ok(())
}

/// Queries of which each comes from another address or port than all before.
pub(crate) fn new_flows(
    to: SocketAddr,
    under_way: usize,
    done: &Done,
    stop: &dyn Fn() -> bool,
) -> Result<()> {
    let sockets: Result<Vec<_>> = (0..PORTS)
        .map(|_| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            setsockopt(&socket, sockopt::RcvBuf, &(1 << 20))?;
            socket.set_read_timeout(Some(LOST))?;
            Ok(socket)
        })
        .collect();
    let mut answer = [0; 2048];
    for socket in sockets?.iter().cycle() {
        // All addresses of the prefix but the first and the last, one after the other.
        let mut client = 1u32;
        let mut ask = |socket: &UdpSocket| {
            let from = Ipv4Addr::from_bits(CLIENTS.to_bits() + client);
            client = client % 65_000 + 1;
            send_from(socket, from, to);
        };
        (0..under_way).for_each(|_| ask(socket));
        for _ in 0..60_000 {
            match socket.recv(&mut answer) {
                Ok(_) => {
                    done.ok.fetch_add(1, Relaxed);
                    ask(socket);
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock) => {
                    done.failed.fetch_add(1, Relaxed);
                    (0..under_way).for_each(|_| ask(socket));
                }
                Err(_) => ask(socket),
            }
            if stop() {
                return Ok(());
            }
        }
    }
    Ok(())
}

fn send_from(socket: &UdpSocket, from: Ipv4Addr, to: SocketAddr) {
    let IpAddr::V4(_) = to.ip() else { return };
    let source = in_pktinfo {
        ipi_ifindex: 0,
        ipi_spec_dst: in_addr {
            s_addr: u32::from_ne_bytes(from.octets()),
        },
        ipi_addr: in_addr { s_addr: 0 },
    };
    let data = [std::io::IoSlice::new(&[b'q'; QUERY])];
    let control = [ControlMessage::Ipv4PacketInfo(&source)];
    let to = SockaddrStorage::from(to);
    // A query that is lost is repeated.
    let _ = sendmsg(
        socket.as_raw_fd(),
        &data,
        &control,
        MsgFlags::empty(),
        Some(&to),
    );
}
