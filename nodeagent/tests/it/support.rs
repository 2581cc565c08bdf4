//! Helpers of several tests.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// Longest time that an address may be in use after its control plane has ended.
const DEADLINE: Duration = Duration::from_secs(30);

/// Returns a port of 127.0.0.1 at which nothing listens. No other test gets the port, and no client either: the ports of
/// clients begin at 32768 (`net.ipv4.ip_local_port_range`).
pub(crate) fn unused() -> SocketAddr {
    static USED: AtomicU16 = AtomicU16::new(0);
    let own = u16::try_from(process::id() % 1_000).unwrap() * 10;
    loop {
        let port = 20_000 + own + USED.fetch_add(1, Relaxed);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if TcpStream::connect(address).is_err() {
            return address;
        }
    }
}

/// Waits until nothing listens at an address at which a control plane has ended: a child process that another test starts
/// has all open sockets of this process until its program begins.
pub(crate) fn until_free(address: SocketAddr) {
    let deadline = Instant::now() + DEADLINE;
    while TcpStream::connect(address).is_ok() {
        assert!(Instant::now() < deadline, "a program listens at {address}");
        thread::sleep(Duration::from_millis(1));
    }
}
