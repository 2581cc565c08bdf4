//! kplane's data path, without the agent around it.
//!
//! ```text
//! model -> plan (pure) -> backend (nftables, iptables, ipvs) -> kernel
//!                            |-> userspace: the proxy of kplane-userproxy (a feature)
//!                            '-> conntrack: which flows a change of Services or policies ends
//! connected: who is connected to a ServicePort
//! kernel_setting: what the data path changes besides its rules
//! leftovers: what kube-proxy or an earlier agent left
//! obstacles: what other programs put in the way of packets
//! ```
//!
//! Everything here is synchronous, and works on the network namespace of the calling thread.

pub mod backend;
pub mod backoff;
pub mod beginnings;
pub mod connected;
pub mod conntrack;
mod error;
mod ipvs_table;
pub mod kernel_setting;
pub mod leftovers;
pub mod obstacles;
mod own_addresses;
pub mod plan;
pub mod policy;
mod process;
mod proxy_address;

pub use error::chain;
pub use own_addresses::own_addresses;
