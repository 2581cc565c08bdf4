//! The ServicePorts that are served, and the way from a place to one of them.
//!
//! All threads share the table. A change replaces routes, and a ServicePort keeps what its connections have shown.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kplane_model::{Cidr, EndpointAddr, Family, FrontendAddr, Protocol, ProxyPort, ServiceKey};
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::counters::{Counts, Failure};
use crate::picker::{Choice, Pool};
use crate::port::{Options, Port, PortSpec, Suspects};
use crate::shares::Shares;

/// The way of connections from a place to a ServicePort.
#[derive(Debug)]
pub(crate) struct Route {
    at: (Family, FrontendAddr),
    pub(crate) port: Arc<Port>,
    outside: Pool,
    inside: Pool,
    sources: Vec<Cidr>,
}

impl Route {
    /// Returns whether a client may use the place (A8).
    pub(crate) fn admits(&self, client: IpAddr) -> bool {
        self.sources.is_empty() || self.sources.iter().any(|range| range.contains(client))
    }

    /// Returns the endpoints for a client (A16).
    fn pool(&self, is_inside: bool) -> Pool {
        if is_inside { self.inside } else { self.outside }
    }
}

/// A ServicePort and its places.
#[derive(Debug)]
struct Entry {
    port: Arc<Port>,
    places: Vec<FrontendAddr>,
    is_listed: bool,
}

/// All ServicePorts. Connections read it, and changes replace parts of it.
#[derive(Debug, Default)]
pub struct Table {
    routes: RwLock<HashMap<(Family, FrontendAddr), Arc<Route>>>,
    ports: RwLock<HashMap<ServiceKey, Entry>>,
    /// Counts of the connections of ServicePorts that are gone.
    gone: Mutex<Counts>,
    /// Addresses of pods, and of this node.
    inside: RwLock<[Vec<Cidr>; 2]>,
    suspects: Arc<Suspects>,
    shares: Shares,
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read()
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write()
}

impl Table {
    fn new_port(&self, key: &ServiceKey) -> Arc<Port> {
        let suspects = Arc::clone(&self.suspects);
        let owners = self.shares.of(key);
        Arc::new(Port::new(key.clone(), owners, suspects, Instant::now()))
    }

    /// Replaces a family's addresses of clients inside of the cluster: pods, and this node (A16).
    pub fn set_inside(&self, family: Family, ranges: Vec<Cidr>) {
        write(&self.inside)[family as usize] = ranges;
    }

    /// Replaces ServicePorts (`Some`), or removes them (`None`). New connections see all of it or nothing; open ones
    /// go on.
    pub fn change(&self, services: impl IntoIterator<Item = (ServiceKey, Option<PortSpec>)>) {
        let mut ports = write(&self.ports);
        let mut routes = write(&self.routes);
        let mut added = Vec::new();
        let mut is_smaller = false;
        for (key, spec) in services {
            let before = ports.remove(&key);
            for at in before.iter().flat_map(|entry| &entry.places) {
                let place = (key.family, *at);
                // Another ServicePort may have the place by now.
                let is_own = |route: &Arc<Route>| {
                    before.as_ref().is_some_and(|entry| Arc::ptr_eq(&route.port, &entry.port))
                };
                if routes.get(&place).is_some_and(is_own) {
                    routes.remove(&place);
                }
            }
            let Some(spec) = spec else {
                is_smaller = true;
                if let Some(entry) = &before {
                    let counts = entry.port.retire();
                    self.gone.lock().add(counts);
                }
                continue;
            };
            let port = before.map_or_else(|| self.new_port(&key), |entry| entry.port);
            port.configure(&spec.endpoints, spec.options);
            let places = spec.routes.iter().map(|route| route.at).collect();
            let (family, of_port) = (key.family, port.clone());
            let is_listed = spec.is_listed;
            let entry = Entry {
                port,
                places,
                is_listed,
            };
            ports.insert(key, entry);
            added.extend(spec.routes.into_iter().map(|route| {
                let way = Route {
                    at: (family, route.at),
                    port: of_port.clone(),
                    outside: route.outside,
                    inside: route.inside,
                    sources: route.sources,
                };
                ((family, route.at), Arc::new(way))
            }));
        }
        // Last, since a place may go from one ServicePort of the change to another.
        routes.extend(added);
        if is_smaller {
            self.shares.tidy();
        }
    }

    /// Returns a ServicePort for connections of an earlier proxy. One that is not there yet gets its places with the next
    /// change.
    pub(crate) fn inherit(&self, key: &ServiceKey) -> Arc<Port> {
        let mut ports = write(&self.ports);
        let entry = ports.entry(key.clone()).or_insert_with(|| Entry {
            port: self.new_port(key),
            places: Vec::new(),
            is_listed: false,
        });
        entry.port.clone()
    }

    /// Returns the way from a place.
    pub(crate) fn route(&self, family: Family, at: FrontendAddr) -> Option<Arc<Route>> {
        read(&self.routes).get(&(family, at)).cloned()
    }

    /// Returns the way from an address that a client wanted: that of a Service, or a node port.
    pub(crate) fn route_to(&self, protocol: Protocol, to: SocketAddr) -> Option<Arc<Route>> {
        let (ip, port) = (to.ip().to_canonical(), to.port());
        let family = Family::of(ip);
        let address = FrontendAddr::Address { ip, protocol, port };
        let node_port = FrontendAddr::NodePort { protocol, port };
        self.route(family, address).or_else(|| self.route(family, node_port))
    }

    /// Returns whether a client is inside the cluster: a pod, or this machine, which `local`, the address of the other
    /// end, shows. On loopback addresses, a policy Local counts for the machine itself as well (K7).
    fn is_inside(&self, client: IpAddr, local: IpAddr) -> bool {
        let is_known = || {
            read(&self.inside)[Family::of(client) as usize]
                .iter()
                .any(|range| range.contains(client))
        };
        !client.is_loopback() && (client == local || is_known())
    }

    /// Chooses the endpoint for a client's first attempt. If the ServicePort was configured anew since the way to it was
    /// found, the way as it is now counts.
    pub(crate) fn choose(
        &self,
        route: &mut Arc<Route>,
        client: IpAddr,
        local: IpAddr,
        now: Instant,
    ) -> (Pool, Option<Choice>, Options) {
        let is_inside = self.is_inside(client, local);
        let pool = route.pool(is_inside);
        let (choice, options) = route.port.first(pool, client, now);
        let (family, at) = route.at;
        let current = match choice {
            Some(_) => None,
            None => self.route(family, at).filter(|current| !Arc::ptr_eq(current, route)),
        };
        let Some(current) = current else {
            return (pool, choice, options);
        };
        *route = current;
        let pool = route.pool(is_inside);
        let (choice, options) = route.port.first(pool, client, now);
        (pool, choice, options)
    }

    fn port(&self, key: &ServiceKey) -> Option<Arc<Port>> {
        read(&self.ports).get(key).map(|entry| entry.port.clone())
    }

    /// Returns the sum over all ServicePorts, also over those that are gone, and the number of endpoints that new
    /// connections avoid now. Takes time for each endpoint.
    pub fn totals(&self) -> (Counts, usize) {
        let now = Instant::now();
        let mut sum = *self.gone.lock();
        let mut avoided = 0;
        for entry in read(&self.ports).values() {
            let state = entry.port.read(now);
            sum.add(state.counts);
            avoided += state.endpoints.iter().filter(|at| at.avoided_for.is_some()).count();
        }
        (sum, avoided)
    }

    /// Returns at most `most` endpoints that new connections avoid, or avoided within the last minute without a success
    /// since, in the order of their ServicePorts. Takes time for each ServicePort with such an endpoint only.
    pub fn avoided(&self, most: usize) -> Vec<(ServiceKey, EndpointAddr)> {
        let now = Instant::now();
        let mut found = Vec::new();
        self.suspects.retain(|key| {
            let port = self.port(key);
            let avoided = port.map_or_else(Vec::new, |port| port.avoided_lately(now));
            let room = most - found.len();
            found.extend(avoided.iter().take(room).map(|at| (key.clone(), *at)));
            !avoided.is_empty()
        });
        found
    }

    /// Returns the ServicePorts of which clients were refused because of a limit, with the number of clients. Takes time for
    /// each ServicePort.
    pub fn limited(&self) -> Vec<(ServiceKey, u64)> {
        let ports = read(&self.ports);
        let refused = |entry: &Entry| entry.port.counts().failed[Failure::Limit as usize];
        ports
            .iter()
            .map(|(key, entry)| (key, refused(entry)))
            .filter(|(_, count)| *count > 0)
            .map(|(key, count)| (key.clone(), count))
            .collect()
    }

    /// Returns the counts of at most `most` ServicePorts that are to be listed, in the order of their names.
    pub fn listed(&self, most: usize) -> Vec<(ServiceKey, Counts)> {
        let ports = read(&self.ports);
        let mut listed: Vec<_> = ports.iter().filter(|(_, entry)| entry.is_listed).collect();
        listed.sort_unstable_by_key(|(key, _)| *key);
        let counts = |(key, entry): (&ServiceKey, &Entry)| (key.clone(), entry.port.counts());
        listed.into_iter().take(most).map(counts).collect()
    }

    /// Returns counters and endpoints of a ServicePort.
    pub fn state(&self, key: &ServiceKey) -> Option<ProxyPort> {
        Some(self.port(key)?.read(Instant::now()))
    }

    /// Returns the clients that a ServicePort remembers, their endpoints, and for how long they still are remembered.
    pub fn remembered(&self, key: &ServiceKey) -> Vec<(IpAddr, EndpointAddr, Duration)> {
        let port = self.port(key);
        port.map_or_else(Vec::new, |port| port.remembered(Instant::now()))
    }
}
