//! The packet counters that iptables rules increment (C7, C8). Their names are kube-proxy's.

use super::rule::Counter;
use kplane_netlink::{NetlinkError, NfSocket, create_counter, delete_counter, read_counter};

/// Values of the counters of this network namespace, in packets; `None` for missing counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketCounts {
    /// Packets dropped because connection tracking found them invalid (C7).
    pub invalid_dropped: Option<u64>,
    /// Packets for a node port on the loopback address (C8).
    pub localhost_accepted: Option<u64>,
}

impl PacketCounts {
    /// Reads the counters of this thread's network namespace.
    pub fn read() -> Self {
        let Ok(mut socket) = NfSocket::open() else {
            return Self::default();
        };
        let mut read = |counter: Counter| read_counter(&mut socket, counter.as_str()).ok();
        Self {
            invalid_dropped: read(Counter::InvalidDropped),
            localhost_accepted: read(Counter::LocalhostAccepted),
        }
    }
}

/// Creates the counters in this thread's network namespace.
pub(super) fn make_all() -> Result<(), NetlinkError> {
    let mut socket = NfSocket::open()?;
    Counter::ALL
        .into_iter()
        .try_for_each(|counter| create_counter(&mut socket, counter.as_str()))
}

/// Deletes the counters that no rule uses any more.
pub(crate) fn remove() {
    // Nothing depends on the deletion: a counter that stays counts nothing.
    if let Ok(mut socket) = NfSocket::open() {
        for counter in Counter::ALL {
            let _ = delete_counter(&mut socket, counter.as_str());
        }
    }
}
