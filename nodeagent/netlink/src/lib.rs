//! kplane's own thin netlink library: a blocking socket, attributes, messages and nfnetlink
//! batches.
//!
//! Nothing here knows a table or a Service. Encoders append to one `Vec<u8>`; decoders accept any
//! bytes and never panic. Every number of the kernel's interface is a constant with its uapi name.
//!
//! **Invariants.** A [`Batch`] becomes a [`SealedBatch`] once, and only a sealed batch can be
//! committed. The error of a failed commit states what is known: refused as a whole, or outcome
//! unknown.

// Bytes from outside must not end the agent, in whatever length and with whatever numbers they come.
#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

mod accounting;
mod attribute;
mod batch;
pub mod conntrack;
mod dump;
mod error;
mod filter;
pub mod ipset;
pub mod ipvs;
mod link;
mod message;
mod monitor;
pub mod nflog;
mod route;
mod socket;

pub use accounting::{create_counter, delete_counter, read_counter};
pub use attribute::{Attribute, AttributeWriter, Attributes, MAX_ATTRIBUTE_PAYLOAD_BYTES};
pub use batch::{Batch, Label, Operation, SealedBatch};
pub use dump::PausedDump;
pub use error::{CommitError, NetlinkError, Refusal, Rejection};
pub use link::{LinkAddress, Links, delete_link, link_index, removed_address};
pub use message::{Message, Messages, Request};
pub use monitor::{Generation, Monitor};
pub use nix::errno::Errno;
pub use route::{Delivery, Exit, Routes};
pub use socket::{NfSocket, generation_after};

use kplane_model::Family;

/// Returns `NFPROTO_IPV4` or `NFPROTO_IPV6` (linux/netfilter.h).
pub fn nfproto(family: Family) -> u8 {
    family.pick(2, 10)
}
