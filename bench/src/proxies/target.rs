//! What clients ask for, and the addresses at which they, the proxy and the servers are.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

pub(crate) const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 177, 1, 2);
/// The proxy's address for clients, and the one for servers.
pub(crate) const PROXY: Ipv4Addr = Ipv4Addr::new(10, 177, 1, 1);
pub(crate) const BEHIND: Ipv4Addr = Ipv4Addr::new(10, 177, 2, 1);
pub(crate) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 177, 2, 2);
/// An address of the server at which nothing listens.
pub(crate) const REFUSING: Ipv4Addr = Ipv4Addr::new(10, 177, 2, 3);
/// An address behind the server, which drops packets for it without an answer.
const SILENT: Ipv4Addr = Ipv4Addr::new(10, 177, 3, 1);
/// Addresses of many clients: all of a prefix of 16 bits.
pub(crate) const CLIENTS: Ipv4Addr = Ipv4Addr::new(10, 178, 0, 0);

/// Bytes of a request, and of an answer.
pub(crate) const REQUEST: usize = 64;
pub(crate) const ANSWER: usize = 128;

/// What clients ask for. Each has ports of its own on every contender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Data is dropped.
    Sink,
    /// One answer, and the end of the connection.
    Once,
    /// An answer to each request.
    Echo,
    /// Nothing.
    Hold,
    /// Answers to datagrams.
    Datagrams,
    /// The same, for a proxy that expects one answer for each datagram.
    Lookups,
    /// As `Once`, with two endpoints of which one refuses.
    Refusing,
    /// As `Once`, with three endpoints: one refuses, one is silent.
    Dead,
    /// As `Once`, with one endpoint, which is silent.
    Silent,
    /// An answer after the client's end of data.
    HalfClose,
    /// A reset after a request.
    Resets,
}

impl Target {
    pub(crate) const ALL: [Self; 11] = [
        Self::Sink,
        Self::Once,
        Self::Echo,
        Self::Hold,
        Self::Datagrams,
        Self::Lookups,
        Self::Refusing,
        Self::Dead,
        Self::Silent,
        Self::HalfClose,
        Self::Resets,
    ];

    pub(crate) fn is_udp(self) -> bool {
        matches!(self, Self::Datagrams | Self::Lookups)
    }

    /// The port of the servers.
    pub(crate) fn server_port(self) -> u16 {
        match self {
            Self::Sink => 7000,
            Self::Once | Self::Refusing | Self::Dead | Self::Silent => 7001,
            Self::Echo => 7002,
            Self::Hold => 7003,
            Self::Datagrams | Self::Lookups => 7004,
            Self::HalfClose => 7005,
            Self::Resets => 7006,
        }
    }

    /// Its number, by which ports and Services differ.
    pub(crate) fn number(self) -> u8 {
        self as u8
    }

    /// The addresses behind it.
    pub(crate) fn endpoints(self) -> Vec<SocketAddr> {
        let ips = match self {
            Self::Refusing => &[SERVER, REFUSING][..],
            Self::Dead => &[SERVER, REFUSING, SILENT],
            Self::Silent => &[SILENT],
            _ => &[SERVER],
        };
        ips.iter()
            .map(|ip| SocketAddr::new(IpAddr::from(*ip), self.server_port()))
            .collect()
    }
}
