//! What benchmarks fill a kernel or an API server with.

pub mod objects;
pub mod workload;
