//! The network: a client, a proxy and a server, each in a namespace of its own, and the servers' threads.

use std::net::Ipv4Addr;

use anyhow::Result;
use kplane_tests::link::Route;
use kplane_tests::netns::NetNs;
use kplane_tests::sysctl::FORWARDING;

use crate::proxies::server::Servers;
use crate::proxies::target::{BEHIND, CLIENT, CLIENTS, PROXY, REFUSING, SERVER};

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
        server.netlink()?.add_address("uplink", REFUSING.into(), 24)?;
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
