//! What elements consist of: the fields of keys, and data.

use kplane_model::Family;

/// The data of an element besides its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carries {
    /// No data: the set is no map.
    Nothing,
    /// An endpoint.
    Endpoint,
    /// A verdict that leads to a chain.
    Chain,
    /// A number: a place's word, or one that stands for the other ends of connections.
    Number,
}

/// A part of a set's key, taken from the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    /// `ip saddr`
    Source,
    /// `ip daddr`
    Destination,
    /// `meta l4proto`
    Protocol,
    /// `th dport`
    Port,
    /// `numgen random mod M`
    Index,
    /// `meta priority`, where rules keep a place's word, or the number of the other end
    Number,
    /// `meta priority` in network byte order, as ranges are compared
    NetworkNumber,
}

impl Field {
    /// Returns the field's length in the packet, in bytes.
    pub(super) fn len(self, family: Family) -> usize {
        match self {
            Self::Source | Self::Destination => family.address_len(),
            Self::Protocol => 1,
            Self::Port => 2,
            Self::Index | Self::Number | Self::NetworkNumber => 4,
        }
    }
}

/// Returns the length of a key of these fields in bytes. Each field is padded to a multiple of four bytes, a
/// register.
pub(super) fn key_len(fields: &[Field], family: Family) -> usize {
    fields.iter().map(|f| f.len(family).next_multiple_of(4)).sum()
}
