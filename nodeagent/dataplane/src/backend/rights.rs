//! The rights of this process in the kernel, and the backends that mode userspace chooses by them.

use super::userspace;
use super::{CaptureBy, Kind, OpenError, Settings, nftables};
use kplane_netlink::ipset::IpSets;
use kplane_netlink::{Errno, NetlinkError, NfSocket};

/// Asks the kernel for something that only a process gets that may change rules.
fn ask_kernel() -> Result<(), NetlinkError> {
    NfSocket::open()?.generation().map(drop)
}

/// Returns whether the kernel has IP sets that this process may change.
fn has_sets() -> bool {
    IpSets::open().is_ok_and(|mut sets| sets.names().is_ok())
}

/// Checks that this process may change rules at all. Without this check, a missing privilege would show up as
/// many missing kernel features.
///
/// # Errors
/// [`OpenError`].
pub(in crate::backend) fn check_privilege(backend: &'static str) -> Result<(), OpenError> {
    match ask_kernel().err().and_then(|error| error.errno()) {
        Some(Errno::EPERM) => Err(OpenError {
            backend,
            reason: "not permitted to change rules: CAP_NET_ADMIN is missing in the user namespace that \
                     owns this network namespace"
                .to_owned(),
        }),
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
            Ok(()) => self,
            // The kernel has no nf_tables, and this process may change IP sets, and so rules.
            Err(error) if error.errno() != Some(Errno::EPERM) && has_sets() => self,
            Err(error) => {
                let backend = userspace::LOOPBACK.name;
                tracing::info!(
                    %error,
                    "this process cannot change rules: Services are at loopback addresses (backend {backend})"
                );
                Self::UserspaceLoopback
            }
        }
    }

    /// Returns the backend whose rules are behind the proxy in mode userspace: the kernel says which it is.
    pub(super) fn behind_proxy() -> Self {
        match nftables::exists() {
            true => Self::Nftables,
            false => Self::Iptables,
        }
    }

    /// Returns the backend whose objects a cleanup removes: in mode userspace, the one behind the proxy.
    #[must_use]
    pub fn to_clean_up(self, settings: &Settings) -> Self {
        let has_nftables = || ask_kernel().is_ok();
        match (self, settings.userspace.capture) {
            (Self::Userspace, CaptureBy::Iptables) => Self::Iptables,
            (Self::Userspace, CaptureBy::Auto) if !has_nftables() => Self::Iptables,
            _ => self,
        }
    }
}
