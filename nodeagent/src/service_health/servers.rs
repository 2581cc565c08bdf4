//! The task that owns the listeners.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use kplane_model::DesiredKey;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::sockets::{Addresses, advice, listen};
use super::{Mailbox, ServerKey, Target, Unconnected, body};
use crate::desired::now_ms;
use crate::healthz::Health;
use crate::metrics::Counters;
use crate::report::{Failure, Subject};
use kplane_http::{self as http, Guests};
use kplane_proto::HEALTH_CHECK_PORT;

/// Longest wait before a port that could not be opened is tried again, and before the node's own
/// addresses are read again where they matter.
const RETRY: Duration = Duration::from_secs(5);

/// Least time between two attempts, however often there are syncs.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Most connections of all servers together. Each is answered at once, so only hostile clients have
/// that many.
const MAX_CONNECTIONS: usize = 256;

/// All health check servers of the node. See [`Servers::run`].
#[derive(Debug)]
pub struct Servers {
    mailbox: Arc<Mailbox>,
    report: watch::Sender<Vec<Failure>>,
    addresses: Addresses,
    health: Health,
    counters: Arc<Counters>,
    guests: Arc<Guests>,
    servers: BTreeMap<ServerKey, Server>,
    /// The servers that do not listen everywhere as they should.
    failing: BTreeMap<ServerKey, Failure>,
    /// The addresses to listen on, for each family.
    current: [BTreeSet<IpAddr>; 2],
    tried_at: Option<Instant>,
}

#[derive(Debug)]
struct Server {
    target: Target,
    /// The count that the listeners report.
    local_endpoints: Arc<AtomicU32>,
    listeners: BTreeMap<IpAddr, AbortOnDropHandle<()>>,
}

impl Servers {
    pub(super) fn new(from: Unconnected, health: Health, counters: Arc<Counters>) -> Self {
        Self {
            mailbox: from.mailbox,
            report: from.report,
            addresses: Addresses::default(),
            health,
            counters,
            guests: Guests::new(MAX_CONNECTIONS),
            servers: BTreeMap::new(),
            failing: BTreeMap::new(),
            current: Default::default(),
            tried_at: None,
        }
    }

    /// Applies what the engine publishes, for ever. Dropping the future closes all ports.
    pub async fn run(mut self) {
        let mailbox = self.mailbox.clone();
        loop {
            let moving = self.addresses.is_changing() && !self.servers.is_empty();
            let timer = moving || !self.failing.is_empty();
            tokio::select! {
                () = mailbox.wake.notified() => {}
                () = tokio::time::sleep(RETRY), if timer => {}
            }
            self.step().await;
        }
    }

    async fn step(&mut self) {
        let changes = self.mailbox.take();
        // Ports are closed before others are opened, because a port may pass from Service to
        // Service.
        for (key, new) in &changes {
            self.close_outdated(key, new.as_ref()).await;
        }
        let mut todo = BTreeSet::new();
        let addresses = self.mailbox.addresses();
        let moved = addresses != self.addresses;
        self.addresses = addresses;
        let due = moved || self.tried_at.is_none_or(|at| at.elapsed() >= RETRY_PAUSE);
        if due {
            if self.follow_addresses() {
                todo.extend(self.servers.keys().cloned());
            }
            todo.extend(self.failing.keys().cloned());
            self.tried_at = Some(Instant::now());
        }
        for (key, new) in changes {
            if let Some(target) = new {
                self.put(&key, target);
                todo.insert(key);
            }
        }
        for key in todo {
            self.open(&key).await;
        }
        self.tell();
    }

    /// Closes the ports of a Service that is gone or has another port now.
    async fn close_outdated(&mut self, key: &ServerKey, new: Option<&Target>) {
        let Some(server) = self.servers.get_mut(key) else {
            return;
        };
        if new.is_some_and(|new| new.port == server.target.port) {
            return;
        }
        for (ip, listener) in std::mem::take(&mut server.listeners) {
            close(listener).await;
            tracing::info!(service = %key.1, %ip, port = server.target.port, "closed a health \
                check node port");
        }
        self.failing.remove(key);
        if new.is_none() {
            self.servers.remove(key);
        }
    }

    fn put(&mut self, key: &ServerKey, target: Target) {
        let count = target.local_endpoints;
        match self.servers.get_mut(key) {
            Some(server) => {
                server.local_endpoints.store(count, Ordering::Relaxed);
                server.target = target;
            }
            None => {
                let server = Server {
                    target,
                    local_endpoints: Arc::new(AtomicU32::new(count)),
                    listeners: BTreeMap::new(),
                };
                self.servers.insert(key.clone(), server);
            }
        }
    }

    /// Reads the node's addresses where these matter; returns true if they have changed.
    fn follow_addresses(&mut self) -> bool {
        match self.addresses.current() {
            Ok(current) if current == self.current => false,
            Ok(current) => {
                self.current = current;
                true
            }
            Err(error) => {
                tracing::warn!(%error, "cannot read the node's own addresses; trying again");
                false
            }
        }
    }

    /// Makes a server listen on exactly the addresses that it should.
    async fn open(&mut self, key: &ServerKey) {
        let (family, service) = key;
        let Some(server) = self.servers.get_mut(key) else {
            return;
        };
        let wanted = &self.current[*family as usize];
        let is_gone = |ip: &IpAddr| !wanted.contains(ip);
        let gone: Vec<_> = server.listeners.keys().copied().filter(is_gone).collect();
        for ip in gone {
            if let Some(listener) = server.listeners.remove(&ip) {
                close(listener).await;
            }
        }
        let port = server.target.port;
        let mut problem = wanted.is_empty().then(|| {
            "no address of this node serves node ports of this family: see nodePortAddresses"
                .to_owned()
        });
        for ip in wanted {
            if server.listeners.contains_key(ip) {
                continue;
            }
            match listen(*ip, port) {
                Ok(listener) => {
                    let (service, health) = (service.clone(), self.health.clone());
                    let count = server.local_endpoints.clone();
                    let respond = move |_: &_| {
                        let count = count.load(Ordering::Relaxed);
                        body::answer(&service, count, health.is_healthy())
                    };
                    let guests = self.guests.clone();
                    let task = async move { http::serve(listener, &guests, respond).await };
                    let task = AbortOnDropHandle::new(tokio::spawn(task));
                    server.listeners.insert(*ip, task);
                    tracing::info!(service = %key.1, %ip, port, "opened a health check node port");
                }
                Err(error) => {
                    problem = Some(format!(
                        "cannot listen on {ip}: {error}; {}",
                        advice(&error)
                    ));
                }
            }
        }
        self.note(key, problem);
    }

    /// Records a server's problem, or that it has none.
    fn note(&mut self, key: &ServerKey, problem: Option<String>) {
        let Some(problem) = problem else {
            if self.failing.remove(key).is_some() {
                tracing::info!(service = %key.1, family = %key.0, "a health check node port works \
                    again");
            }
            return;
        };
        self.counters.service_health_failures.add(1);
        let Some(server) = self.servers.get(key) else {
            return;
        };
        let port = server.target.port;
        let reason = format!("{HEALTH_CHECK_PORT}{port}: {problem}");
        let old = self.failing.get(key);
        if old.is_none_or(|old| old.reason != reason) {
            tracing::error!(
                service = %key.1,
                family = %key.0,
                reason,
                "cannot answer a health check, so load balancers treat this node as one without \
                 endpoints; trying again every {RETRY:?}"
            );
        }
        let failure = Failure {
            about: Subject::Object(DesiredKey::Service(server.target.key.clone())),
            reason,
            since_ms: old.map_or_else(now_ms, |old| old.since_ms),
            degraded: true,
        };
        self.failing.insert(key.clone(), failure);
    }

    /// Reports to the engine what fails, if that has changed.
    fn tell(&self) {
        let failing = self.failing.len();
        let open = self.servers.len() - failing;
        self.counters.service_health_open.set(open as u64);
        self.counters.service_health_closed.set(failing as u64);
        self.report.send_if_modified(|reported| {
            let same = reported.len() == failing && reported.iter().eq(self.failing.values());
            if !same {
                *reported = self.failing.values().cloned().collect();
            }
            !same
        });
    }
}

/// Ends a listener, and waits until its port is free.
async fn close(listener: AbortOnDropHandle<()>) {
    listener.abort();
    let _ = listener.await;
}
