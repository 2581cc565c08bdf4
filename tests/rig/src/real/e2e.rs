//! Kubernetes' own end-to-end tests (`e2e.test`): the programs, and the images of their Pods.

mod images;
mod programs;

pub use images::{REQUIRED, archives};
pub use programs::Programs;
