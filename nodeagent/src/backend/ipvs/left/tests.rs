//! What stays for whom.

use super::*;
use crate::backend::ipvs::tests::{at, ip, server};

const TCP: Protocol = Protocol::Tcp;

fn real(server: ServerKey, weight: u32, active: u64, inactive: u64) -> Real {
    Real {
        server,
        at: at("10.1.0.1:80"),
        translated: true,
        weight,
        active,
        inactive,
    }
}

/// One address with a connection, one without, a node port with one that is ending, and UDP.
fn step(spare: bool, sockets: &[&str]) -> Step {
    let servers = [
        server("10.96.0.1:80", TCP),
        server("10.96.0.2:80", TCP),
        server("192.168.0.1:30080", TCP),
        server("10.96.0.3:53", Protocol::Udp),
    ];
    let reals = [
        real(servers[0], 1, 2, 0),
        real(servers[1], 1, 0, 0),
        real(servers[2], 0, 0, 1),
        real(servers[3], 1, 0, 9),
    ];
    let addresses = ["10.96.0.1", "10.96.0.2", "10.96.0.3"].map(ip).into();
    let sockets = sockets.iter().map(|text| ip(text)).collect();
    let there = There {
        servers: &servers,
        reals: &reals,
        addresses: &addresses,
        sockets: &sockets,
        spare,
    };
    let mut step = there.step();
    step.free.sort_unstable();
    step
}

#[test]
fn i4_what_carries_connections_stays_and_gets_no_new_ones() {
    let step = step(true, &["127.0.0.1"]);
    assert_eq!(
        step.commands,
        [
            Command::SetReal(server("10.96.0.1:80", TCP), at("10.1.0.1:80"), 0),
            Command::DeleteServer(server("10.96.0.2:80", TCP)),
            Command::DeleteServer(server("10.96.0.3:53", Protocol::Udp)),
        ]
    );
    assert_eq!(step.free, ["10.96.0.2", "10.96.0.3"].map(ip));
    let in_use = InUse {
        connections: 3,
        addresses: 1,
    };
    assert_eq!(step.in_use, in_use);
}

/// The node's own connections have a Service's address as their source.
#[test]
fn i4_addresses_stay_for_connections_of_the_node() {
    let step = step(true, &["10.96.0.2", "192.168.0.1"]);
    assert_eq!(step.free, ["10.96.0.3"].map(ip));
    assert_eq!(step.in_use.addresses, 2);
}

/// Else the node's own packets would keep a Service's address as their source.
#[test]
fn i4_addresses_go_at_once_where_own_packets_are_not_masqueraded() {
    let step = step(false, &["10.96.0.2"]);
    assert_eq!(step.free.len(), 3);
    let in_use = InUse {
        connections: 1,
        addresses: 0,
    };
    assert_eq!(step.in_use, in_use);
}
