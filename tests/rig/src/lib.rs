//! kplane's test rig: real packets between real network namespaces, as root or as an ordinary user.
//!
//! Read in this order: [`topology`] builds nodes, pods and an outside client; [`echo`] answers in
//! pods; [`client`], [`load`] and [`sctp`] ask, and [`ask`] asks in any protocol; [`flood`] is hostile; [`capture`] records the
//! wire; [`wait`] is the only way to wait. [`status`] queries a control plane, and [`cluster`] runs a real
//! Kubernetes API server, and [`real`] a whole cluster with kubelets and containers. [`browser`] is a real browser, and [`oci`] writes images. Below them are [`netns`], [`mounts`], [`link`], [`sysctl`] and [`process`].
//!
//! **Invariants.** Nothing here touches the namespace in which the process was started. Everything that
//! a handle created disappears when the handle is dropped. The rig is synchronous: call it from ordinary
//! threads, not from inside an async runtime.
//!
//! ```no_run
//! use kplane_rig::client::{Probe, Protocol};
//! use kplane_rig::{topology::Topology, userns};
//!
//! fn main() -> anyhow::Result<()> {
//!     userns::enter()?; // first: before any thread
//!     let mut topology = Topology::standard(3)?;
//!     for node in 1..=3 {
//!         let ip = format!("10.244.{node}.1").parse()?;
//!         let pod = topology.add_pod(&format!("node-{node}"), &format!("web-{node}"), &[ip])?;
//!         pod.serve(Protocol::Tcp, 80)?;
//!     }
//!     let agent = std::process::Command::new("kp-nodeagent");
//!     let _agent = topology.node("node-1")?.ns().command(agent)?;
//!
//!     let client = topology.host("client")?;
//!     client.route("10.96.0.0/12".parse()?, topology.node("node-1")?)?;
//!     println!("{:?}", Probe::tcp("10.96.0.10:80".parse()?).spread(client.ns(), 100)?);
//!     Ok(())
//! }
//! ```
//!
//! Size: 6 nodes with 60 pods in 0.4 s, 20 with 300 in 1.6 s. The kernel's table of neighbours is
//! shared by all namespaces (1,024 entries), which 1,000 pods would fill.

pub mod ask;
pub mod browser;
mod cache;
pub mod capture;
pub mod client;
pub mod cluster;
pub mod debian;
pub mod echo;
pub mod flood;
pub mod harness;
pub mod histogram;
pub mod kernel;
pub mod link;
pub mod load;
pub mod loopback;
pub mod mounts;
pub mod netns;
pub mod oci;
pub mod ping;
pub mod privilege;
pub mod process;
pub mod product;
pub mod real;
pub mod scratch;
pub mod sctp;
pub mod status;
pub mod sysctl;
pub mod topology;
pub mod usage;
pub mod userns;
pub mod vm;
pub mod wait;
