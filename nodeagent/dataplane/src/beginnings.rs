//! Connections that begin and end, as the kernel reports them.

use std::os::fd::OwnedFd;

pub use kplane_netlink::conntrack::{Ending, Reported, Stage, Tracked, Traffic};
use kplane_netlink::{Monitor, NetlinkError};

/// Connections that are read at once, so that a flood of them holds up nothing else.
const AT_ONCE: usize = 1_000;

/// The kernel's reports of connections in one network namespace that this node's rules lead to an endpoint, whatever the
/// backend.
#[derive(Debug)]
pub struct Beginnings(Monitor);

impl Beginnings {
    /// Opens the reports of connections that begin, and with `ends` also of those that end, in the calling thread's network
    /// namespace.
    ///
    /// # Errors
    /// [`NetlinkError`]. The kernel needs the module nf_conntrack_netlink, and reports nothing if
    /// `net.netfilter.nf_conntrack_events` is 0.
    pub fn open(ends: bool) -> Result<Self, NetlinkError> {
        Monitor::of_connections(ends).map(Self)
    }

    /// Returns a descriptor that is readable when reports wait.
    ///
    /// # Errors
    /// [`NetlinkError`] when there are no descriptors left.
    pub fn readiness(&self) -> Result<OwnedFd, NetlinkError> {
        self.0.readiness()
    }

    /// Passes on some reports that wait. Returns whether none was lost, and whether more may wait.
    pub fn read(&mut self, mut each: impl FnMut(Reported)) -> (bool, bool) {
        self.0.read(AT_ONCE, |message| {
            let translated = |of: &Reported| of.connection.is_translated();
            if let Some(reported) = Reported::parse(message).filter(translated) {
                each(reported);
            }
        })
    }
}
