//! Connections that begin, as a node's kernel reports them: the same in all modes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::slice;

use anyhow::{Result, ensure};
use kplane_dataplane::beginnings::Beginnings;
use kplane_model::{Family, Protocol};
use kplane_tests::wait::{DEADLINE, eventually};

use kplane_tests::support::{At, Client, Setup, World, ask, ep, hit, svc};

/// Connections to each place.
const EACH: usize = 5;

pub(crate) fn each_connection_through_a_service_is_reported_once() -> Result<()> {
    let service = svc(1).everywhere().endpoints(["a", "b"].map(ep));
    let world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let mut reports = world.node(1)?.run(|| Ok(Beginnings::open(false)?))?;
    let mut wanted = BTreeMap::<(Protocol, SocketAddr), usize>::new();
    for (client, at) in [
        (Client::PodHere, At::ClusterIp),
        (Client::Outside, At::NodePort),
        (Client::Node, At::ExternalIp),
    ] {
        for family in Family::ALL {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                let to = service.address(at, family, 1);
                for _ in 0..EACH {
                    hit(&world.net, client, protocol, to)?;
                }
                *wanted.entry((protocol, to)).or_default() += EACH;
            }
        }
    }
    // What no rule leads elsewhere is nobody's connection.
    let direct = ep("c").address(Family::V4);
    ask(&world.net, Client::PodHere, Protocol::Tcp, direct)?;
    let mut seen = BTreeMap::new();
    eventually(DEADLINE, "all connections are reported", || {
        let (whole, _) = reports.read(|reported| {
            let of = reported.connection;
            *seen.entry((of.protocol, of.to)).or_default() += 1;
        });
        ensure!(whole, "some reports were lost");
        ensure!(seen == wanted, "{seen:?}, expected {wanted:?}");
        Ok(())
    })
}
