//! Limits of connections.

use std::io::{ErrorKind, Read};
use std::time::Duration;

use kplane_model::Protocol;
use kplane_userproxy::{Failure, Limits, Options, Settings};

use crate::fixture::{Served, answered, echo};

fn serve(limits: Limits) -> Served {
    let settings = Settings {
        limits: Some(limits),
        ..Settings::default()
    };
    Served::with(settings, Protocol::Tcp, &[echo()], Options::default())
}

#[test]
fn u15_beyond_the_limit_clients_wait_and_then_are_served() {
    let served = serve(Limits {
        connections: 5,
        of_port: 5,
        flows: 1,
    });
    let mut open: Vec<_> = (0..5).map(|_| served.connect()).collect();
    assert!(open.iter_mut().all(|stream| answered(stream).is_ok()));
    let mut late = served.connect();
    late.set_read_timeout(Some(Duration::from_millis(100)))
        .unwrap();
    let error = late.read(&mut [0]).unwrap_err();
    assert!(matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut
    ));
    open.pop();
    late.set_read_timeout(Some(crate::fixture::PATIENCE))
        .unwrap();
    answered(&mut late).unwrap();
    assert_eq!(served.state().counts.failed, [0; 5]);
}

#[test]
fn one_service_port_leaves_room_for_the_rest() {
    let served = serve(Limits {
        connections: 10,
        of_port: 3,
        flows: 1,
    });
    let mut open: Vec<_> = (0..3).map(|_| served.connect()).collect();
    assert!(open.iter_mut().all(|stream| answered(stream).is_ok()));
    let error = served.connect().read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert_eq!(served.state().counts.failed[Failure::Limit as usize], 1);
}
