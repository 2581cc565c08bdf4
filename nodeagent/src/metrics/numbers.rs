//! The numbers of a report, and how numbers are written.

use crate::connection::Connection;
use crate::desired::{Counts, Position};
use crate::healthz::stale_since;
use crate::report::Report;
use kplane_dataplane::policy::PolicyCounts;

/// The numbers of a report, copied so that the engine can publish the next report.
pub(super) struct Numbers {
    /// The revisions held, applied and verified; 0 = nothing in the current epoch.
    pub(super) revisions: [u64; 3],
    pub(super) programmed: [bool; 2],
    pub(super) failing: [bool; 2],
    pub(super) verified_at_ms: [u64; 2],
    pub(super) repairs: [u64; 2],
    pub(super) failed: u64,
    pub(super) degraded: u64,
    pub(super) counts: Counts,
    /// The numbers of Services that are not named, and that have no endpoints any more.
    pub(super) held: [u64; 2],
    pub(super) stale_since_ms: u64,
    pub(super) snapshots: u64,
    pub(super) syncs_ok: u64,
    pub(super) syncs_failed: u64,
    pub(super) unknown_kinds: u64,
    /// The number of times that a control plane showed an older state.
    pub(super) older_states: u64,
    /// What each family enforces of the NetworkPolicies.
    pub(super) policies: [PolicyCounts; 2],
}

impl Numbers {
    pub(super) fn of(report: &Report, connection: &Connection) -> Self {
        // A position of another epoch means nothing in this one.
        let epoch = report.held.map(|held| held.epoch);
        let revision = |position: Option<Position>| {
            position
                .filter(|position| Some(position.epoch) == epoch)
                .map_or(0, |position| position.revision)
        };
        let degraded = report.failures.iter().filter(|f| f.degraded).count() as u64;
        let families = report.families.each_ref();
        Self {
            revisions: [report.held, report.applied, report.verified].map(revision),
            programmed: families.map(|family| family.programmed),
            failing: families.map(|family| family.error.is_some()),
            verified_at_ms: families.map(|family| family.verified_at_ms),
            repairs: families.map(|family| family.repairs.count),
            failed: report.failures.len() as u64 - degraded,
            degraded,
            counts: report.counts,
            held: report.keeps.as_ref().map_or([0; 2], |held| {
                [held.services, held.without_endpoints].map(|count| count as u64)
            }),
            stale_since_ms: stale_since(report, connection).unwrap_or(0),
            snapshots: report.snapshots,
            syncs_ok: report.syncs_ok,
            syncs_failed: report.syncs_failed,
            unknown_kinds: report.unknown_kinds,
            older_states: connection.older_states,
            policies: report.policies,
        }
    }
}

/// Converts a number; exact up to 2^53, which is the format's own limit.
pub(super) fn float(value: u64) -> f64 {
    value as f64
}
