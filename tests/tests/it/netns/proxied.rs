//! The userspace proxy in front of nftables: what no other backend can do, and what happens when it ends.

use anyhow::{Result, ensure};
use kplane_dataplane::backend::Verification;
use kplane_model::{Family, Protocol};
use kplane_netlink::Links;

use kplane_tests::support::{At, Client, Seen, Setup, World, ask, ep, hit, pairs, svc};

/// Connections to a Service half of whose endpoints are dead: without another attempt, all reach the other half once in
/// 10^9 times.
const CONNECTIONS: usize = 30;

/// A port at which nothing listens.
pub(crate) const NOTHING: u16 = 9;

/// The number of `lo` in every namespace.
const LOOPBACK: u32 = 1;

const PROTOCOLS: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];

/// A Service with one endpoint that serves, and one at which nothing listens.
fn half_dead() -> kplane_tests::support::Svc {
    let dead = ep("b").port(NOTHING);
    svc(1).everywhere().endpoints([ep("a"), dead])
}

pub(crate) fn u37_no_connection_fails_while_an_endpoint_refuses() -> Result<()> {
    let service = half_dead();
    let world = World::serving(Setup::PodRanges, std::slice::from_ref(&service))?;
    for (family, protocol) in pairs(Family::ALL, PROTOCOLS) {
        let to = service.address(At::ClusterIp, family, 1);
        for client in [Client::Outside, Client::PodThere, Client::Node] {
            for _ in 0..CONNECTIONS {
                hit(&world.net, client, protocol, to)?;
            }
        }
    }
    Ok(())
}

/// The kernel must not take the proxy's socket for the endpoint of a client: it would lead the client there.
pub(crate) fn a11_the_kernel_does_not_remember_the_proxy() -> Result<()> {
    let service = svc(1).everywhere().sticky(10_800).endpoints([ep("a"), ep("b")]);
    let mut world = World::serving(Setup::PodRanges, std::slice::from_ref(&service))?;
    let ask_all = |world: &World| {
        for (family, protocol) in pairs(Family::ALL, PROTOCOLS) {
            for at in [At::ClusterIp, At::NodePort] {
                let to = service.address(at, family, 1);
                hit(&world.net, Client::PodHere, protocol, to)?;
            }
        }
        Ok(())
    };
    ask_all(&world)?;
    world.first()?.end();
    ask_all(&world)
}

/// The table that leads to the proxy ends with the process. The kernel's own rules are behind it, and serve.
pub(crate) fn the_kernel_serves_once_the_proxy_has_ended() -> Result<()> {
    let service = svc(1).everywhere().endpoints([ep("a")]);
    let mut world = World::serving(Setup::PodRanges, std::slice::from_ref(&service))?;
    let of_pod = |family| {
        ask(
            &world.net,
            Client::PodHere,
            Protocol::Tcp,
            service.address(At::ClusterIp, family, 1),
        )
    };
    let source = |seen: Seen| match seen {
        Seen::Hit { source, .. } => Ok(source),
        other => anyhow::bail!("{other}"),
    };
    for family in Family::ALL {
        let client = Client::PodHere.source(family);
        ensure!(
            source(of_pod(family)?)? != client,
            "the proxy's connection has the client's address"
        );
    }
    world.first()?.end();
    for family in Family::ALL {
        for protocol in PROTOCOLS {
            for at in [At::ClusterIp, At::NodePort, At::LoadBalancer] {
                let to = service.address(at, family, 1);
                let source = source(ask(&world.net, Client::PodHere, protocol, to)?)?;
                // Rules masquerade connections to external addresses (A15).
                let is_kernels = source == Client::PodHere.source(family) || at != At::ClusterIp;
                ensure!(is_kernels, "{protocol} {to}: not the kernel");
            }
        }
    }
    Ok(())
}

/// Without the address, the table would lead clients nowhere.
pub(crate) fn a_removed_address_of_the_proxy_comes_back() -> Result<()> {
    let service = svc(1).everywhere().endpoints([ep("a")]);
    let mut world = World::serving(Setup::PodRanges, std::slice::from_ref(&service))?;
    for (family, address) in [
        (Family::V4, "169.254.107.112"),
        (Family::V6, "fd6b:706c:616e:6500::1"),
    ] {
        world.node(1)?.run(|| Ok(Links::open()?.remove(LOOPBACK, address.parse()?)?))?;
        let to = service.address(At::ClusterIp, family, 1);
        let seen = ask(&world.net, Client::PodHere, Protocol::Tcp, to)?;
        ensure!(!matches!(seen, Seen::Hit { .. }), "{to}: {seen}");
        let verified = world.first()?.verify(family)?;
        let is_repaired =
            matches!(&verified, Verification::Repaired(what) if what.contains(address));
        ensure!(is_repaired, "{verified:?}");
        hit(&world.net, Client::PodHere, Protocol::Tcp, to)?;
        ensure!(world.first()?.verify(family)? == Verification::Equal);
    }
    Ok(())
}
