//! Many clients of one server, and what they and the server take for a change.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use kplane_rig::histogram::Histogram;
use kplane_rig::usage;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::fleet::DEADLINE;

/// Pause between two changes.
const PAUSE: Duration = Duration::from_millis(200);
/// Time after which the memory of connected clients is read.
const SETTLE: Duration = Duration::from_secs(2);
/// Longest pause before a client connects again.
const RETRY: Duration = Duration::from_secs(1);
/// Interval at which conditions are checked.
pub(super) const LOOK: Duration = Duration::from_millis(2);

/// What a server takes for its clients.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Number of clients.
    pub clients: usize,
    /// Time until all clients were connected.
    pub connected: Duration,
    /// Memory by which the server grew for each client, in bytes.
    pub memory_each: u64,
    /// Time from a change until a client had it.
    pub latencies: Histogram,
    /// CPU time of the server for each message.
    pub cpu_each: Duration,
}

/// One client.
pub(super) trait Client: Send + Sync + 'static {
    /// Connects, says so by [`Crowd::attend`], and says of each message that it came, until the connection ends.
    fn listen(&self, crowd: &Crowd) -> impl Future<Output = Result<()>> + Send;
}

/// The counts that all clients share.
#[derive(Debug, Default)]
pub(super) struct Crowd {
    attending: AtomicUsize,
    arrived: AtomicUsize,
    failed: AtomicUsize,
    /// The error of the last connection that ended.
    error: Mutex<String>,
    published: Mutex<Option<Instant>>,
    latencies: Mutex<Histogram>,
}

/// A client that is connected.
#[derive(Debug)]
pub(super) struct Attending<'a>(&'a Crowd);

impl Drop for Attending<'_> {
    fn drop(&mut self) {
        self.0.attending.fetch_sub(1, Relaxed);
    }
}

impl Crowd {
    /// Counts a client as connected.
    pub(super) fn attend(&self) -> Attending<'_> {
        self.attending.fetch_add(1, Relaxed);
        Attending(self)
    }

    /// Counts messages that a client got.
    pub(super) fn arrive(&self, messages: usize) {
        if messages == 0 {
            return;
        }
        self.arrived.fetch_add(messages, Relaxed);
        let published = *lock(&self.published);
        if let Some(took) = published.map(|at| at.elapsed()) {
            let mut latencies = lock(&self.latencies);
            (0..messages).for_each(|_| latencies.record(took));
        }
    }

    /// Starts clients, which connect again when they are disconnected.
    pub(super) fn start<C: Client>(self: &Arc<Self>, clients: Vec<C>) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        for client in clients {
            let crowd = Arc::clone(self);
            tasks.spawn(async move {
                loop {
                    let end = client.listen(&crowd).await;
                    crowd.failed.fetch_add(1, Relaxed);
                    *lock(&crowd.error) =
                        end.map_or_else(|error| format!("{error:#}"), |()| "end".to_owned());
                    sleep(rand::random_range(Duration::ZERO..RETRY)).await;
                }
            });
        }
        tasks
    }

    /// Waits until so many clients are connected.
    ///
    /// # Errors
    /// They are not within [`DEADLINE`].
    pub(super) async fn gather(&self, clients: usize) -> Result<()> {
        self.until(&self.attending, clients, "clients are connected")
            .await
    }

    /// Connects clients to a server, and makes changes, each of which is a message to each client.
    ///
    /// # Errors
    /// The server cannot bear them.
    pub(super) async fn measure<C: Client>(
        self: &Arc<Self>,
        pid: u32,
        clients: Vec<C>,
        changes: usize,
        mut change: impl AsyncFnMut() -> Result<()>,
    ) -> Result<Measured> {
        let count = clients.len();
        let before = usage::memory(&[pid])?.now;
        let begun = Instant::now();
        let _tasks = self.start(clients);
        self.gather(count).await?;
        let connected = begun.elapsed();
        sleep(SETTLE).await;
        let grown = usage::memory(&[pid])?.now.saturating_sub(before);
        let mut spent = Duration::ZERO;
        for _ in 0..changes {
            sleep(PAUSE).await;
            let cpu = usage::cpu(&[pid])?;
            self.arrived.store(0, Relaxed);
            *lock(&self.published) = Some(Instant::now());
            change().await?;
            self.until(&self.arrived, count, "clients have a change")
                .await?;
            spent += usage::cpu(&[pid])?.saturating_sub(cpu);
        }
        let messages = u32::try_from(changes * count)?;
        Ok(Measured {
            clients: count,
            connected,
            memory_each: grown / count.max(1) as u64,
            latencies: lock(&self.latencies).clone(),
            cpu_each: spent.checked_div(messages).unwrap_or_default(),
        })
    }

    async fn until(&self, count: &AtomicUsize, wanted: usize, what: &str) -> Result<()> {
        let begun = Instant::now();
        while count.load(Relaxed) < wanted {
            if begun.elapsed() > DEADLINE {
                let (count, failed) = (count.load(Relaxed), self.failed.load(Relaxed));
                let time = DEADLINE.as_secs();
                let error = lock(&self.error).clone();
                bail!(
                    "{count} of {wanted} {what} after {time} s; {failed} connections ended: {error}"
                );
            }
            sleep(LOOK).await;
        }
        Ok(())
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
