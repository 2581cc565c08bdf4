//! Tests in a real kernel, each in a network namespace of its own.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod agent;
mod alone;
mod avoided;
mod claim;
mod cleanup;
mod leased;
mod leftovers;
mod privilege;
mod proxied;
mod transparent;
mod unset_mode;
