//! The node agent as its neighbours see it: whole agents in this process, and the program, also in a real kernel.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod app;
mod app_binary;
mod identity;
mod kernel;
mod reload;
mod replicas;
mod rotation;
mod support;
mod userspace;
