//! Small tables of the agent itself: one leads clients to the userspace proxy, one leads answers back, and one leads
//! preStop hooks to the agent.

#[cfg(feature = "userspace")]
mod capture;
#[cfg(feature = "userspace")]
mod divert;
#[cfg_attr(
    not(feature = "userspace"),
    allow(
        dead_code,
        reason = "the tables of the userspace proxy need more than the rest does"
    )
)]
mod expressions;
mod own_table;
mod prestop;

#[cfg(feature = "userspace")]
pub(in crate::backend) use capture::{CaptureSettings, CaptureTable, CapturedFrontend};
#[cfg(feature = "userspace")]
pub(in crate::backend) use divert::{DivertMarks, DivertTable};
pub use prestop::{HookAddresses, PrestopTable, PrestopTableError};
