//! Small tables of the agent itself: one leads clients to the userspace proxy, one leads answers back, and one leads
//! preStop hooks to the agent.

#[cfg(feature = "userspace")]
mod capture;
mod departing;
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

#[cfg(feature = "userspace")]
pub(in crate::backend) use capture::{CaptureSettings, CaptureTable, Place};
pub use departing::{DepartingError, DepartingTable, loopback};
#[cfg(feature = "userspace")]
pub(in crate::backend) use divert::{DivertMarks, DivertTable};

use kplane_netlink::{Errno, Rejection};

/// The table ends with the socket that created it (Linux 5.12).
const NFT_TABLE_F_OWNER: u32 = 2;

/// Returns whether the kernel refused the flag of a table's owner.
fn knows_no_owner(rejections: &[Rejection]) -> bool {
    let unknown =
        |rejection: &Rejection| matches!(rejection.errno, Errno::EOPNOTSUPP | Errno::EINVAL);
    rejections.first().is_some_and(unknown)
}
