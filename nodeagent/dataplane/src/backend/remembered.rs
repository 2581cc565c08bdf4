//! Reads and forgets the clients that the kernel remembers for session affinity, by the backend in use.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::affinity::Wanted;
use super::{AffinityClients, AffinityPort, Kind, iptables, ipvs, nftables};
use crate::chain;

/// Longest time to read.
const WITHIN: Duration = Duration::from_secs(3);

impl Kind {
    /// Reads which clients the kernel of the calling thread's network namespace remembers for ServicePorts. Changes
    /// nothing.
    ///
    /// # Errors
    /// The reason why that cannot be known.
    pub fn remembered(
        self,
        ports: &[AffinityPort],
        client: Option<IpAddr>,
    ) -> Result<AffinityClients, String> {
        let wanted = Wanted {
            client,
            until: Instant::now() + WITHIN,
        };
        match self {
            Self::Nftables | Self::Userspace => nftables::remembered(ports, wanted),
            Self::Iptables => iptables::remembered(ports, wanted).map_err(|e| chain(&e)),
            Self::Ipvs => ipvs::remembered(ports, wanted),
            Self::UserspaceLoopback | Self::Noop => Err("the agent programs no kernel".to_owned()),
        }
    }

    /// Makes the kernel forget a client of these ServicePorts. Its connections go on.
    ///
    /// # Errors
    /// The reason why the client is still remembered.
    pub fn forget(self, ports: &[AffinityPort], client: IpAddr) -> Result<(), String> {
        match self {
            Self::Nftables | Self::Userspace => nftables::forget(ports, client),
            Self::Iptables => iptables::forget(ports, client).map_err(|e| chain(&e)),
            Self::Ipvs => Err(ipvs::CANNOT_FORGET.to_owned()),
            Self::UserspaceLoopback | Self::Noop => Err("the agent programs no kernel".to_owned()),
        }
    }
}
