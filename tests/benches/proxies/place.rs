//! The network: a client, a proxy and a server, each in a namespace of its own, and the servers' threads.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::Result;
use kplane_tests::link::Route;
use kplane_tests::netns::NetNs;
use kplane_tests::sysctl::FORWARDING;

use crate::proxies::server::Servers;

pub(crate) const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 177, 1, 2);
/// The proxy's address for clients, and the one for servers.
pub(crate) const PROXY: Ipv4Addr = Ipv4Addr::new(10, 177, 1, 1);
const BEHIND: Ipv4Addr = Ipv4Addr::new(10, 177, 2, 1);
pub(crate) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 177, 2, 2);
/// An address of the server at which nothing listens.
const REFUSING: Ipv4Addr = Ipv4Addr::new(10, 177, 2, 3);
/// An address behind the server, which drops packets for it without an answer.
const SILENT: Ipv4Addr = Ipv4Addr::new(10, 177, 3, 1);
/// Addresses of many clients: all of a prefix of 16 bits.
pub(crate) const CLIENTS: Ipv4Addr = Ipv4Addr::new(10, 178, 0, 0);

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

/// The namespaces of one contender.
pub(crate) struct Place {
    pub(crate) client: NetNs,
    pub(crate) proxy: NetNs,
    pub(crate) servers: Servers,
}

impl Place {
    pub(crate) fn new() -> Result<Self> {
        let client = NetNs::new("client")?;
        let proxy = NetNs::new("proxy")?;
        let server = NetNs::new("server")?;
        for ns in [&client, &proxy, &server] {
            // The kernel's default. BBR, which some machines have instead, sets a timer for each packet.
            ns.sysctl(&[("net.ipv4.tcp_congestion_control", "cubic")])?;
        }
        proxy.sysctl(FORWARDING)?;
        // Connections that have ended must not fill the kernel's table.
        proxy.sysctl(&[
            ("net.netfilter.nf_conntrack_tcp_timeout_time_wait", "1"),
            ("net.netfilter.nf_conntrack_tcp_timeout_close", "1"),
            ("net.netfilter.nf_conntrack_udp_timeout", "2"),
            ("net.netfilter.nf_conntrack_udp_timeout_stream", "2"),
        ])?;
        let links = proxy.netlink()?;
        let sides = [
            (&client, "client", PROXY, CLIENT),
            (&server, "server", BEHIND, SERVER),
        ];
        for (ns, name, near, far) in sides {
            links.veth(name, ns, "uplink")?;
            links.add_address(name, near.into(), 24)?;
            let inside = ns.netlink()?;
            inside.add_address("uplink", far.into(), 24)?;
            inside.up("uplink")?;
            inside.add_route(&Route::default_via(near.into()))?;
        }
        server
            .netlink()?
            .add_address("uplink", REFUSING.into(), 24)?;
        // On loopback a prefix makes all its addresses local.
        client.netlink()?.add_address("lo", CLIENTS.into(), 16)?;
        let through = |ip: Ipv4Addr| Route::to("10.177.3.0/24".parse().unwrap()).via(ip.into());
        links.add_route(&through(SERVER))?;
        let clients = Route::to("10.178.0.0/16".parse().unwrap()).via(CLIENT.into());
        links.add_route(&clients)?;
        let servers = Servers::start(&server)?;
        Ok(Self {
            client,
            proxy,
            servers,
        })
    }
}
