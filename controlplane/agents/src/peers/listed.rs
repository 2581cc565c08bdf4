//! The addresses that the API server lists for the control plane's own Service.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use kplane_util::dial::MAX_ADDRESSES;
use tokio::sync::watch;

/// The addresses behind the name of the control plane's Service. A name of the cluster needs the cluster's DNS server, which
/// may run after the control plane only, and which nodes do not ask.
#[derive(Clone, Debug)]
pub struct Listed {
    service: Arc<str>,
    places: watch::Receiver<BTreeSet<SocketAddr>>,
}

impl Listed {
    /// Creates a list that follows `places`, at which replicas serve agents.
    pub fn new(service: &str, places: watch::Receiver<BTreeSet<SocketAddr>>) -> Self {
        let service = service.into();
        Self { service, places }
    }

    /// Returns where replicas serve agents, 64 at most, for the wire.
    pub(crate) fn places(&self) -> Vec<String> {
        let places = self.places.borrow();
        places.iter().take(MAX_ADDRESSES).map(ToString::to_string).collect()
    }

    /// Returns the addresses of a host; none if it is not the Service, or nothing was listed yet.
    pub(super) fn of(&self, host: &str) -> Vec<IpAddr> {
        if host == &*self.service {
            self.places.borrow().iter().map(SocketAddr::ip).collect()
        } else {
            Vec::new()
        }
    }
}
