//! The addresses that the API server lists for the control plane's own Service.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use tokio::sync::watch;

/// The addresses behind the name of the control plane's Service. A name of the cluster needs the cluster's DNS server, which
/// may run after the control plane only, and which nodes do not ask.
#[derive(Clone, Debug)]
pub struct Listed {
    service: Arc<str>,
    addresses: watch::Receiver<BTreeSet<IpAddr>>,
}

impl Listed {
    /// Creates a list that follows `addresses`.
    pub fn new(service: &str, addresses: watch::Receiver<BTreeSet<IpAddr>>) -> Self {
        let service = service.into();
        Self { service, addresses }
    }

    /// Returns the addresses of a host; none if it is not the Service, or nothing was listed yet.
    pub(super) fn of(&self, host: &str) -> Vec<IpAddr> {
        match host == &*self.service {
            true => self.addresses.borrow().iter().copied().collect(),
            false => Vec::new(),
        }
    }
}
