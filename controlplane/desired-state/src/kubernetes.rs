//! Access to a Kubernetes API server: its address, the credentials, and the meaning of its
//! failures.
//!
//! The source (`source/kubernetes`) and all other code that talks to the API use this module. TLS
//! is rustls; the crate kube handles credentials and their renewal. Nothing here retries.

mod access;
mod ask;
mod connector;
mod failure;
mod requests;

pub use access::{Access, AccessError, Api, TRAP};
pub use ask::{Failures, Unanswered};
pub use failure::{Asked, Failure};
pub use requests::{Distribution, Requests};
