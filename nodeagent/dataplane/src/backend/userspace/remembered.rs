//! The clients that the proxy remembers for session affinity.

use std::net::IpAddr;

use kplane_userproxy::Proxy;

use super::super::{AffinityClient, AffinityClients, AffinityPort, Kind};

impl Kind {
    /// Reads which clients a backend with a proxy remembers: those of the proxy, and those of the kernel behind it.
    ///
    /// # Errors
    /// The same reasons as [`Kind::remembered`].
    pub fn remembered_by(
        self,
        proxy: &Proxy,
        ports: &[AffinityPort],
        client: Option<IpAddr>,
    ) -> Result<AffinityClients, String> {
        let mut all = match self.describe().programs_kernel {
            true => self.remembered(ports, client)?,
            false => AffinityClients::default(),
        };
        for (index, port) in ports.iter().enumerate() {
            let remembered = proxy.table().remembered(&port.key).into_iter();
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

    /// Makes a proxy, and the kernel behind it, forget a client of these ServicePorts.
    ///
    /// # Errors
    /// The same reasons as [`Kind::forget`].
    pub fn forget_by(
        self,
        proxy: &Proxy,
        ports: &[AffinityPort],
        client: IpAddr,
    ) -> Result<(), String> {
        for port in ports {
            proxy.table().forget(&port.key, client);
        }
        match self.describe().programs_kernel {
            true => self.forget(ports, client),
            false => Ok(()),
        }
    }
}
