//! The control plane as its neighbours see it: whole control planes in this process, and the program.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod approvals;
mod audited;
mod blocking;
mod check;
mod convergence;
mod desired;
mod examples;
mod fates;
mod files;
mod floods;
mod foreign;
mod freeze;
mod manifests_doubt;
mod manifests_dump;
mod manifests_reload;
mod peers;
mod ports;
mod questions;
mod replicas;
mod said;
mod stream;
mod support;
