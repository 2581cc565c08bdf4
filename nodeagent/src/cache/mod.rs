//! What the agent serves, written down: the next process of the node knows what was there.
//!
//! ```text
//! Desired --pointers, every few seconds at most--> Keeper's thread --> desired-NODE
//! desired-NODE --at the start--> Desired::remember: the first snapshot is compared with it
//! ```
//!
//! Nothing is served from it: it is a memory of names for the cliff guard, and of what these names
//! stand for. The agent works without it, says so once, and forgets at its next start what it had.

mod file;
mod format;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kplane_model::{DesiredObject, Digest, NodeName, ObjectHash};

use self::file::FileError;
use crate::desired::{Position, Remembered};
use kplane_dataplane::chain;

/// Longest wait for the disk at the start and at the end.
const PATIENCE: Duration = Duration::from_secs(5);

/// Begins the names of files.
const PREFIX: &str = "desired-";

/// Bytes of a node's name that a file's name has in full: with what is around it, it stays below the
/// 255 bytes that file systems allow.
const MAX_NAME: usize = 200;

/// Where one agent writes down what it serves.
#[derive(Clone, Debug)]
pub struct Cache {
    path: PathBuf,
    node: NodeName,
}

/// Everything that an agent serves at one moment.
#[derive(Clone, Debug)]
pub struct Picture {
    /// The last update that it took.
    pub position: Position,
    /// Of what the control plane said then: what is held is no part of it.
    pub digest: Digest,
    /// All objects.
    pub objects: Vec<Remembered>,
}

/// The thread that writes. Whoever hands it a picture does not wait for the disk.
#[derive(Debug)]
pub struct Keeper {
    desk: Arc<Desk>,
    ended: Receiver<()>,
}

/// What is to be written: a newer picture replaces one that waits.
#[derive(Debug, Default)]
struct Desk {
    state: Mutex<Paper>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct Paper {
    picture: Option<Picture>,
    /// Nothing comes after it.
    last: bool,
}

impl Desk {
    /// The state is whole after every step, so that a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, Paper> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, picture: Option<Picture>, last: bool) {
        let mut paper = self.lock();
        if picture.is_some() {
            paper.picture = picture;
        }
        paper.last |= last;
        self.wake.notify_one();
    }

    /// Waits for a picture; `None` when there will be no more.
    fn next(&self) -> Option<Picture> {
        let mut paper = self.lock();
        loop {
            match paper.picture.take() {
                None if !paper.last => {
                    let waited = self.wake.wait(paper);
                    paper = waited.unwrap_or_else(PoisonError::into_inner);
                }
                picture => return picture,
            }
        }
    }
}

/// The objects of an earlier process.
pub type Memory = Vec<Arc<DesiredObject>>;

impl Cache {
    /// In a folder, which is made when there is something to write.
    #[must_use]
    pub fn new(folder: &Path, node: NodeName) -> Self {
        let path = folder.join(file_name(&node));
        Self { path, node }
    }

    /// Deletes what agents wrote down in a folder, of whichever node: who removes the rules wants them to
    /// stay away. Returns how many files are gone.
    ///
    /// # Errors
    /// The first file that cannot be deleted, or the folder if it cannot be read.
    pub fn forget(folder: &Path) -> std::io::Result<usize> {
        let files = Self::files(folder)?;
        for file in &files {
            std::fs::remove_file(file)?;
        }
        Ok(files.len())
    }

    /// What agents wrote down in a folder.
    ///
    /// # Errors
    /// The folder is there and cannot be read.
    pub fn files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
        let entries = match std::fs::read_dir(folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut files = Vec::new();
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            if name.as_encoded_bytes().starts_with(PREFIX.as_bytes()) {
                files.push(entry.path());
            }
        }
        Ok(files)
    }

    /// Starts the thread, and reads what there is; `None` if that is nothing of use.
    ///
    /// # Errors
    /// That the thread could not be started.
    pub fn start(self) -> std::io::Result<(Keeper, Option<Memory>)> {
        let desk = Arc::<Desk>::default();
        let theirs = desk.clone();
        let (told, memory) = sync_channel(1);
        let (ends, ended) = sync_channel(1);
        let path = self.path.clone();
        let thread = move || {
            // Nobody waits any more if the disk took too long.
            let _ = told.send(self.load());
            self.write_all(&theirs);
            drop(ends);
        };
        std::thread::Builder::new()
            .name("cache".to_owned())
            .spawn(thread)?;
        let memory = memory.recv_timeout(PATIENCE).unwrap_or_else(|_| {
            let file = path.display();
            tracing::warn!(%file, "not read within {PATIENCE:?}: the agent starts without memory");
            None
        });
        Ok((Keeper { desk, ended }, memory))
    }

    fn load(&self) -> Option<Memory> {
        let started = Instant::now();
        let file = self.path.display();
        let loaded = file::read(&self.path).and_then(|bytes| format::decode(bytes, &self.node));
        match loaded {
            Ok(loaded) => {
                tracing::info!(
                    %file,
                    objects = loaded.objects.len(),
                    skipped = loaded.skipped,
                    took = ?started.elapsed(),
                    "remembering what this node served"
                );
                Some(loaded.objects)
            }
            Err(FileError::Absent) => None,
            Err(error) => {
                let error = chain(&error);
                tracing::warn!(
                    %file, error,
                    "what this node served before is not known: the file is of no use and will be \
                     replaced"
                );
                None
            }
        }
    }

    fn write_all(&self, desk: &Desk) {
        let file = self.path.display();
        let mut complained = false;
        while let Some(picture) = desk.next() {
            let started = Instant::now();
            let written = file::replace(&self.path, |to| format::encode(to, &self.node, &picture));
            match written {
                Ok(bytes) => {
                    let (objects, took) = (picture.objects.len(), started.elapsed());
                    tracing::debug!(%file, objects, bytes, ?took, "wrote down what is served");
                    complained = false;
                }
                Err(error) if complained => {
                    tracing::debug!(%file, error = chain(&error), "still cannot be written");
                }
                Err(error) => {
                    tracing::warn!(
                        %file, error = chain(&error),
                        "cannot write down what this node serves: it is served all the same, but \
                         forgotten at the next start. Tried again with each change"
                    );
                    complained = true;
                }
            }
        }
    }
}

impl Keeper {
    /// Hands a picture over.
    pub fn take(&self, picture: Picture) {
        self.desk.put(Some(picture), false);
    }

    /// Ends the thread and waits until it has written everything, a few seconds at most.
    pub fn close(&self, last: Option<Picture>) {
        self.desk.put(last, true);
        if self.ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("what this node serves is not written down yet after {PATIENCE:?}");
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.desk.put(None, true);
    }
}

/// `desired-NODE`; names that are too long for a file end with a hash.
fn file_name(node: &str) -> String {
    if node.len() <= MAX_NAME {
        return format!("{PREFIX}{node}");
    }
    let mut hash = Digest::default();
    hash.add(ObjectHash::of(node.as_bytes()));
    let beginning = &node[..node.floor_char_boundary(MAX_NAME)];
    format!("{PREFIX}{beginning}-{hash}")
}
