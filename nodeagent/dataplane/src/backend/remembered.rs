//! Reads the clients that the kernel, and a proxy in front of it, remember for session affinity, by the
//! backend in use.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::affinity::ClientQuery;
use super::{AffinityClient, AffinityClients, AffinityPort, Kind, Proxy, iptables, ipvs, nftables};
use crate::chain;

/// Longest time to read.
const WITHIN: Duration = Duration::from_secs(3);

impl Kind {
    /// Reads which clients are remembered for ServicePorts: by the proxy, if there is one, and by the kernel of the calling
    /// thread's network namespace. Changes nothing.
    ///
    /// # Errors
    /// The reason why that cannot be known.
    pub fn remembered(
        self,
        proxy: Option<&dyn Proxy>,
        ports: &[AffinityPort],
        client: Option<IpAddr>,
    ) -> Result<AffinityClients, String> {
        let mut all = if self.is_asked(proxy) {
            self.remembered_by_kernel(ports, client)?
        } else {
            AffinityClients::default()
        };
        for (index, port) in ports.iter().enumerate() {
            let remembered = proxy.into_iter().flat_map(|proxy| proxy.remembered(&port.key));
            for (from, endpoint, left) in
                remembered.filter(|(from, ..)| client.is_none_or(|ip| ip == *from))
            {
                all.add(AffinityClient {
                    port: index,
                    client: from,
                    endpoint: Some(endpoint),
                    expires: Some(left),
                });
            }
        }
        Ok(all)
    }

    /// Returns whether the kernel is asked: not if the proxy alone serves.
    fn is_asked(self, proxy: Option<&dyn Proxy>) -> bool {
        proxy.is_none() || self.describe().programs_kernel
    }

    fn remembered_by_kernel(
        self,
        ports: &[AffinityPort],
        client: Option<IpAddr>,
    ) -> Result<AffinityClients, String> {
        let wanted = ClientQuery {
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
}
