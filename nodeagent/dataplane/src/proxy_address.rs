//! What the userspace proxy has in the kernel: the addresses at which it gets connections that rules lead to it, its tables
//! of nf_tables, and the delivery of answers.

pub(crate) use kplane_model::proxy_address;
use kplane_netlink::Delivery;

/// The number of `lo`, which is the first link of every network namespace (`LOOPBACK_IFINDEX`, net/core/dev.c).
pub(crate) const LOOPBACK_LINK: u32 = 1;

/// The table that leads clients to the proxy, one per family.
pub(crate) const CAPTURE_TABLE: &str = "kplane-capture";

/// The set of that table with the node ports that are only served on loopback addresses.
pub(crate) const LOCAL_PORTS: &str = "local";

/// The tables that lead answers back. An agent and its successor have one each for a while, since a table has one owner.
pub(crate) const DIVERT_TABLES: [&str; 2] = ["kplane-divert", "kplane-divert-2"];

/// The table that leads preStop hooks to the agent, one per family.
pub(crate) const PRESTOP_TABLE: &str = "kplane-departing";

/// The table that an agent leaves behind: for some seconds, preStop hooks wait for the next agent.
pub(crate) const DEPARTED_TABLE: &str = "kplane-departed";

/// The delivery of answers to the proxy that are going to a client. The number of the table is "kp" in ASCII. The rule comes
/// before those of networks that choose tables by the addresses of pods, which begin at 512 (amazon-vpc-cni-k8s), and of
/// Cilium, at 100.
pub(crate) const DELIVERY: Delivery = Delivery {
    table: 0x6b70,
    priority: 50,
};
