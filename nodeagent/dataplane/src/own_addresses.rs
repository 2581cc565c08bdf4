//! The addresses of this machine.

use std::net::IpAddr;

use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;

/// Returns the addresses of all interfaces in this thread's network namespace, in the caller's kind of collection.
///
/// # Errors
/// The kernel cannot list them.
pub fn own_addresses<C: FromIterator<IpAddr>>() -> Result<C, Errno> {
    Ok(getifaddrs()?
        .filter_map(|interface| {
            let address = interface.address?;
            address
                .as_sockaddr_in()
                .map(|v4| IpAddr::V4(v4.ip()))
                .or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
        })
        .collect())
}
