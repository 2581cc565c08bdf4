//! The program `kplane-dev`, as `cargo xtask` runs it.

#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot prepare its input has failed"
)]

mod demo;
mod images;
