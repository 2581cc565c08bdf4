//! Tests of the decision which virtual servers and addresses stay.

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
fn step_where(may_stay: impl Fn(IpAddr) -> bool) -> ServerCleanup {
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
    step(&servers, &reals, may_stay)
}

#[test]
fn i4_what_carries_connections_stays_and_gets_no_new_ones() {
    let step = step_where(|_| true);
    assert_eq!(
        step.commands,
        [
            Command::SetReal(server("10.96.0.1:80", TCP), at("10.1.0.1:80"), 0),
            Command::DeleteServer(server("10.96.0.2:80", TCP)),
            Command::DeleteServer(server("10.96.0.3:53", Protocol::Udp)),
        ]
    );
    assert_eq!(step.needed, ["10.96.0.1", "192.168.0.1"].map(ip).into());
    assert_eq!(step.connections, 3);
}

/// If the addresses stayed, the node's own packets would keep a Service's address as their source.
#[test]
fn i4_addresses_go_at_once_where_own_packets_are_not_masqueraded() {
    let step = step_where(|at| at == ip("192.168.0.1"));
    let deleted = Command::DeleteServer(server("10.96.0.1:80", TCP));
    assert_eq!(step.commands[0], deleted);
    assert_eq!(step.needed, ["192.168.0.1"].map(ip).into());
    assert_eq!(step.connections, 1);
}
