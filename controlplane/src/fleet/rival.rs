//! Two agents that claim one node.

use std::time::{Duration, Instant};

/// Time without an attempt after which a rival counts as gone: a live rival tries again every few seconds.
const REMEMBERED: Duration = Duration::from_secs(60);

/// An agent that claims a node for which another agent speaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rival {
    /// The rival's address.
    pub peer: String,
    /// Time of its first attempt.
    pub since: Instant,
    /// Time of its last attempt.
    pub last: Instant,
}

impl Rival {
    pub(super) fn peer_ip(&self) -> &str {
        peer_ip(&self.peer)
    }

    /// Returns whether the rival still tries to connect.
    #[must_use]
    pub fn is_there(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last) < REMEMBERED
    }
}

/// Returns the address of a peer without its port, which differs for each connection.
pub(super) fn peer_ip(peer: &str) -> &str {
    peer.rsplit_once(':').map_or(peer, |(ip, _)| ip)
}
