//! UDP.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use kplane_model::Protocol;
use kplane_userproxy::{Failure, Limits, Options, Settings};

use crate::fixture::{Served, addrs, eventually};

/// Starts a server that sends each datagram back, with its own port in front.
pub(crate) fn echo() -> SocketAddr {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let at = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut buffer = vec![0; 65_536];
        buffer[..2].copy_from_slice(&at.port().to_be_bytes());
        while let Ok((count, from)) = socket.recv_from(&mut buffer[2..]) {
            // A datagram of the largest size has no room for the port.
            let end = (count + 2).min(65_507);
            let _ = socket.send_to(&buffer[..end], from);
        }
    });
    at
}

fn refusing() -> SocketAddr {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    socket.local_addr().unwrap()
}

fn serve(endpoints: &[SocketAddr]) -> Served {
    Served::new(Protocol::Udp, endpoints, Options::default())
}

/// Asks, and returns which server answered, and what.
pub(crate) fn ask(socket: &UdpSocket, question: &[u8]) -> (SocketAddr, Vec<u8>) {
    socket.send(question).unwrap();
    let mut buffer = vec![0; 65_536];
    let count = socket.recv(&mut buffer).unwrap();
    let port = u16::from_be_bytes([buffer[0], buffer[1]]);
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    (at, buffer[2..count].to_vec())
}

#[test]
fn a_flow_stays_with_its_endpoint_and_flows_go_around() {
    let servers = [echo(), echo()];
    let served = serve(&servers);
    let clients = [served.udp(), served.udp()];
    let first = clients.each_ref().map(|client| ask(client, b"1").0);
    assert_ne!(first[0], first[1]);
    for question in [&b"two"[..], b"", b"four"] {
        for (client, server) in clients.iter().zip(first) {
            assert_eq!(ask(client, question), (server, question.to_vec()));
        }
    }
    let counts = served.state().counts;
    assert_eq!((counts.opened, counts.open, counts.failed), (2, 2, [0; 5]));
}

#[test]
fn u14_datagrams_of_64_kib_pass_whole() {
    let served = serve(&[echo()]);
    let question: Vec<u8> = (0..60_000u32).map(|n| n.to_be_bytes()[3]).collect();
    assert_eq!(ask(&served.udp(), &question).1, question);
}

#[test]
fn u14_a_flow_that_is_refused_begins_at_another_endpoint() {
    let well = echo();
    let served = serve(&[refusing(), well]);
    for _ in 0..20 {
        assert_eq!(ask(&served.udp(), b"hello").0, well);
    }
    let counts = served.state().counts;
    assert!(counts.retries > 0);
    assert_eq!(counts.failed, [0; 5]);
}

#[test]
fn f1_a_flow_leaves_an_endpoint_that_is_gone() {
    let servers = [echo(), echo()];
    let mut served = serve(&servers);
    let client = served.udp();
    let first = ask(&client, b"1").0;
    let rest: Vec<_> = servers.into_iter().filter(|at| *at != first).collect();
    // Terminating, and still serving (F2).
    served.change(|spec| {
        spec.endpoints.cluster = addrs(&rest);
        spec.endpoints.serving = addrs(&[first]);
    });
    assert_eq!(ask(&client, b"2").0, first);
    served.change(|spec| spec.endpoints.serving.clear());
    assert_eq!(ask(&client, b"3").0, rest[0]);
    eventually("the old flow has ended", || served.proxy.open() == [0, 1]);
}

#[test]
fn u14_an_idle_flow_ends() {
    let settings = Settings {
        udp_idle: Some(Duration::from_millis(100)),
        ..Settings::default()
    };
    let served = Served::with(settings, Protocol::Udp, &[echo()], Options::default());
    let client = served.udp();
    ask(&client, b"1");
    assert_eq!(served.proxy.open(), [0, 1]);
    eventually("the flow has ended", || served.proxy.open() == [0, 0]);
    assert_eq!(served.state().counts.open, 0);
    ask(&client, b"2");
}

/// A proxy with room for so many flows.
fn limited(flows: usize) -> Served {
    let settings = Settings {
        limits: Some(Limits {
            connections: 10,
            of_pair: 100,
            flows,
        }),
        threads: Some(1),
        ..Settings::default()
    };
    Served::with(settings, Protocol::Udp, &[echo()], Options::default())
}

#[test]
fn u14_the_idlest_flow_makes_room() {
    let served = limited(8);
    let faithful = served.udp();
    // They stay open, so that no two have the same port.
    let others: Vec<_> = (0..50).map(|_| served.udp()).collect();
    for other in &others {
        ask(&faithful, b"still here");
        ask(other, b"once");
    }
    // One Service gets half of all.
    assert_eq!(served.proxy.open()[1], 4);
    let counts = served.state().counts;
    assert_eq!(
        (counts.opened, counts.failed[Failure::Limit as usize]),
        (51, 0)
    );
}

#[test]
fn a_service_over_its_share_ends_flows_of_its_own() {
    let served = limited(8);
    let quiet = served.other("dns", 31_000, &[echo()]);
    let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    client.connect(quiet).unwrap();
    let (server, _) = ask(&client, b"1");
    // The flow of the quiet Service is the idlest of all.
    let others: Vec<_> = (0..50).map(|_| served.udp()).collect();
    for other in &others {
        ask(other, b"once");
    }
    let dns = served.counts_of("dns");
    assert_eq!((dns.open, dns.opened), (1, 1));
    assert_eq!(ask(&client, b"2").0, server);
    assert_eq!(served.counts_of("dns").opened, 1);
}

/// A new Service finds room although its namespace has its share: the namespace's idlest flow ends.
#[test]
fn a_namespace_over_its_share_ends_flows_of_its_own() {
    let served = limited(16);
    for (node_port, name) in (31_000..).zip(["a", "b", "c", "d", "e"]) {
        let at = served.other(name, node_port, &[echo()]);
        for _ in 0..6 {
            let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            client.connect(at).unwrap();
            ask(&client, b"once");
        }
    }
    assert_eq!(served.counts_of("e").failed, [0; 5]);
    assert_eq!(served.proxy.open()[1], 12, "three quarters");
}

/// Starts a server that waits for so many datagrams, and then sends all of them back.
fn together(datagrams: usize) -> SocketAddr {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let at = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 64];
        let mut receive = || {
            let (count, from) = socket.recv_from(&mut buffer).unwrap();
            (buffer[..count].to_vec(), from)
        };
        let all: Vec<_> = (0..datagrams).map(|_| receive()).collect();
        for (bytes, from) in all {
            socket.send_to(&bytes, from).unwrap();
        }
    });
    at
}

#[test]
fn u55_answers_that_come_together_reach_their_clients() {
    const CLIENTS: usize = 100;
    let settings = Settings {
        threads: Some(1),
        ..Settings::default()
    };
    let served = Served::with(
        settings,
        Protocol::Udp,
        &[together(CLIENTS)],
        Options::default(),
    );
    let clients: Vec<_> = (0..CLIENTS).map(|_| served.udp()).collect();
    let question = |number: usize| format!("{}{number}", "?".repeat(number % 7));
    let mut bytes = 0;
    for (number, client) in clients.iter().enumerate() {
        client.send(question(number).as_bytes()).unwrap();
        bytes += question(number).len() as u64;
    }
    let mut buffer = [0; 64];
    for (number, client) in clients.iter().enumerate() {
        let count = client.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..count], question(number).as_bytes());
    }
    // The proxy counts answers once the kernel has them.
    eventually("all are counted", || {
        served.state().counts.to_clients == bytes
    });
    let counts = served.state().counts;
    assert_eq!(counts.to_endpoints, bytes);
    assert_eq!((counts.opened, counts.failed), (100, [0; 5]));
}
