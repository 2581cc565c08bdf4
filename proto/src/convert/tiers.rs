//! Objects of ClusterNetworkPolicies.

use std::collections::HashSet;
use std::sync::Arc;

use kplane_model::{
    DecisionRow, Decisions, Direction, Family, PeerId, PortAction, PortActions, Tier, TierAction,
    TierSpan, shared,
};

use super::ConvertError;
use super::address::{ip_bytes, unpack_ip};
use super::enums::protocol;
use super::ids::{self, pack_ids, unpack_ids};
use crate::v1 as pb;

/// Returns an identity, or no bytes.
pub(super) fn optional(id: Option<PeerId>) -> Vec<u8> {
    id.map_or_else(Vec::new, |id| id.0.to_vec())
}

/// Reads an identity; no bytes = none.
pub(super) fn id(field: &'static str, bytes: &[u8]) -> Result<Option<PeerId>, ConvertError> {
    if bytes.is_empty() { Ok(None) } else { ids::id(field, bytes).map(Some) }
}

pub(super) fn name(name: &str) -> Result<Arc<str>, ConvertError> {
    if name.is_empty() {
        Err(ConvertError::new("name", "empty"))
    } else {
        Ok(shared(name))
    }
}

impl From<&TierSpan> for pb::TierSpan {
    fn from(span: &TierSpan) -> Self {
        Self {
            first: ip_bytes(span.first),
            last: ip_bytes(span.last),
            tier: span.tier.0.to_vec(),
        }
    }
}

pub(super) fn span(wire: &pb::TierSpan) -> Result<TierSpan, ConvertError> {
    let first = unpack_ip("first", &wire.first)?;
    let last = unpack_ip("last", &wire.last)?;
    if Family::of(first) != Family::of(last) || first > last {
        return Err(ConvertError::new(
            "last",
            format!("{last} is below {first}"),
        ));
    }
    Ok(TierSpan {
        first,
        last,
        tier: ids::id("tier", &wire.tier)?,
    })
}

impl From<&Decisions> for pb::TierDecisions {
    fn from(of: &Decisions) -> Self {
        let port = |(protocol, first, last, action): &PortAction| pb::TierPorts {
            protocol: pb::Protocol::from(*protocol).into(),
            first: (*first).into(),
            last: (*last).into(),
            action: to_wire(*action).into(),
        };
        let row = |row: &DecisionRow| pb::TierRow {
            egress: row.direction == Direction::Egress,
            baseline: row.tier == Tier::Baseline,
            rest: to_wire(row.actions.rest).into(),
            ports: row.actions.ranges.iter().map(port).collect(),
            peers: pack_ids(&row.peers),
        };
        Self {
            subject: of.subject.0.to_vec(),
            part: of.part.into(),
            rows: of.rows.iter().map(row).collect(),
        }
    }
}

pub(super) fn decisions(wire: &pb::TierDecisions) -> Result<Decisions, ConvertError> {
    let wrong = |_| ConvertError::new("part", format!("{} is above 255", wire.part));
    let part = u8::try_from(wire.part).map_err(wrong)?;
    let rows = wire.rows.iter().map(row).collect::<Result<Vec<_>, _>>()?;
    let mut decided = HashSet::new();
    for row in &rows {
        for peer in &row.peers {
            // A second decision about the same would be one too many.
            if peer.0[0] != part || !decided.insert((row.direction, row.tier, *peer)) {
                return Err(ConvertError::new("peers", "of another part, or twice"));
            }
        }
    }
    Ok(Decisions {
        subject: ids::id("subject", &wire.subject)?,
        part,
        rows,
    })
}

fn row(wire: &pb::TierRow) -> Result<DecisionRow, ConvertError> {
    let ranges = wire
        .ports
        .iter()
        .map(|wire| {
            let number = |port: u32| u16::try_from(port).ok();
            let bounds = number(wire.first).zip(number(wire.last));
            let (first, last) = bounds
                .filter(|(first, last)| first <= last)
                .ok_or_else(|| ConvertError::new("ports", "no range"))?;
            let protocol = protocol(wire.protocol)?;
            Ok((protocol, first, last, from_wire(wire.action())?))
        })
        .collect::<Result<Vec<PortAction>, ConvertError>>()?;
    let overlap = |pair: &[PortAction]| match pair {
        [(a, _, last, _), (b, first, ..)] => a > b || (a == b && first <= last),
        _ => false,
    };
    if ranges.windows(2).any(overlap) {
        return Err(ConvertError::new("ports", "they are not sorted"));
    }
    Ok(DecisionRow {
        direction: if wire.egress { Direction::Egress } else { Direction::Ingress },
        tier: if wire.baseline { Tier::Baseline } else { Tier::Admin },
        actions: PortActions {
            rest: from_wire(wire.rest())?,
            ranges,
        },
        peers: unpack_ids("peers", &wire.peers)?,
    })
}

fn to_wire(action: TierAction) -> pb::TierAction {
    match action {
        TierAction::Deny => pb::TierAction::Deny,
        TierAction::Pass => pb::TierAction::Pass,
        TierAction::Accept => pb::TierAction::Accept,
    }
}

fn from_wire(action: pb::TierAction) -> Result<TierAction, ConvertError> {
    match action {
        pb::TierAction::Deny => Ok(TierAction::Deny),
        pb::TierAction::Pass => Ok(TierAction::Pass),
        pb::TierAction::Accept => Ok(TierAction::Accept),
        pb::TierAction::Unspecified => Err(ConvertError::new("action", "unknown")),
    }
}
