//! The proxy between real sockets on loopback addresses.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod datagrams;
mod dead;
mod fixture;
mod handover;
mod limits;
mod streams;
