//! The kernel's notifications in this network namespace, in order: about nf_tables, every transaction that any program
//! commits; about connection tracking, every connection that begins; about links, every change of their addresses.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use netlink_sys::protocols::{NETLINK_NETFILTER, NETLINK_ROUTE};
use netlink_sys::{Socket, SocketAddr};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, setsockopt, sockopt};
use socket2::{SockFilter, SockRef};

use super::attribute::Attribute;
use super::conntrack::only_translated;
use super::error::NetlinkError;
use super::filter::{ALL, JUMP_EQUAL, LOAD_HALF, LOAD_WORD, RETURN};
use super::message::{Message, Messages};
use super::socket::{DATAGRAM_BYTES, errno_of};

/// `NFNLGRP_NFTABLES` (linux/netfilter/nfnetlink.h).
const NFNLGRP_NFTABLES: u32 = 7;
/// `NFNLGRP_CONNTRACK_NEW` and `NFNLGRP_CONNTRACK_DESTROY`.
const OF_CONNECTIONS: [u32; 2] = [1, 3];
/// `RTNLGRP_IPV4_IFADDR` and `RTNLGRP_IPV6_IFADDR` (linux/rtnetlink.h).
const OF_ADDRESSES: [u32; 2] = [5, 9];
/// `NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_NEWGEN` (linux/netfilter/nf_tables.h): the last notification of a
/// transaction.
const NEWGEN: u16 = 10 << 8 | 15;
/// `enum nft_gen_attributes`.
const NFTA_GEN_ID: u16 = 1;
const NFTA_GEN_PROC_PID: u16 = 2;
const NFTA_GEN_PROC_NAME: u16 = 3;

/// Requested receive buffer: some 10,000 notifications. If more wait, the kernel drops them and reports
/// the loss.
const RECEIVE_BUFFER_BYTES: usize = 8 << 20;

/// A socket that receives notifications of one kind: about all transactions, but of those of one other kplane socket
/// only the end; or about all connections that begin or end.
///
/// The socket never blocks. It never asks the kernel to hide losses (`NETLINK_NO_ENOBUFS`), because a loss
/// must lead to reading everything back.
#[derive(Debug)]
pub struct Monitor {
    socket: Socket,
    groups: &'static [u32],
    is_paused: bool,
    datagram: Vec<u8>,
}

/// The end of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generation {
    /// The generation that the transaction created.
    pub number: u32,
    /// The thread that committed the transaction, and its name; kernels before 4.11 do not report them.
    pub by: Option<(u32, String)>,
}

impl Generation {
    /// Reads a message, if it is the end of a transaction.
    pub fn of(message: Message<'_>) -> Option<Self> {
        if message.kind != NEWGEN {
            return None;
        }
        let attributes = message.attributes();
        let thread = attributes.get(NFTA_GEN_PROC_PID).and_then(Attribute::as_u32);
        let name = attributes.get(NFTA_GEN_PROC_NAME).and_then(Attribute::as_str);
        Some(Self {
            number: attributes.get(NFTA_GEN_ID)?.as_u32()?,
            by: thread.zip(name.map(str::to_owned)),
        })
    }
}

impl Monitor {
    /// Opens a socket in this thread's network namespace. It receives everything except the contents of
    /// transactions that the socket of port `own` commits.
    ///
    /// # Errors
    /// [`NetlinkError::Open`]; `EPERM` without `CAP_NET_ADMIN`.
    pub fn open(own: u32) -> Result<Self, NetlinkError> {
        Self::of_groups(
            NETLINK_NETFILTER,
            &[NFNLGRP_NFTABLES],
            &without_contents_of(own),
        )
    }

    /// Opens a socket in this thread's network namespace that receives each connection that begins, once its first
    /// packet has passed all rules, and with `ends` also each one that ends: messages for
    /// [`Reported::parse`](crate::conntrack::Reported::parse). Only connections whose destination is translated come.
    ///
    /// # Errors
    /// As [`Monitor::open`].
    pub fn of_connections(ends: bool) -> Result<Self, NetlinkError> {
        let groups = if ends { &OF_CONNECTIONS[..] } else { &OF_CONNECTIONS[..1] };
        Self::of_groups(NETLINK_NETFILTER, groups, &only_translated())
    }

    /// Opens a socket in this thread's network namespace that receives each change of addresses: messages for
    /// [`removed_address`](crate::removed_address).
    ///
    /// # Errors
    /// [`NetlinkError::Open`].
    pub fn of_addresses() -> Result<Self, NetlinkError> {
        Self::of_groups(NETLINK_ROUTE, &OF_ADDRESSES, &[])
    }

    fn of_groups(
        protocol: isize,
        groups: &'static [u32],
        filter: &[SockFilter],
    ) -> Result<Self, NetlinkError> {
        let mut socket = Socket::new(protocol).map_err(|error| open(&error))?;
        socket.bind_auto().map_err(|error| open(&error))?;
        socket.set_non_blocking(true).map_err(|error| open(&error))?;
        if setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER_BYTES).is_err() {
            let limited = setsockopt(&socket, sockopt::RcvBuf, &RECEIVE_BUFFER_BYTES);
            limited.map_err(NetlinkError::Open)?;
        }
        // The filter is attached first, so that the socket never receives what the filter drops.
        if !filter.is_empty() {
            SockRef::from(&socket).attach_filter(filter).map_err(|error| open(&error))?;
        }
        let mut monitor = Self {
            socket,
            groups,
            is_paused: true,
            datagram: Vec::with_capacity(DATAGRAM_BYTES),
        };
        monitor.resume()?;
        Ok(monitor)
    }

    /// Receives no more notifications until [`Monitor::resume`]. Those that wait already can be read. While nobody
    /// receives notifications, the kernel makes none.
    ///
    /// # Errors
    /// [`NetlinkError::Open`].
    pub fn pause(&mut self) -> Result<(), NetlinkError> {
        self.is_paused = true;
        let paused = self.groups.iter().try_for_each(|group| self.socket.drop_membership(*group));
        paused.map_err(|error| open(&error))
    }

    /// Receives notifications again.
    ///
    /// # Errors
    /// As [`Monitor::open`]; the socket is still paused.
    pub fn resume(&mut self) -> Result<(), NetlinkError> {
        let resumed = self.groups.iter().try_for_each(|group| self.socket.add_membership(*group));
        resumed.map_err(|error| open(&error))?;
        self.is_paused = false;
        Ok(())
    }

    /// Returns whether notifications are not received now.
    pub fn is_paused(&self) -> bool {
        self.is_paused
    }

    /// Returns a descriptor that is readable when notifications wait.
    ///
    /// # Errors
    /// [`NetlinkError::Open`] when there are no descriptors left.
    pub fn readiness(&self) -> Result<OwnedFd, NetlinkError> {
        let fd = self.socket.as_fd().try_clone_to_owned();
        fd.map_err(|error| NetlinkError::Open(errno_of(&error)))
    }

    /// Passes on all messages that wait. Returns `false` when some were lost before the last of them.
    pub fn drain(&mut self, each: impl FnMut(Message<'_>)) -> bool {
        self.read(usize::MAX, each).0
    }

    /// Passes on the messages of some datagrams that wait. Returns whether none was lost before the last of them, and
    /// whether more may wait.
    pub fn read(&mut self, most: usize, mut each: impl FnMut(Message<'_>)) -> (bool, bool) {
        let mut whole = true;
        for _ in 0..most {
            self.datagram.clear();
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC;
            match self.socket.recv_from(&mut self.datagram, flags.bits()) {
                // Only the kernel has port 0; any program may send to this socket.
                Ok((_, sender)) if !is_kernel(sender) => {}
                Ok((len, _)) if len > self.datagram.len() => whole = false,
                Ok(_) => Messages(&self.datagram).for_each(&mut each),
                Err(error) => match errno_of(&error) {
                    Errno::EAGAIN => return (whole, false),
                    Errno::EINTR => {}
                    Errno::ENOBUFS => whole = false,
                    // Nothing more can be read now; the next call tries again.
                    _ => return (false, false),
                },
            }
        }
        (whole, true)
    }
}

fn open(error: &io::Error) -> NetlinkError {
    NetlinkError::Open(errno_of(error))
}

fn is_kernel(sender: SocketAddr) -> bool {
    sender.port_number() == 0
}

/// Returns a classic BPF program (linux/filter.h). It passes everything that is not of port `own`, and of
/// that port only the ends of transactions. All messages of one datagram belong to one transaction, and
/// its end comes in a separate datagram.
fn without_contents_of(own: u32) -> [SockFilter; 6] {
    /// Offsets in `struct nlmsghdr`.
    const TYPE: u32 = 4;
    const PORT: u32 = 12;
    // The program reads in network byte order, but the header is in the machine's.
    let port = u32::from_be_bytes(own.to_ne_bytes());
    let end = u32::from(u16::from_be_bytes(NEWGEN.to_ne_bytes()));
    [
        SockFilter::new(LOAD_WORD, 0, 0, PORT),
        SockFilter::new(JUMP_EQUAL, 0, 2, port),
        SockFilter::new(LOAD_HALF, 0, 0, TYPE),
        SockFilter::new(JUMP_EQUAL, 0, 1, end),
        SockFilter::new(RETURN, 0, 0, ALL),
        SockFilter::new(RETURN, 0, 0, 0),
    ]
}
