//! What else brings changes to thousands of clients, measured as a fleet is: raw watches of a Kubernetes API server, and
//! NATS.
//!
//! Clients are as light as simulated agents: one process, a TLS connection each.

mod crowd;
pub mod nats;
pub mod watches;

pub use crowd::Measured;
