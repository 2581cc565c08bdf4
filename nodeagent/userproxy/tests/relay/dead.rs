//! Endpoints that refuse connections, or do not answer (U37, U38).

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use kplane_model::Protocol;
use kplane_userproxy::{Failure, Options, Settings};

use crate::fixture::{PATIENCE, Served, Silent, addrs, answered, echo, eventually, refusing};

fn serve(endpoints: &[std::net::SocketAddr]) -> Served {
    Served::new(Protocol::Tcp, endpoints, Options::default())
}

#[test]
fn u37_no_connection_fails_while_one_of_two_endpoints_refuses() {
    let well = echo();
    let served = serve(&[well, refusing()]);
    for _ in 0..200 {
        assert_eq!(answered(&mut served.connect()).unwrap(), well);
    }
    let counts = served.state().counts;
    assert_eq!((counts.opened, counts.failed), (200, [0; 5]));
    // After three failures, the endpoint is avoided.
    assert!(counts.retries < 20, "{} retries", counts.retries);
}

#[test]
fn u38_no_connection_fails_while_one_refuses_and_one_is_silent() {
    let (well, silent) = (echo(), Silent::new());
    let served = serve(&[well, refusing(), silent.at]);
    for _ in 0..100 {
        assert_eq!(answered(&mut served.connect()).unwrap(), well);
    }
    let counts = served.state().counts;
    assert_eq!(counts.failed, [0; 5]);
    assert!(counts.retries < 20, "{} retries", counts.retries);
}

#[test]
fn u53_endpoints_that_fail_are_avoided_and_reported() {
    let served = serve(&[echo(), refusing()]);
    for _ in 0..10 {
        answered(&mut served.connect()).unwrap();
    }
    let state = served.state();
    let avoided: Vec<_> = state.endpoints.iter().map(|at| at.avoided_for.is_some()).collect();
    assert_eq!(avoided.iter().filter(|is| **is).count(), 1);
    assert!(state.counts.avoided >= 1);
}

#[test]
fn u53_a_table_names_the_endpoints_that_fail_until_they_take_a_connection_or_are_gone() {
    let (well, dead) = (echo(), refusing());
    let mut served = serve(&[well, dead]);
    let avoided = |served: &Served, most| {
        served
            .proxy
            .table()
            .avoided(most)
            .into_iter()
            .map(|(_, at)| at)
            .collect::<Vec<_>>()
    };
    assert_eq!(avoided(&served, 32), []);
    for _ in 0..10 {
        answered(&mut served.connect()).unwrap();
    }
    assert_eq!(avoided(&served, 0), []);
    assert_eq!(avoided(&served, 32), addrs(&[dead]));
    served.change(|spec| spec.endpoints.cluster = addrs(&[well]));
    assert_eq!(avoided(&served, 32), []);

    served.change(|spec| spec.endpoints.cluster = addrs(&[well, dead]));
    for _ in 0..10 {
        answered(&mut served.connect()).unwrap();
    }
    assert_eq!(avoided(&served, 32), addrs(&[dead]), "it fails again");
    let _back = std::net::TcpListener::bind(dead).unwrap();
    eventually("the endpoint takes a connection", || {
        let _ = served.connect();
        avoided(&served, 32).is_empty()
    });
}

#[test]
fn u10_when_all_endpoints_refuse_the_client_gets_a_reset() {
    let served = serve(&[refusing(), refusing()]);
    let error = served.connect().read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert_eq!(served.state().counts.failed[Failure::Refused as usize], 1);
}

#[test]
fn u52_a_connection_that_no_endpoint_answers_ends_after_five_seconds() {
    let silent = Silent::new();
    let served = serve(&[silent.at]);
    let start = Instant::now();
    let error = served.connect().read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(start.elapsed() >= Duration::from_secs(4));
    assert_eq!(served.state().counts.failed[Failure::Silent as usize], 1);
}

#[test]
fn without_retries_the_first_endpoint_decides() {
    let options = Options {
        retry: false,
        ..Options::default()
    };
    let served = Served::new(Protocol::Tcp, &[echo(), refusing()], options);
    let outcomes = [0, 1].map(|_| answered(&mut served.connect()).is_ok());
    assert_eq!(outcomes.into_iter().filter(|is| *is).count(), 1);
}

/// The clients of the silent endpoint and the rest share the proxy's one thread.
#[test]
fn u9_a_silent_endpoint_holds_up_no_other_client() {
    let (silent, well) = (Silent::new(), echo());
    let settings = Settings {
        threads: Some(1),
        ..Settings::default()
    };
    let options = Options {
        retry: false,
        ..Options::default()
    };
    let served = Served::with(settings, Protocol::Tcp, &[silent.at], options);
    let other = served.another(31_000, &[well]);
    let mut waiting: Vec<_> = (0..50).map(|_| served.connect()).collect();
    eventually("all wait", || served.proxy.open() == [50, 0]);
    for _ in 0..50 {
        let mut stream = TcpStream::connect(other).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(answered(&mut stream).unwrap(), well);
    }
    let state = served.state();
    assert_eq!(
        state.counts.failed, [0; 5],
        "the silent endpoint's clients still wait"
    );
    let error = waiting.remove(0).read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}
