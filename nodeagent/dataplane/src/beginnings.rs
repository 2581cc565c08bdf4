//! Connections that begin, as the kernel reports them.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use kplane_model::Protocol;
use kplane_netlink::conntrack::Tracked;
use kplane_netlink::{Monitor, NetlinkError};

/// Connections that are read at once, so that a flood of them holds up nothing else.
const AT_ONCE: usize = 1_000;

/// The kernel's reports of connections that begin in one network namespace, whatever the backend.
#[derive(Debug)]
pub struct Beginnings(Monitor);

impl Beginnings {
    /// Opens the reports in the calling thread's network namespace.
    ///
    /// # Errors
    /// [`NetlinkError`]. The kernel needs the module nf_conntrack_netlink, and reports nothing if
    /// `net.netfilter.nf_conntrack_events` is 0.
    pub fn open() -> Result<Self, NetlinkError> {
        Monitor::of_connections().map(Self)
    }

    /// Returns a descriptor that is readable when reports wait.
    ///
    /// # Errors
    /// [`NetlinkError`] when there are no descriptors left.
    pub fn readiness(&self) -> Result<OwnedFd, NetlinkError> {
        self.0.readiness()
    }

    /// Passes on the destination that the client wrote, of some connections that wait and that this node's rules lead
    /// elsewhere. Returns whether none was lost, and whether more may wait.
    pub fn read(&mut self, mut each: impl FnMut(Protocol, SocketAddr)) -> (bool, bool) {
        self.0.read(AT_ONCE, |message| {
            if let Some(begun) = Tracked::parse(message).filter(Tracked::is_translated) {
                each(begun.protocol, begun.to);
            }
        })
    }
}
