//! Ports of this machine's loopback link that belong to one test alone.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::{sleep, timeout};

/// Longest time that an address may be in use after its program has ended.
const DEADLINE: Duration = Duration::from_secs(30);

/// Returns a port of 127.0.0.1 at which nothing listens. No other test of this process gets the port, and no client
/// either: the ports of clients begin at 32768 (`net.ipv4.ip_local_port_range`).
pub fn unused() -> SocketAddr {
    static USED: AtomicU16 = AtomicU16::new(0);
    let own = u16::try_from(process::id() % 1_000).unwrap_or_default() * 10;
    loop {
        let port = 20_000 + own + USED.fetch_add(1, Relaxed);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if TcpStream::connect(address).is_err() {
            return address;
        }
    }
}

/// Waits until nothing listens at an address at which a server of this process has ended: a child process that another
/// test starts has all open sockets of this process until its program begins.
///
/// # Panics
/// Something listens there for 30 s.
pub async fn until_free(address: SocketAddr) {
    let waits = async {
        while tokio::net::TcpStream::connect(address).await.is_ok() {
            sleep(Duration::from_millis(1)).await;
        }
    };
    let free = timeout(DEADLINE, waits).await;
    assert!(free.is_ok(), "a program listens at {address}");
}
