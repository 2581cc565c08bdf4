//! Admission, displacement and expiry of connections.

use std::net::IpAddr;

use futures_util::{FutureExt as _, StreamExt as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use tonic::transport::server::Connected as _;

use super::book::Book;
use super::*;

const LIMITS: Limits = Limits {
    handshakes_per_second: 500,
    snapshots_per_second: 500,
    connections: 6,
    per_address: 4,
    waiting: 3,
    waiting_per_address: 2,
};

fn peer(address: &str) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), 1)
}

/// Admits a connection; returns its number and the peer of the connection that it displaced. `None`
/// = it was refused.
fn admit(
    book: &mut Book,
    limiter: &Arc<ConnectionLimiter>,
    from: &str,
) -> Option<(u64, Option<SocketAddr>)> {
    let from = peer(from);
    let (number, went) = match book.admit(from.ip(), &LIMITS) {
        Verdict::Admitted(number) => (number, None),
        Verdict::InsteadOf(went, number) => (number, Some(went.peer())),
        Verdict::Refused(_) => return None,
    };
    book.waits(
        number,
        &ConnectionGuard::new(Arc::clone(limiter), number, from),
    );
    Some((number, went))
}

#[test]
fn the_oldest_that_waits_goes_and_who_is_in_use_stays() {
    let (mut book, limiter) = (Book::default(), ConnectionLimiter::new("tests", LIMITS));
    let mut admit = |from| admit(&mut book, &limiter, from);
    let (a, b, c) = ("10.0.0.1", "10.0.0.2", "10.0.0.3");
    assert_eq!(admit(a), Some((1, None)));
    assert_eq!(admit(b), Some((2, None)));
    assert_eq!(admit(b), Some((3, None)));
    // At the limit of one address, its own oldest connection goes; at the limit of the limiter, the
    // oldest of all.
    assert_eq!(admit(b), Some((4, Some(peer(b)))));
    assert_eq!(admit(c), Some((5, Some(peer(a)))));
    assert_eq!(book.sizes(), (3, 3));
}

#[tokio::test(start_paused = true)]
async fn peers_that_have_spoken_get_their_time() {
    let (mut book, limiter) = (Book::default(), ConnectionLimiter::new("tests", LIMITS));
    let admit = |book: &mut Book, from| admit(book, &limiter, from);
    let (a, b, c) = ("10.0.0.1", "10.0.0.2", "10.0.0.3");
    assert_eq!(admit(&mut book, a), Some((1, None)));
    assert_eq!(admit(&mut book, a), Some((2, None)));
    book.speaks(1);
    // The oldest is at work, so the silent one goes.
    assert_eq!(admit(&mut book, a), Some((3, Some(peer(a)))));
    assert_eq!(book.sizes(), (2, 2));
    book.speaks(3);
    assert_eq!(admit(&mut book, a), None);
    assert_eq!(admit(&mut book, b), Some((4, None)));
    book.speaks(4);
    // The limiter is full, and one address has more connections than the newcomer would have.
    assert_eq!(admit(&mut book, c), Some((5, Some(peer(a)))));
    book.speaks(5);
    let d = "10.0.0.4";
    assert_eq!(admit(&mut book, d), None);
    tokio::time::advance(Duration::from_secs(5)).await;
    assert_eq!(admit(&mut book, d), Some((6, Some(peer(a)))));
    assert_eq!(admit(&mut book, a), Some((7, Some(peer(d)))));
}

#[test]
fn an_address_whose_connections_are_all_in_use_gets_no_more() {
    let (mut book, limiter) = (Book::default(), ConnectionLimiter::new("tests", LIMITS));
    for number in 1..=4 {
        assert_eq!(admit(&mut book, &limiter, "10.0.0.1"), Some((number, None)));
        book.is_used(number);
    }
    assert_eq!(admit(&mut book, &limiter, "10.0.0.1"), None);
    for number in 5..=6 {
        assert_eq!(admit(&mut book, &limiter, "10.0.0.2"), Some((number, None)));
        book.is_used(number);
    }
    assert_eq!(admit(&mut book, &limiter, "10.0.0.3"), None);
    // A connection whose use is over can go.
    let over = ConnectionGuard::new(Arc::clone(&limiter), 2, peer("10.0.0.1"));
    book.waits(2, &over);
    let went = Some(peer("10.0.0.1"));
    assert_eq!(admit(&mut book, &limiter, "10.0.0.3"), Some((7, went)));
    (3..=7).for_each(|number| drop(book.leave(number)));
    book.leave(1);
    assert_eq!(book.sizes(), (0, 0));
}

#[test]
fn an_ipv6_network_counts_as_one_address() {
    let (mut book, limiter) = (Book::default(), ConnectionLimiter::new("tests", LIMITS));
    let mut admit = |from| admit(&mut book, &limiter, from).unwrap().1;
    assert_eq!(admit("2001:db8::1"), None);
    assert_eq!(admit("2001:db8::2"), None);
    assert_eq!(admit("2001:db8:0:1::1"), None);
    assert_eq!(admit("2001:db8::3"), Some(peer("2001:db8::1")));
    let mapped: IpAddr = "::ffff:10.0.0.1".parse().unwrap();
    let v4: IpAddr = "10.0.0.1".parse().unwrap();
    let mut book = Book::default();
    let mut admit = |from| matches!(book.admit(from, &LIMITS), Verdict::Admitted(_));
    assert!((0..4).all(|n| admit([mapped, v4][n % 2])) && !admit(v4));
}

#[test]
fn agents_get_what_the_limit_of_files_leaves() {
    let connections = |files| Limits::AGENTS.within(files).connections;
    assert_eq!(connections(1 << 20), 20_000);
    assert_eq!(connections(1_024), 624);
    assert_eq!(connections(64), 16);
}

/// The paused clock advances only when all tasks wait; then the limiter's patience ends.
#[tokio::test(start_paused = true)]
async fn a_connection_lives_while_it_is_in_use() {
    let limiter = ConnectionLimiter::new("tests", LIMITS);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut incoming = Box::pin(limiter.incoming(listener, None));
    let mut client = TcpStream::connect(address).await.unwrap();
    let mut connection = incoming.next().await.unwrap().unwrap();

    let occupied = connection.connect_info().occupy();
    tokio::time::sleep(PATIENCE * 3).await;
    client.write_all(b"x").await.unwrap();
    assert_eq!(connection.read_u8().await.unwrap(), b'x');

    // The reading task learns that the use is over, and then waits no longer.
    let mut reading = Box::pin(connection.read_u8());
    assert!(reading.as_mut().now_or_never().is_none());
    let over = Instant::now();
    drop(occupied);
    let error = reading.await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    assert!(over.elapsed() < PATIENCE + Duration::from_secs(1));
    drop(connection);
    let counts = limiter.counts();
    assert_eq!((counts.open, counts.waiting, counts.expired), (0, 0, 1));
}
