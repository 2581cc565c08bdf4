//! Places on this machine's loopback link that belong to one test alone. All tests of this binary share one process.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::DEADLINE;

/// Bits of an address that number the addresses of a process; the 12 bits above them number the process.
const BITS: u32 = 12;

/// Returns addresses that no other test has, in ascending order, with the port of the status API.
pub(crate) fn addresses<const N: usize>() -> [SocketAddr; N] {
    static USED: AtomicU32 = AtomicU32::new(1);
    let first = USED.fetch_add(u32::try_from(N).unwrap(), Relaxed);
    // Neither 127.0.0.1 and its neighbours, nor the last address of the network.
    let process = process::id() % ((1 << BITS) - 2) + 1;
    std::array::from_fn(|index| {
        let number = first + u32::try_from(index).unwrap();
        assert!(number < 1 << BITS, "a process has no more addresses");
        let ip = 127 << 24 | process << BITS | number;
        SocketAddr::from((Ipv4Addr::from(ip), 7_444))
    })
}

/// Returns an address that no other test has.
pub(crate) fn address() -> Ipv4Addr {
    let [SocketAddr::V4(at)] = addresses() else {
        unreachable!("all addresses are of IPv4");
    };
    *at.ip()
}

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
pub(crate) async fn until_free(address: SocketAddr) {
    let waits = async {
        while tokio::net::TcpStream::connect(address).await.is_ok() {
            sleep(Duration::from_millis(1)).await;
        }
    };
    let free = timeout(DEADLINE, waits).await;
    free.unwrap_or_else(|_| panic!("a program listens at {address}"));
}
