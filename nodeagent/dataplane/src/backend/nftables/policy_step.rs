//! Matches and actions of rules about NetworkPolicies.

use kplane_model::Direction;

use super::fields::Field;
use super::policy_schema::PolicySet;

/// A match or action that only rules about policies have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PolicyStep {
    /// `ct state established,related ct mark != CUT`
    KnownConnection,
    /// `ct mark CUT`
    IsCut,
    /// `ct mark CUT ct mark set 0`
    TakeUp,
    /// `ct state related`
    Related,
    /// `ct state invalid`
    Invalid,
    /// `ct direction reply`
    Reply,
    /// `ip6 hoplimit 255 icmpv6 type >= nd-router-solicit icmpv6 type <= nd-redirect icmpv6 code 0`
    Neighbour,
    /// `ip6 daddr ff02::/16 icmpv6 type` of reports and queries of listeners to multicast: the older ones, or those of version 2
    Listeners(ListenerTypes),
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
    /// `limit rate 50/second burst 50 packets`
    Limit,
    /// `log prefix DIRECTION group 27504 snaplen 128 queue-threshold 1`. Rules with this step are left out where the
    /// kernel has no such log.
    Log(Direction),
    /// `counter name NAME`, of [`denied`](super::policy_schema::denied)
    Count(Direction),
    /// `meta priority set KEY map @map`, with the key of the map
    NumberOf(PolicySet),
    /// `meta priority 0:NUMBER`
    IsNumber(u32),
    /// `accept`
    Accept,
}

/// Types of messages of listeners to multicast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListenerTypes {
    /// `icmpv6 type >= mld-listener-query icmpv6 type <= mld-listener-done`
    First,
    /// `icmpv6 type mld2-listener-report`
    Second,
}
