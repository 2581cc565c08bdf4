//! kube-proxy's configuration file (`kubeproxy.config.k8s.io/v1alpha1`): its fields, reading and writing it,
//! and the changes between two versions. The agent defines what the fields mean to it.
//!
//! ```text
//! text -> read -> KubeProxyConfiguration -> write -> text
//!                      |
//!                    change: what of a new file takes effect at once (I3)
//! ```

// Bytes and texts from outside must not end the program.
#![deny(clippy::indexing_slicing)]

mod address;
mod change;
mod duration;
mod problem;
mod quantity;
mod read;
mod types;
mod write;

pub use address::{parse as parse_address, with_port};
pub use change::{Change, change, changed_fields};
pub use duration::{EXPECTED as EXPECTED_DURATION, GoDuration, ParseDurationError};
pub use problem::{ConfigError, Problem, listed, shown};
pub use quantity::Quantity;
pub use read::{Document, document, text_of};
pub use types::*;
pub use write::{to_file, to_yaml};
