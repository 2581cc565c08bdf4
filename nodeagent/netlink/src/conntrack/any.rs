//! Entries of all protocols with ports, read to delete some.

use kplane_model::{Family, Protocol};

use super::{ENTRY, Flow, GET, delete, parse_as};
use crate::message::{Message, Request};
use crate::nfproto;

/// An entry of any protocol with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AnyFlow {
    /// The protocol.
    pub protocol: Protocol,
    /// The rest, as of a UDP entry.
    pub flow: Flow,
}

impl AnyFlow {
    /// Returns the request for all entries of a family.
    #[must_use]
    pub fn list(family: Family) -> Request {
        Request::new("list conntrack entries", GET, nfproto(family), |_| {})
    }

    /// Reads one message of a dump; returns `None` for other protocols, and for anything but a complete entry.
    #[must_use]
    pub fn parse(message: Message<'_>) -> Option<Self> {
        let of = |protocol| parse_as(message, protocol).map(|flow| Self { protocol, flow });
        Some(message)
            .filter(|message| message.kind == ENTRY)
            .and_then(|_| Protocol::ALL.into_iter().find_map(of))
    }

    /// Returns the request to delete this entry.
    #[must_use]
    pub fn delete(&self) -> Request {
        delete(&self.flow, self.protocol)
    }
}
