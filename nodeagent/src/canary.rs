//! The canary: a Service whose only endpoint on each node is the agent itself. A connection to it takes the way of a
//! pod's connection, so an answer proves that the node's data path works. The control plane takes a start-up taint away
//! when it has heard of an answer.
//!
//! The engine publishes the addresses that the kernel holds ([`Canary`]); a task of its own connects to them
//! ([`Prober`]). The engine never waits for it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use kplane_model::{Family, Protocol, ServiceKey, ServiceName, ServicePort};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::desired::{Desired, Dirty, now_ms};
use crate::report::{Failure, Subject};

/// Interval between two probes while the canary answers.
const INTERVAL: Duration = Duration::from_secs(5);
/// Pause after a probe without an answer.
const AGAIN: Duration = Duration::from_secs(1);
/// Maximum time for an answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Number of probes in a row without an answer after which the data path counts as silent: one lost packet is no news.
const MISSES: u32 = 3;
/// The request. Any status will do: an unhealthy agent answers through a data path that works.
const REQUEST: &[u8] = b"GET /livez HTTP/1.1\r\nhost: canary\r\nconnection: close\r\n\r\n";
/// The beginning of an answer.
const ANSWER: &[u8] = b"HTTP/";

/// The addresses of the canary that the kernel holds; `None` before the kernel holds a complete state.
type CanaryAddresses = Option<BTreeMap<ServiceKey, SocketAddr>>;

/// What the latest probes say of the data path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Verdict {
    /// There were not enough probes yet.
    #[default]
    Unknown,
    /// The canary answers on all of its addresses.
    Answers,
    /// It does not.
    Silent {
        /// The problem, human-readable.
        reason: String,
        /// The time since when, milliseconds since 1970.
        since_ms: u64,
    },
}

/// The engine's side: publishes the addresses, and reports the verdict.
#[derive(Debug)]
pub struct Canary {
    service: ServiceName,
    addresses: watch::Sender<CanaryAddresses>,
    verdict: watch::Receiver<Verdict>,
}

/// The task that connects to the canary.
#[derive(Debug)]
pub struct Prober {
    service: ServiceName,
    addresses: watch::Receiver<CanaryAddresses>,
    verdict: watch::Sender<Verdict>,
    misses: u32,
}

/// Creates both sides of a canary.
pub fn channel(service: ServiceName) -> (Canary, Prober) {
    let (addresses, held) = watch::channel(None);
    let (verdict, reported) = watch::channel(Verdict::Unknown);
    let follower = Canary {
        service: service.clone(),
        addresses,
        verdict: reported,
    };
    let prober = Prober {
        service,
        addresses: held,
        verdict,
        misses: 0,
    };
    (follower, prober)
}

impl Canary {
    /// Notes that the kernel holds the desired state of a family; `dirty` is what has changed, `None` = anything.
    pub(crate) fn programmed(
        &self,
        family: Family,
        desired: &Desired,
        dirty: Option<&Dirty>,
        is_refused: impl Fn(&ServiceName) -> bool,
    ) {
        let ours = |key: &ServiceKey| key.family == family && key.service == self.service;
        if dirty.is_some_and(|dirty| !dirty.services.iter().any(ours)) {
            return;
        }
        let port = |port: &ServicePort| {
            (
                port.key.clone(),
                SocketAddr::new(port.cluster_ip, port.port),
            )
        };
        let held = self.addresses.borrow().clone().unwrap_or_default();
        let mut next = held.clone();
        match dirty {
            Some(dirty) => {
                for key in dirty.services.iter().filter(|key| ours(key)) {
                    next.remove(key);
                    next.extend(desired.service(key).map(|view| port(&view.0.port)));
                }
            }
            None => {
                next.retain(|key, _| key.family != family);
                let ports = desired.services(family).map(|view| &view.0.port);
                next.extend(ports.filter(|p| ours(&p.key)).map(port));
            }
        }
        next.retain(|key, _| key.protocol == Protocol::Tcp && !is_refused(&key.service));
        if next != held || self.addresses.borrow().is_none() {
            self.addresses.send_replace(Some(next));
        }
    }

    /// Returns whether the canary answers; `None` while that is not known.
    pub(crate) fn answers(&self) -> Option<bool> {
        match *self.verdict.borrow() {
            Verdict::Unknown => None,
            Verdict::Answers => Some(true),
            Verdict::Silent { .. } => Some(false),
        }
    }

    /// Returns the problem of a node whose canary does not answer.
    pub(crate) fn failure(&self) -> Option<Failure> {
        match &*self.verdict.borrow() {
            Verdict::Silent { reason, since_ms } => Some(Failure {
                about: Subject::Node,
                reason: reason.clone(),
                since_ms: *since_ms,
                degraded: true,
            }),
            _ => None,
        }
    }

    /// Waits for another verdict.
    pub(crate) async fn changed(&mut self) {
        if self.verdict.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Prober {
    /// Probes until the agent ends.
    pub async fn run(mut self) {
        loop {
            let addresses = self.addresses.borrow_and_update().clone();
            let pause = match addresses {
                Some(addresses) => {
                    let outcome = self.probe(addresses.into_values().collect()).await;
                    self.note(outcome)
                }
                None => INTERVAL,
            };
            tokio::select! {
                () = sleep(pause) => {}
                changed = self.addresses.changed() => if changed.is_err() {
                    return;
                },
            }
        }
    }

    /// Connects to all addresses.
    async fn probe(&self, addresses: Vec<SocketAddr>) -> Result<(), String> {
        if addresses.is_empty() {
            return Err(format!(
                "the canary Service {} is not in the kernel: see that it exists and has a TCP port, or leave \
                 --canary-service out",
                self.service
            ));
        }
        for address in addresses {
            let silence = match timeout(PATIENCE, ask(address)).await {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no answer within {PATIENCE:?}"),
            };
            return Err(format!(
                "the node's data path does not work: the canary Service {} at {address} does not lead to this agent \
                 ({silence}). See whether its port for health checks is reachable, and what other programs do to packets",
                self.service
            ));
        }
        Ok(())
    }

    /// Counts the outcome of a probe; returns the pause before the next one.
    fn note(&mut self, outcome: Result<(), String>) -> Duration {
        let Err(reason) = outcome else {
            self.misses = 0;
            if self.replace(Verdict::Answers) {
                info!(service = %self.service, "the data path answers");
            }
            return INTERVAL;
        };
        self.misses = self.misses.saturating_add(1);
        if self.misses >= MISSES {
            let since = match &*self.verdict.borrow() {
                Verdict::Silent { since_ms, .. } => Some(*since_ms),
                _ => None,
            };
            let since_ms = since.unwrap_or_else(now_ms);
            let text = reason.clone();
            if self.replace(Verdict::Silent { reason, since_ms }) && since.is_none() {
                warn!(service = %self.service, "{text}");
            }
        }
        AGAIN
    }

    /// Replaces the verdict; returns whether it is another one.
    fn replace(&self, verdict: Verdict) -> bool {
        self.verdict.send_if_modified(|last| {
            let changed = *last != verdict;
            *last = verdict;
            changed
        })
    }
}

/// Connects, and reads the beginning of an answer.
async fn ask(address: SocketAddr) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(REQUEST).await?;
    let mut answer = [0; ANSWER.len()];
    stream.read_exact(&mut answer).await?;
    if answer == ANSWER {
        Ok(())
    } else {
        Err(std::io::Error::other("another program answers"))
    }
}

#[cfg(test)]
mod tests;
