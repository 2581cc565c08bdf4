//! Helpers of several tests.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

/// Returns a port of 127.0.0.1 at which nothing listens. No other test gets the port, and no client either: the ports of
/// clients begin at 32768 (`net.ipv4.ip_local_port_range`).
pub(crate) fn unused() -> SocketAddr {
    static USED: AtomicU16 = AtomicU16::new(0);
    let own = u16::try_from(process::id() % 1_000).unwrap() * 10;
    loop {
        let port = 20_000 + own + USED.fetch_add(1, Relaxed);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}
