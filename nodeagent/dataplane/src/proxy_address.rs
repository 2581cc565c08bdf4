//! The addresses at which the userspace proxy gets connections that rules lead to it, and the delivery of answers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use kplane_model::Family;
use kplane_netlink::Delivery;

/// The number of `lo`, which is the first link of every network namespace (`LOOPBACK_IFINDEX`, net/core/dev.c).
pub(crate) const LOOPBACK_LINK: u32 = 1;

/// The delivery of answers to the proxy that are going to a client. The number of the table is "kp" in ASCII. The rule comes
/// before those of networks that choose tables by the addresses of pods, which begin at 512 (amazon-vpc-cni-k8s), and of
/// Cilium, at 100.
pub(crate) const DELIVERY: Delivery = Delivery {
    table: 0x6b70,
    priority: 50,
};

/// Returns the address of the proxy's sockets, which a node has on `lo`. It is valid on the node only: "kp" and "kplane" in
/// ASCII, in the ranges of link-local addresses of IPv4 and of private ones of IPv6.
pub(crate) fn proxy_address(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(169, 254, 107, 112).into(),
        Family::V6 => Ipv6Addr::new(0xfd6b, 0x706c, 0x616e, 0x6500, 0, 0, 0, 1).into(),
    }
}
