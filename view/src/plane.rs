//! The control plane, as `kpctl status` describes it.

use kplane_proto::v1 as pb;
use serde::Serialize;

use super::nodes::HeldView;
use crate::time::Time;

/// The state of the control plane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ControlPlaneView {
    pub(crate) version: String,
    /// The epoch, random for each start; hexadecimal, since JSON numbers are too small for it.
    pub(crate) epoch: String,
    pub(crate) revision: u64,
    pub(crate) revision_time: Option<Time>,
    pub(crate) time: Option<Time>,
    pub(crate) start_time: Option<Time>,
    pub(crate) source: String,
    pub(crate) synced: bool,
    pub(crate) upstream_age_milliseconds: u64,
    pub(crate) services: u64,
    pub(crate) endpoints: u64,
    pub(crate) confidence: ConfidenceView,
    /// The reason why the control plane's data is incomplete; `null` when it is complete.
    pub(crate) doubt: Option<String>,
    /// Ports that other machines reach in plain text.
    pub(crate) plain_text_ports: Vec<String>,
    /// The Services that it holds; `null` when it serves exactly what its source names.
    pub(crate) held: Option<HeldView>,
}

/// The confidence in the completeness of the control plane's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum ConfidenceView {
    Partial,
    Whole,
    Confirmed,
}

impl From<pb::Confidence> for ConfidenceView {
    fn from(confidence: pb::Confidence) -> Self {
        match confidence {
            pb::Confidence::Partial => Self::Partial,
            pb::Confidence::Unspecified => Self::Whole,
            pb::Confidence::Confirmed => Self::Confirmed,
        }
    }
}

impl From<pb::ControlPlaneStatus> for ControlPlaneView {
    fn from(status: pb::ControlPlaneStatus) -> Self {
        Self {
            confidence: status.confidence().into(),
            doubt: Some(status.doubt).filter(|doubt| !doubt.is_empty()),
            held: status.held.map(HeldView::from),
            plain_text_ports: status.plain_text_ports,
            version: status.version,
            epoch: format!("{:016x}", status.epoch),
            revision: status.revision,
            revision_time: Time::from_wire(status.revision_at_ms),
            time: Time::from_wire(status.now_ms),
            start_time: Time::from_wire(status.started_at_ms),
            source: status.source,
            synced: status.synced,
            upstream_age_milliseconds: status.upstream_age_ms,
            services: status.services,
            endpoints: status.endpoints,
        }
    }
}
