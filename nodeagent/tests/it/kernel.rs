//! Tests in a real kernel, each in a network namespace of its own.

mod agent;
mod alone;
mod answers;
mod avoided;
mod claim;
mod cleanup;
mod leftovers;
mod loopback;
mod privilege;
mod proxied;
mod settings;
mod transparent;
mod unset_mode;
