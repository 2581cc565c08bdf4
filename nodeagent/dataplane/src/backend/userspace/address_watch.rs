//! The kernel's reports that another program removed the proxy's address, beside those of the backend beneath.

use std::os::fd::OwnedFd;

use kplane_model::Family;
use kplane_netlink::{Monitor, removed_address};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use super::super::Notifications;
use crate::proxy_address::proxy_address;

/// Adds the reports about addresses to those of a backend. If the kernel refuses them, a lost address comes back with
/// the next check of everything.
pub(super) fn with_addresses(
    inner: Option<Box<dyn Notifications>>,
) -> Option<Box<dyn Notifications>> {
    match Monitor::of_addresses() {
        Ok(addresses) => Some(Box::new(Both { inner, addresses })),
        Err(error) => {
            tracing::warn!(%error, "cannot watch the addresses of this machine");
            inner
        }
    }
}

/// Reports of two kinds.
struct Both {
    inner: Option<Box<dyn Notifications>>,
    addresses: Monitor,
}

impl Both {
    /// Returns a descriptor that is readable when either of two is.
    fn either(&self) -> Option<OwnedFd> {
        let both = epoll::create(CreateFlags::CLOEXEC).ok()?;
        let addresses = self.addresses.readiness().ok()?;
        let inner = self.inner.as_ref().and_then(|inner| inner.readiness());
        for fd in inner.iter().chain([&addresses]) {
            epoll::add(&both, fd, EventData::new_u64(0), EventFlags::IN).ok()?;
        }
        // The two stay open in their sockets, and with them their entries in the epoll instance.
        Some(both)
    }
}

impl Notifications for Both {
    fn readiness(&self) -> Option<OwnedFd> {
        let inner = || self.inner.as_ref().and_then(|inner| inner.readiness());
        self.either().or_else(inner)
    }

    fn read(&mut self) -> [bool; 2] {
        let mut changed = self.inner.as_mut().map_or([false; 2], |inner| inner.read());
        let whole = self.addresses.drain(|message| {
            let ip = removed_address(message).map(|removed| removed.ip);
            for family in Family::ALL {
                changed[family as usize] |= ip == Some(proxy_address(family));
            }
        });
        if whole {
            changed
        } else {
            // Reports were lost.
            [true; 2]
        }
    }
}
