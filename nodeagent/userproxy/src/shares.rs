//! Fair shares of what all Services have in common: connections, and flows.
//!
//! A Service may have as many as are free, and a namespace three times as many. So one Service gets half of all, a namespace
//! three quarters, and the more owners want, the less each gets: something is left for the next one, and an owner that has
//! more than its share is refused first.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

use kplane_model::{ServiceKey, ServiceName};
use parking_lot::Mutex;

use crate::limits::Gauge;

/// A namespace's share, as a multiple of what is free.
const OF_NAMESPACE: usize = 3;

/// A shared resource: connections, UDP flows or buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// TCP connections.
    Connections,
    /// UDP flows.
    Flows,
}

/// The connections and flows of one owner.
#[derive(Debug, Default)]
struct Usage([Gauge; 2]);

/// A Service and its namespace.
#[derive(Clone, Debug)]
pub(crate) struct Owners {
    service: Arc<Usage>,
    namespace: Arc<Usage>,
}

impl Owners {
    /// Gives the Service one more, if it and its namespace have less than their shares of what is `free`.
    pub(crate) fn seat(&self, kind: Kind, free: usize) -> Option<Seat> {
        let has = |usage: &Usage| usage.0[kind as usize].get();
        let fits = has(&self.service) < free && has(&self.namespace) < free * OF_NAMESPACE;
        fits.then(|| self.force(kind))
    }

    /// Returns whether the Service itself has its share of what is `free`.
    pub(crate) fn service_has_share(&self, kind: Kind, free: usize) -> bool {
        self.service.0[kind as usize].get() >= free
    }

    /// Gives the Service one more, whatever its share.
    pub(crate) fn force(&self, kind: Kind) -> Seat {
        for usage in [&self.service, &self.namespace] {
            usage.0[kind as usize].force();
        }
        Seat {
            owners: self.clone(),
            kind,
        }
    }
}

/// The place of one connection or flow in the shares of its owners, until it is dropped.
#[derive(Debug)]
pub(crate) struct Seat {
    owners: Owners,
    kind: Kind,
}

impl Drop for Seat {
    fn drop(&mut self) {
        for usage in [&self.owners.service, &self.owners.namespace] {
            usage.0[self.kind as usize].leave();
        }
    }
}

/// All owners that have ServicePorts or connections.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    services: Mutex<HashMap<ServiceName, Weak<Usage>>>,
    namespaces: Mutex<HashMap<Arc<str>, Weak<Usage>>>,
}

fn usage<K: std::hash::Hash + Eq>(all: &Mutex<HashMap<K, Weak<Usage>>>, key: K) -> Arc<Usage> {
    let mut all = all.lock();
    let place = all.entry(key).or_default();
    place.upgrade().unwrap_or_else(|| {
        let new = Arc::new(Usage::default());
        *place = Arc::downgrade(&new);
        new
    })
}

impl Shares {
    /// Returns the owners of a ServicePort's connections.
    pub(crate) fn of(&self, key: &ServiceKey) -> Owners {
        Owners {
            service: usage(&self.services, key.service.clone()),
            namespace: usage(&self.namespaces, key.service.namespace.clone()),
        }
    }

    /// Forgets owners that have nothing any more.
    pub(crate) fn tidy(&self) {
        self.services.lock().retain(|_, usage| usage.strong_count() > 0);
        self.namespaces.lock().retain(|_, usage| usage.strong_count() > 0);
    }
}

/// The numbers of connections between the same two addresses: a client's and an endpoint's. Two nodes whose Services lead
/// to each other would connect for ever.
#[derive(Debug, Default)]
pub(crate) struct Between(Mutex<HashMap<(IpAddr, IpAddr), usize>>);

impl Between {
    /// Counts a connection, unless there are `most` already.
    pub(crate) fn enter(self: &Arc<Self>, ends: (IpAddr, IpAddr), most: usize) -> Option<Link> {
        let mut all = self.0.lock();
        let count = all.entry(ends).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(Link {
            all: self.clone(),
            ends,
        })
    }
}

/// One connection between two addresses, until it is dropped.
#[derive(Debug)]
pub(crate) struct Link {
    all: Arc<Between>,
    ends: (IpAddr, IpAddr),
}

impl Drop for Link {
    fn drop(&mut self) {
        let mut all = self.all.0.lock();
        if let Some(count) = all.get_mut(&self.ends) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.ends);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kplane_model::KeyParts;

    use super::*;

    fn key(namespace: &str, name: &str, port: &str) -> ServiceKey {
        ServiceKey::from(KeyParts {
            port_name: port.into(),
            ..KeyParts::clone(&ServiceKey::sample(namespace, name))
        })
    }

    /// Takes as many of 64 as a ServicePort gets.
    fn take(shares: &Shares, key: &ServiceKey, held: &mut Vec<Seat>) -> usize {
        let before = held.len();
        while let Some(seat) = shares.of(key).seat(Kind::Connections, 64 - held.len()) {
            held.push(seat);
        }
        held.len() - before
    }

    #[test]
    fn an_owner_that_comes_later_finds_something_free() {
        let (shares, mut held) = (Shares::default(), Vec::new());
        let mut gets =
            |namespace, name, port| take(&shares, &key(namespace, name, port), &mut held);
        // Two ports are one Service, and a namespace has more than one.
        assert_eq!(gets("shop", "web", "http"), 32);
        assert_eq!(gets("shop", "web", "https"), 0);
        assert_eq!(gets("shop", "api", ""), 16);
        assert_eq!(gets("shop", "db", ""), 0);
        assert_eq!(gets("games", "chess", ""), 8);
        assert_eq!(gets("music", "radio", ""), 4);
    }

    #[test]
    fn what_ends_is_free_again_and_owners_without_anything_are_forgotten() {
        let (shares, mut held) = (Shares::default(), Vec::new());
        assert_eq!(take(&shares, &key("shop", "web", ""), &mut held), 32);
        shares.tidy();
        assert_eq!(take(&shares, &key("shop", "web", ""), &mut held), 0);
        held.clear();
        shares.tidy();
        assert!(shares.services.lock().is_empty() && shares.namespaces.lock().is_empty());
        assert_eq!(take(&shares, &key("shop", "web", ""), &mut held), 32);
    }

    #[test]
    fn two_addresses_have_so_many_connections_between_them() {
        let between = Arc::new(Between::default());
        let ends = |last| {
            (
                IpAddr::from([192, 0, 2, 1]),
                IpAddr::from([192, 0, 2, last]),
            )
        };
        let first = between.enter(ends(2), 1);
        assert!(first.is_some());
        assert!(between.enter(ends(2), 1).is_none());
        assert!(between.enter(ends(3), 1).is_some());
        drop(first);
        assert!(between.enter(ends(2), 1).is_some());
        assert!(between.0.lock().is_empty());
    }
}
