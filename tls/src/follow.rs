//! Configurations that follow their files.
//!
//! The files are read again at an interval, whatever replaced them: an editor, a swapped link of a projected
//! volume, cert-manager. Certificates last for hours at least, so seconds are early enough.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{oneshot, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{MissedTickBehavior, interval};

use crate::files::{FileError, Files, read};

/// Interval at which the files are read.
pub const INTERVAL: Duration = Duration::from_secs(5);

/// A configuration that follows its files, or what a [`Publisher`] says. Clones share one reader, which ends with the
/// last of them.
#[derive(Debug)]
pub struct Follower<C> {
    current: watch::Receiver<Latest<C>>,
    reader: Option<Arc<Reader>>,
}

/// The owner of a configuration that comes from elsewhere than files.
#[derive(Debug)]
pub struct Publisher<C> {
    first: Option<oneshot::Sender<Follower<C>>>,
    current: Option<watch::Sender<Latest<C>>>,
}

/// A configuration, and the time at which its certificate ends.
#[derive(Debug)]
struct Latest<C> {
    config: Arc<C>,
    ends_at: Option<SystemTime>,
}

/// Creates a publisher, and a channel that delivers its follower together with the first configuration.
pub fn published<C>() -> (Publisher<C>, oneshot::Receiver<Follower<C>>) {
    let (first, follower) = oneshot::channel();
    let publisher = Publisher {
        first: Some(first),
        current: None,
    };
    (publisher, follower)
}

impl<C> Publisher<C> {
    /// Replaces the configuration. `ends_at` is the time at which its certificate ends, if it has one.
    pub fn publish(&mut self, config: Arc<C>, ends_at: Option<SystemTime>) {
        let latest = Latest { config, ends_at };
        if let Some(current) = &self.current {
            current.send_replace(latest);
            return;
        }
        let (publish, current) = watch::channel(latest);
        self.current = Some(publish);
        let follower = Follower {
            current,
            reader: None,
        };
        if let Some(first) = self.first.take() {
            // Nobody waits any more when the program ends.
            let _ = first.send(follower);
        }
    }
}

/// The task that reads the files.
#[derive(Debug)]
struct Reader(JoinHandle<()>);

impl Drop for Reader {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl<C> Clone for Follower<C> {
    fn clone(&self) -> Self {
        Self {
            current: self.current.clone(),
            reader: self.reader.clone(),
        }
    }
}

impl<C: Send + Sync + 'static> Follower<C> {
    /// Reads the files, and goes on to follow them. Must be called on a runtime. `purpose` names the
    /// configuration in the log.
    ///
    /// # Errors
    /// [`FileError`] when the files cannot be used now. Later, files that cannot be used change nothing.
    pub fn start<F>(files: F, purpose: &'static str) -> Result<Self, FileError>
    where
        F: Files<Config = C>,
    {
        let seen = hashes(&files)?;
        let (publish, current) = watch::channel(latest(&files)?);
        let reader = tokio::spawn(follow(files, seen, publish, purpose));
        Ok(Self {
            current,
            reader: Some(Arc::new(Reader(reader))),
        })
    }

    /// Returns the latest configuration.
    pub fn current(&self) -> Arc<C> {
        Arc::clone(&self.current.borrow().config)
    }

    /// Returns the time at which the certificate of the latest configuration ends, if it has one.
    pub fn ends_at(&self) -> Option<SystemTime> {
        self.current.borrow().ends_at
    }
}

/// Returns a hash of the bytes of each file. Keys themselves are not kept.
fn hashes<F: Files>(files: &F) -> Result<Vec<u64>, FileError> {
    let hash = |file: &Path| {
        let mut hasher = DefaultHasher::new();
        read(file)?.hash(&mut hasher);
        Ok(hasher.finish())
    };
    files.paths().into_iter().map(hash).collect()
}

async fn follow<F: Files>(
    files: F,
    mut seen: Vec<u64>,
    publish: watch::Sender<Latest<F::Config>>,
    purpose: &'static str,
) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick comes at once.
    ticks.tick().await;
    let mut said = String::new();
    loop {
        ticks.tick().await;
        let (again, before) = (files.clone(), std::mem::take(&mut seen));
        let read = spawn_blocking(move || {
            let outcome = changed(&again, &before);
            (before, outcome)
        });
        let Ok((before, outcome)) = read.await else {
            // The runtime is ending.
            return;
        };
        seen = before;
        match outcome {
            Ok(None) => said.clear(),
            Ok(Some((now, config))) => {
                seen = now;
                said.clear();
                tracing::info!(purpose, "read the changed files; new connections use them");
                publish.send_replace(config);
            }
            Err(error) => {
                let text = error.to_string();
                if said != text {
                    tracing::warn!(purpose, %error, "cannot use the changed files; their previous content stays in use");
                    said = text;
                }
            }
        }
    }
}

/// The result of a change of files: their hashes, and the configuration.
type Change<C> = (Vec<u64>, Latest<C>);

/// Returns the new configuration if the files have other bytes now.
fn changed<F: Files>(files: &F, seen: &[u64]) -> Result<Option<Change<F::Config>>, FileError> {
    let now = hashes(files)?;
    if now == seen {
        return Ok(None);
    }
    Ok(Some((now, latest(files)?)))
}

/// Reads the files.
fn latest<F: Files>(files: &F) -> Result<Latest<F::Config>, FileError> {
    Ok(Latest {
        config: files.load()?,
        ends_at: files.ends_at(),
    })
}
