//! Tests of the sizes of reports on servers.

use kplane_model::{EndpointAddr, Family, KeyParts, Protocol, ServiceKey, ServiceName};
use kplane_proto::{MAX_REAL_SERVERS, MAX_SERVERS};
use prost::Message as _;

use super::*;
use kplane_dataplane::backend::Connections;

/// The longest address there is.
fn at(n: u16) -> EndpointAddr {
    let ip = [0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, n];
    EndpointAddr::new(ip, u16::MAX)
}

/// The longest name there is.
fn key() -> ServiceKey {
    let name = "n".repeat(63);
    ServiceKey::from(KeyParts {
        service: ServiceName::new(&name, &name),
        port_name: name.as_str().into(),
        protocol: Protocol::Sctp,
        family: Family::V6,
    })
}

const CONNECTIONS: Connections = Connections {
    active: u64::MAX,
    inactive: u64::MAX,
};

fn reported(servers: u16, reals: u16) -> Inspection {
    let real = |n| RealServer {
        at: at(n),
        weight: u32::MAX,
        connections: CONNECTIONS,
        draining: true,
    };
    let server = |n| VirtualServer {
        key: key(),
        at: at(n),
        scheduler: "lblcr",
        persistent_s: Some(u32::MAX),
        reals: (0..reals).map(real).collect(),
    };
    Inspection {
        servers: (0..servers).map(server).collect(),
        ..Inspection::default()
    }
}

#[test]
fn an_answer_stays_below_the_size_of_a_message_and_says_what_it_lacks() {
    for (servers, reals, left) in [(1, 1024, 0), (1, 5000, 3976), (300, 50, 13_976)] {
        let answer = inspection(7, Some(reported(servers, reals)));
        assert_eq!((answer.token, answer.more), (7, left));
        let listed: usize = answer.servers.iter().map(|s| s.real_servers.len()).sum();
        assert_eq!(listed, MAX_REAL_SERVERS);
        assert!(answer.servers.len() <= MAX_SERVERS);
        assert!(answer.encoded_len() < kplane_proto::MAX_MESSAGE_BYTES);
    }
}

#[test]
fn a_backend_without_virtual_servers_says_so() {
    let answer = inspection(7, None);
    assert_eq!(answer.token, 7);
    assert_eq!(answer.error, "this agent's backend has no virtual servers");
}
