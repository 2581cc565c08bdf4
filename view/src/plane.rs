//! The control plane, as `kpctl status` describes it.

use kplane_proto::v1 as pb;
use serde::Serialize;

use super::nodes::HeldView;
use crate::time::Time;
use crate::wire::{FromWire, known, view_of};

view_of! {
    /// The state of the control plane.
    pub(crate) struct ControlPlaneView: ControlPlaneStatus {
        version: String,
        /// The epoch, random for each start; hexadecimal, since JSON numbers are too small for it.
        epoch: String => |epoch| format!("{epoch:016x}"),
        revision: u64,
        revision_time: Option<Time> = revision_at_ms,
        time: Option<Time> = now_ms,
        start_time: Option<Time> = started_at_ms,
        source: String,
        synced: bool,
        upstream_age_milliseconds: u64 = upstream_age_ms,
        services: u64,
        endpoints: u64,
        /// The number of NetworkPolicies that nodes enforce.
        policies: u64,
        /// The word of the control plane about NetworkPolicies as a whole; `null` = none.
        enforcement: Option<EnforcementView>,
        /// Whether the API server lacks the definition of ClusterNetworkPolicies, where nodes enforce policies.
        cluster_policies_absent: bool,
        confidence: ConfidenceView,
        /// The reason why the control plane's data is incomplete; `null` when it is complete.
        doubt: Option<String>,
        /// Ports that other machines reach in plain text.
        plain_text_ports: Vec<String>,
        /// The Services that it holds; `null` when it serves exactly what its source names.
        held: Option<HeldView>,
    }
}

/// What a control plane says about NetworkPolicies as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum EnforcementView {
    Off,
    On,
    Unread,
}

impl FromWire<i32> for Option<EnforcementView> {
    fn from_wire(enforcement: i32) -> Self {
        match known(enforcement) {
            pb::Enforcement::Unspecified => None,
            pb::Enforcement::Off => Some(EnforcementView::Off),
            pb::Enforcement::On => Some(EnforcementView::On),
            pb::Enforcement::Unread => Some(EnforcementView::Unread),
        }
    }
}

/// The confidence in the completeness of the control plane's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum ConfidenceView {
    Partial,
    Whole,
    Confirmed,
}

impl FromWire<i32> for ConfidenceView {
    fn from_wire(confidence: i32) -> Self {
        match known(confidence) {
            pb::Confidence::Partial => Self::Partial,
            pb::Confidence::Unspecified => Self::Whole,
            pb::Confidence::Confirmed => Self::Confirmed,
        }
    }
}
