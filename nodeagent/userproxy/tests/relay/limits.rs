//! Limits of connections.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use kplane_model::Protocol;
use kplane_userproxy::{Failure, Limits, Options, Settings};

use crate::fixture::{PATIENCE, Served, answered, echo, eventually};

const LIMITS: Limits = Limits {
    connections: 8,
    of_pair: 100,
    flows: 1,
};

fn serve(limits: Limits) -> Served {
    let settings = Settings {
        limits: Some(limits),
        ..Settings::default()
    };
    Served::with(settings, Protocol::Tcp, &[echo()], Options::default())
}

fn refused(served: &Served) -> u64 {
    served.state().counts.failed[Failure::Limit as usize]
}

/// Connects until a connection is refused, and returns those that were not.
fn fill(served: &Served) -> Vec<TcpStream> {
    let mut open = Vec::new();
    loop {
        let mut stream = served.connect();
        match answered(&mut stream) {
            Ok(_) => open.push(stream),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
                return open;
            }
        }
    }
}

#[test]
fn u15_idle_connections_of_one_service_leave_room_for_the_rest() {
    let served = serve(LIMITS);
    let another = served.another(31_000, &[echo()]);
    let other = served.other("chess", 31_001, &[echo()]);
    let mut open = fill(&served);
    assert_eq!((open.len(), refused(&served)), (4, 1));
    // Two ports are one Service.
    let mut same = TcpStream::connect(another).unwrap();
    same.set_read_timeout(Some(PATIENCE)).unwrap();
    let error = same.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    let mut stream = TcpStream::connect(other).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    answered(&mut stream).unwrap();
    // What ends makes room.
    open.clear();
    eventually("their places are free", || served.proxy.open()[0] == 1);
    answered(&mut served.connect()).unwrap();
}

/// The agent leaves further connections to the kernel then.
#[test]
fn a_full_proxy_has_no_room() {
    let served = serve(Limits {
        connections: 1,
        ..LIMITS
    });
    assert!(served.proxy.has_room());
    let mut only = served.connect();
    answered(&mut only).unwrap();
    assert!(!served.proxy.has_room());
    drop(only);
    eventually("its place is free", || served.proxy.has_room());
}

#[test]
fn connections_between_the_same_two_addresses_have_a_limit() {
    let served = serve(Limits {
        connections: 100,
        of_pair: 3,
        ..LIMITS
    });
    let open = fill(&served);
    assert_eq!((open.len(), refused(&served)), (3, 1));
    drop(open);
    eventually("their places are free", || served.proxy.open()[0] == 0);
    answered(&mut served.connect()).unwrap();
}

#[test]
fn a_connection_without_data_ends() {
    let settings = Settings {
        tcp_idle: Some(Duration::from_millis(200)),
        ..Settings::default()
    };
    let served = Served::with(settings, Protocol::Tcp, &[echo()], Options::default());
    let mut stream = served.connect();
    answered(&mut stream).unwrap();
    stream.write_all(b"x").unwrap();
    stream.read_exact(&mut [0]).unwrap();
    let error = stream.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert_eq!(served.proxy.open(), [0, 0]);
}
