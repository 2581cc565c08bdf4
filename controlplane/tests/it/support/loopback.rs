//! Places on this machine's loopback link that belong to one test alone. All tests of this binary share one process.

use std::net::{Ipv4Addr, SocketAddr};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

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
