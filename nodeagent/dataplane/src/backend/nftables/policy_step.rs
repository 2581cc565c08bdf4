//! Matches and actions of rules about NetworkPolicies.

use super::fields::Field;
use super::policy_schema::PolicySet;

/// A match or action that only rules about policies have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PolicyStep {
    /// `ct state established,related`
    KnownConnection,
    /// `icmpv6 type >= nd-router-solicit icmpv6 type <= nd-redirect`
    Neighbour,
    /// `tcp flags & (fin | syn | rst | ack) != syn`
    MidStream,
    /// `ADDRESS @set`
    AddressIn(Field, PolicySet),
    /// `ADDRESS != @set`
    AddressNotIn(Field, PolicySet),
    /// `meta priority set 0:0`
    Anybody,
    /// `meta priority set FIELD map @set`
    Number(Field, PolicySet),
    /// `meta priority set KEY map @map`, with the key of the map
    NumberOf(PolicySet),
    /// `meta priority 0:NUMBER`
    IsNumber(u32),
    /// `accept`
    Accept,
}
