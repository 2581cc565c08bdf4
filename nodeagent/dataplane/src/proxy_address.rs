//! The addresses at which the userspace proxy gets connections that rules lead to it, and the delivery of answers.

pub(crate) use kplane_model::proxy_address;
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
