//! The rights of this process in the kernel, and the backends that mode userspace chooses by them.

use super::{Kind, OpenError};
use kplane_netlink::{Errno, NetlinkError, NfSocket};

/// Asks the kernel for something that only a process gets that may change rules.
fn ask_kernel() -> Result<(), NetlinkError> {
    NfSocket::open()?.generation().map(drop)
}

/// Checks that this process may change rules at all. Without this check, a missing privilege would show up as
/// many missing kernel features.
///
/// # Errors
/// [`OpenError`].
pub(in crate::backend) fn check_privilege(backend: &'static str) -> Result<(), OpenError> {
    match ask_kernel().err().and_then(|error| error.errno()) {
        Some(Errno::EPERM) => Err(OpenError::new(
            backend,
            "not permitted to change rules: CAP_NET_ADMIN is missing in the user namespace that owns this network \
             namespace",
        )),
        // Other errors show up again when the backend opens.
        _ => Ok(()),
    }
}

impl Kind {
    /// Returns the way of the userspace backend for which this process has the rights; other backends as they are.
    #[must_use]
    pub fn within_rights(self) -> Self {
        if self != Self::Userspace {
            return self;
        }
        match ask_kernel() {
            Err(error) if error.errno() == Some(Errno::EPERM) => {
                let backend = Self::UserspaceLoopback.describe().name;
                tracing::info!(
                    %error,
                    "this process cannot change rules: Services are at loopback addresses (backend {backend})"
                );
                Self::UserspaceLoopback
            }
            // A kernel without nf_tables is named when the backend opens.
            Ok(()) | Err(_) => self,
        }
    }
}
