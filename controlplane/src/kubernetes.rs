//! The way to a Kubernetes API server: where it is, who we are, and what its failures mean.
//!
//! Used by the source (`source/kubernetes`) and by whoever else talks to the API. TLS is rustls;
//! credentials, their renewal included, are kube's business. Nothing retries here.

mod access;
mod connector;
mod failure;

pub use access::{Access, AccessError, Api, TRAP};
pub use failure::{Asked, Failure, one_line};
