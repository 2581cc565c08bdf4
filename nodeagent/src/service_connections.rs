//! Connections that begin, counted by ServicePort (`--count-connections`), and who they are from and to (`--flows`).
//!
//! The kernel reports each connection once its first packet has passed all rules, with the destination that the client
//! wrote and the one that it got. So the same counter serves all backends, and the rules need none.

mod edges;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kplane_dataplane::backend::PacketTarget;
use kplane_dataplane::beginnings::{Beginnings, Reported};
use kplane_model::{Family, ServiceKey, ServicePort};
use parking_lot::{Mutex, MutexGuard};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use self::edges::Edges;
pub use self::edges::{EdgeCounts, EdgeKey, EdgeSum, EdgeSums};

/// Pause after everything was read: it costs less to read many connections at once. In that time 10,000 may come before
/// the kernel drops reports.
const PAUSE: Duration = Duration::from_millis(20);
/// The kernel's setting without which it reports no connections, and the pause between two readings of it.
const EVENTS: &str = "/proc/sys/net/netfilter/nf_conntrack_events";
const EVENTS_PAUSE: Duration = Duration::from_secs(60);

/// Connections by ServicePort.
#[derive(Debug, Default)]
pub struct ServiceConnections(Mutex<ConnectionCounts>);

#[derive(Debug, Default)]
struct ConnectionCounts {
    frontends: HashMap<PacketTarget, Arc<ServiceKey>>,
    ports: BTreeMap<Arc<ServiceKey>, Port>,
    /// Times when the kernel dropped reports, because too many waited.
    losses: u64,
    /// Who connections are from and to, and the time at which counting began.
    edges: Option<(Edges, Instant)>,
    /// The reason why nothing is counted any more.
    failure: Option<String>,
}

#[derive(Debug, Default)]
struct Port {
    frontends: Vec<PacketTarget>,
    connections: u64,
}

impl ServiceConnections {
    /// Creates a counter that also remembers who connections are from and to.
    pub fn with_edges() -> Self {
        let edges = Some((Edges::default(), Instant::now()));
        Self(Mutex::new(ConnectionCounts {
            edges,
            ..ConnectionCounts::default()
        }))
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionCounts> {
        // Counts are right after each single step.
        self.0.lock()
    }

    /// Learns where a ServicePort is; `None` = it is gone, and its count with it.
    pub fn learn(&self, key: &ServiceKey, port: Option<&ServicePort>) {
        let mut counts = self.lock();
        let frontends = port.map(frontends).unwrap_or_default();
        let Some((known, mut before)) = counts.ports.remove_entry(key) else {
            if port.is_some() {
                counts.add(
                    Arc::new(key.clone()),
                    Port {
                        frontends,
                        connections: 0,
                    },
                );
            }
            return;
        };
        for place in std::mem::take(&mut before.frontends) {
            // Another ServicePort may have taken the place.
            if let Entry::Occupied(held) = counts.frontends.entry(place)
                && *held.get() == known
            {
                held.remove();
            }
        }
        if port.is_some() {
            counts.add(
                known,
                Port {
                    frontends,
                    ..before
                },
            );
        }
    }

    /// Forgets the ServicePorts of a family that are not among these.
    pub(crate) fn keep(&self, family: Family, keys: &HashSet<ServiceKey>) {
        let gone: Vec<ServiceKey> = {
            let counts = self.lock();
            counts
                .ports
                .keys()
                .filter(|key| key.family == family)
                .filter(|key| !keys.contains(&***key))
                .map(|key| ServiceKey::clone(key))
                .collect()
        };
        gone.iter().for_each(|key| self.learn(key, None));
    }

    /// Returns the number of connections of each ServicePort that has had some, and the number of losses.
    pub(crate) fn read(&self) -> (Vec<(Arc<ServiceKey>, u64)>, u64) {
        let counts = self.lock();
        let some = counts
            .ports
            .iter()
            .filter(|(_, port)| port.connections > 0)
            .map(|(key, port)| (Arc::clone(key), port.connections));
        (some.collect(), counts.losses)
    }

    /// Returns the edges of the ServicePorts that are wanted, since a time ago; `None` = edges are not counted.
    pub fn edges(&self, ago: Duration, wanted: impl Fn(&ServiceKey) -> bool) -> Option<EdgeSums> {
        let mut counts = self.lock();
        let (edges, start) = counts.edges.as_mut()?;
        Some(edges.sums(start.elapsed(), ago, wanted))
    }

    /// Returns the reason why nothing is counted any more, if there is one.
    pub(crate) fn failure(&self) -> Option<String> {
        self.lock().failure.clone()
    }

    /// Counts what the kernel reports, until the agent ends.
    pub async fn follow(self: Arc<Self>, mut reports: Beginnings) {
        tokio::select! {
            ended = self.try_follow(&mut reports) => self.end(ended),
            () = self.watch_setting(events_are_off) => {}
        }
    }

    /// Keeps the reason why nothing is counted any more.
    pub(crate) fn end(&self, ended: Result<(), String>) {
        if let Err(error) = ended {
            tracing::warn!(%error, "connections of Services are not counted any more: restart the agent");
            self.lock().failure = Some(error);
        }
    }

    /// Records each minute in which the kernel is set to report nothing. No report says so.
    async fn watch_setting(&self, is_off: impl Fn() -> bool) {
        loop {
            tokio::time::sleep(EVENTS_PAUSE).await;
            if is_off() {
                self.lock().lose();
            }
        }
    }

    /// A socket that is watched wakes the agent for each report, so it is watched only while none come.
    async fn try_follow(&self, reports: &mut Beginnings) -> Result<(), String> {
        let mut socket = reports.readiness().map_err(|error| error.to_string())?;
        loop {
            socket = readable(socket).await.map_err(|error| error.to_string())?;
            let mut any = true;
            while any {
                any = self.read_all(reports).await;
                tokio::time::sleep(PAUSE).await;
            }
        }
    }

    /// Counts everything that waits; returns whether that was anything.
    async fn read_all(&self, reports: &mut Beginnings) -> bool {
        let mut any = false;
        loop {
            let (some, more) = self.read_some(reports);
            any |= some;
            if !more {
                return any;
            }
            tokio::task::yield_now().await;
        }
    }

    /// Counts some of what waits; returns whether that was anything, and whether more may wait.
    pub fn read_some(&self, reports: &mut Beginnings) -> (bool, bool) {
        let mut counts = self.lock();
        if let Some((edges, start)) = &mut counts.edges {
            edges.set_time(start.elapsed());
        }
        let mut any = false;
        let (whole, more) = reports.read(|reported| {
            any = true;
            counts.count(&reported);
        });
        if !whole {
            counts.losses += 1;
            counts.lose();
        }
        (any, more)
    }
}

/// Returns whether the kernel of the calling thread's network namespace is set to report no connections.
pub(crate) fn events_are_off() -> bool {
    fs::read_to_string(EVENTS).is_ok_and(|text| text.trim() == "0")
}

/// Returns a socket once something waits there.
async fn readable(socket: OwnedFd) -> io::Result<OwnedFd> {
    #[allow(
        deprecated,
        reason = "its unsafe successor is about descriptors that may be closed or swapped; an OwnedFd is not"
    )]
    let socket = AsyncFd::with_interest(socket, Interest::READABLE)?;
    socket.readable().await?.retain_ready();
    Ok(socket.into_inner())
}

impl ConnectionCounts {
    fn add(&mut self, key: Arc<ServiceKey>, port: Port) {
        for place in &port.frontends {
            self.frontends.insert(*place, Arc::clone(&key));
        }
        self.ports.insert(key, port);
    }

    /// Records for edges that reports are missing.
    fn lose(&mut self) {
        if let Some((edges, start)) = &mut self.edges {
            edges.set_time(start.elapsed());
            edges.lose();
        }
    }

    fn count(&mut self, reported: &Reported) {
        let (protocol, at) = (reported.connection.protocol, reported.connection.to);
        let address = self.frontends.get(&PacketTarget::Address { at, protocol });
        let node_port = PacketTarget::NodePort {
            family: Family::of(at.ip()),
            protocol,
            port: at.port(),
        };
        let Some(key) = address.or_else(|| self.frontends.get(&node_port)) else {
            return;
        };
        if let (None, Some(port)) = (reported.ending, self.ports.get_mut(key)) {
            port.connections += 1;
        }
        if let Some((edges, _)) = &mut self.edges {
            edges.add(key, reported);
        }
    }
}

/// Returns where clients reach a ServicePort.
fn frontends(port: &ServicePort) -> Vec<PacketTarget> {
    let addresses = std::iter::once(&port.cluster_ip)
        .chain(&port.load_balancer_ips)
        .chain(&port.external_ips)
        .copied();
    PacketTarget::of_port(&port.key, addresses, port.port, port.node_port).collect()
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};

    use kplane_dataplane::beginnings::{Ending, Stage, Tracked};
    use kplane_model::Protocol;

    use super::*;

    fn port(name: &str, last: u8) -> ServicePort {
        ServicePort {
            cluster_ip: IpAddr::from([10, 96, 0, last]),
            node_port: Some(30_000 + u16::from(last)),
            ..ServicePort::sample(ServiceKey::sample("shop", name))
        }
    }

    fn count(all: &ServiceConnections, ip: [u8; 4], number: u16) {
        let any = SocketAddr::from(([10, 244, 1, 5], 80));
        let connection = Tracked {
            protocol: Protocol::Tcp,
            client: any,
            to: (ip, number).into(),
            endpoint: any,
            stage: Stage::Unreplied,
            traffic: None,
            began_ns: None,
        };
        for ending in [None, Some(Ending::Over)] {
            all.lock().count(&Reported { connection, ending });
        }
    }

    fn counts(all: &ServiceConnections) -> Vec<(String, u64)> {
        let (counts, _) = all.read();
        counts
            .iter()
            .map(|(key, count)| (key.service.name.to_string(), *count))
            .collect()
    }

    #[test]
    fn connections_count_for_the_holder_of_the_place() {
        let all = ServiceConnections::default();
        let (web, api) = (port("web", 1), port("api", 2));
        all.learn(&web.key, Some(&web));
        all.learn(&api.key, Some(&api));
        count(&all, [10, 96, 0, 1], 80);
        count(&all, [172, 18, 0, 2], 30_001);
        count(&all, [10, 96, 0, 2], 80);
        count(&all, [10, 96, 0, 9], 80);
        assert_eq!(counts(&all), [("api".to_owned(), 1), ("web".to_owned(), 2)]);
        // The address moves, and its count does not.
        let moved = ServicePort {
            cluster_ip: api.cluster_ip,
            ..web.clone()
        };
        all.learn(&moved.key, Some(&moved));
        all.learn(&api.key, None);
        count(&all, [10, 96, 0, 2], 80);
        count(&all, [10, 96, 0, 1], 80);
        assert_eq!(counts(&all), [("web".to_owned(), 3)]);
        all.keep(Family::V4, &HashSet::new());
        assert!(counts(&all).is_empty() && all.lock().frontends.is_empty());
        assert!(all.edges(PAUSE, |_| true).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn minutes_in_which_the_kernel_reports_nothing_are_losses() {
        let all = ServiceConnections::with_edges();
        let lost = || all.edges(PAUSE, |_| true).unwrap().lost;
        let offs = std::cell::RefCell::new(vec![false, true, true, false]);
        let watch = all.watch_setting(|| offs.borrow_mut().pop().unwrap_or_default());
        let ended = tokio::time::timeout(EVENTS_PAUSE * 10, watch).await;
        assert!(ended.is_err());
        assert_eq!((offs.borrow().len(), lost(), all.read().1), (0, 2, 0));
    }
}
