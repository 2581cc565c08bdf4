//! A file that records what the agent serves, so that the next agent process on the node knows it.
//!
//! ```text
//! Desired --pointers, every few seconds at most--> Keeper's thread --> desired-NODE
//! desired-NODE --at the start--> Desired::restore: the state from which to continue
//! ```
//!
//! Beside it, `suspects-NODE` names what the agent works on, so that its next process knows at what it died.
//!
//! The file has three uses. The agent resumes from it, so that an unchanged state costs no snapshot. The
//! cliff guard compares the first snapshot with it. The agent serves from it while no control plane
//! answers (`engine/offline_start.rs`). Without a usable file the agent works, logs that once, and does not
//! remember earlier objects at its next start.

mod file;
mod format;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kplane_model::{Digest, NodeName, ObjectHash};

pub use self::file::FileError;
use crate::claim::LOCK;
use crate::desired::{SavedState, is_folder};
use kplane_dataplane::chain;
use kplane_dataplane::kernel_setting;
use kplane_dataplane::policy::Tell;

/// Longest wait for the disk at the start and at the end.
const PATIENCE: Duration = Duration::from_secs(5);

/// Time after which a work is noted. Most take less, and cost the disk nothing.
const LONG: Duration = Duration::from_millis(20);

/// The prefix of the names of cache files.
const PREFIX: &str = "desired-";

/// The prefix of the names of the sockets at which agents hand over (`handover.rs`).
pub(crate) const SOCKETS: &str = "proxy-";

/// The prefix of the names of the files that name what agents died at.
const SUSPECTS: &str = "suspects-";

/// The number of bytes of a node's name that a file name contains in full. With its prefix and suffix,
/// the file name stays below the 255 bytes that file systems allow.
const MAX_NAME: usize = 200;

/// The cache file of one agent.
#[derive(Clone, Debug)]
pub struct Cache {
    place: Storage,
    node: NodeName,
    /// The folder from which this node is served; `None` = a control plane or API server.
    source: Option<String>,
}

#[derive(Clone, Debug)]
enum Storage {
    File(PathBuf),
    MemoryFile(MemoryFile),
}

/// The content of a cache file in memory, for simulations.
pub type MemoryFile = Arc<Mutex<Vec<u8>>>;

/// Writes the states that callers hand over.
#[derive(Debug)]
pub struct CheckpointWriter(Output);

#[derive(Debug)]
enum Output {
    /// A thread writes. Callers do not wait for the disk.
    Thread {
        slot: Arc<WriteSlot>,
        ended: Receiver<()>,
    },
    MemoryFile(MemoryFile, NodeName),
}

/// The state to write next. A newer state replaces one that waits.
#[derive(Debug, Default)]
struct WriteSlot {
    state: Mutex<PendingWrite>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct PendingWrite {
    saved: Option<SavedState>,
    /// A text that is not written yet, and its time.
    note: Option<(String, Instant)>,
    /// This is the last state.
    last: bool,
}

/// What to write next.
enum Item {
    SavedState(SavedState),
    Note(String),
}

/// What earlier processes left: what the node served, and at what they died.
#[derive(Debug, Default)]
pub struct Remains {
    /// What the node served; `None` = not known.
    pub saved: Option<SavedState>,
    /// The last text for [`CheckpointWriter::notes`].
    pub suspects: String,
}

impl WriteSlot {
    /// Locks the state. Every step leaves it consistent, so a panic in another thread does not spoil it.
    fn lock(&self) -> MutexGuard<'_, PendingWrite> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, saved: Option<SavedState>, last: bool) {
        let mut pending = self.lock();
        if saved.is_some() {
            pending.saved = saved;
        }
        pending.last |= last;
        self.wake.notify_one();
    }

    fn put_note(&self, note: String) {
        let before = self.lock().note.replace((note, Instant::now()));
        // With a note at hand, the thread looks again by itself.
        if before.is_none() {
            self.wake.notify_one();
        }
    }

    /// Waits for something to write; returns `None` when there will be no more.
    fn next(&self) -> Option<Item> {
        let mut pending = self.lock();
        loop {
            let last = pending.last;
            let is_due = |(_, at): &mut (String, Instant)| last || at.elapsed() >= LONG;
            if let Some((note, _)) = pending.note.take_if(is_due) {
                return Some(Item::Note(note));
            }
            match pending.saved.take() {
                Some(saved) => return Some(Item::SavedState(saved)),
                None if last => return None,
                None => {}
            }
            let patience = pending.note.as_ref().map_or(Duration::MAX, |_| LONG);
            let waited = self.wake.wait_timeout(pending, patience);
            (pending, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Cache {
    /// Creates a cache in a folder. The folder itself is created at the first write.
    pub fn new(folder: &Path, node: NodeName) -> Self {
        let place = Storage::File(folder.join(file_name(PREFIX, &node)));
        Self {
            place,
            node,
            source: None,
        }
    }

    /// Sets the folder from which this node is served. Content from another source is not used.
    #[must_use]
    pub fn of(self, source: Option<String>) -> Self {
        Self { source, ..self }
    }

    /// Creates a cache in memory, which is written at once and without a thread: for simulations.
    pub fn in_memory(content: MemoryFile, node: NodeName) -> Self {
        let place = Storage::MemoryFile(content);
        Self {
            place,
            node,
            source: None,
        }
    }

    /// Deletes the files of all nodes in a folder, so that a cleanup is not undone by the next
    /// agent. Returns the number of files deleted.
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

    /// Returns the text that remembers kernel settings, if there is one.
    pub fn kernel_settings(folder: &Path) -> String {
        file::read_text(&folder.join(kernel_setting::FILE))
    }

    /// Returns the files of all nodes in a folder, and the sockets at which agents waited for their successors.
    ///
    /// # Errors
    /// The folder exists and cannot be read.
    pub fn files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for prefix in [PREFIX, SUSPECTS, SOCKETS, kernel_setting::FILE, LOCK] {
            files.extend(named(folder, prefix)?);
        }
        Ok(files)
    }

    /// Reads the content of a file that the agent of this node wrote.
    ///
    /// # Errors
    /// The reason why the content cannot be used.
    pub fn parse(content: Vec<u8>, node: &str) -> Result<SavedState, FileError> {
        Ok(format::decode(content, node)?.saved)
    }

    /// Appends the checksum to content that was made by hand, for tests.
    pub fn seal(content: &mut Vec<u8>) {
        format::seal(content);
    }

    /// Starts the thread and reads the files.
    ///
    /// # Errors
    /// The thread could not be started.
    pub fn start(self) -> std::io::Result<(CheckpointWriter, Remains)> {
        match self.place {
            Storage::File(path) => Disk {
                path,
                node: self.node,
                source: self.source,
            }
            .start(),
            Storage::MemoryFile(content) => {
                let bytes = lock(&content).clone();
                let known = format::decode(bytes, &self.node).ok();
                let writer = CheckpointWriter(Output::MemoryFile(content, self.node));
                let left = Remains {
                    saved: known.map(|loaded| loaded.saved),
                    ..Remains::default()
                };
                Ok((writer, left))
            }
        }
    }
}

/// A cache file on a disk.
struct Disk {
    path: PathBuf,
    node: NodeName,
    source: Option<String>,
}

impl Disk {
    fn start(self) -> std::io::Result<(CheckpointWriter, Remains)> {
        let slot = Arc::<WriteSlot>::default();
        let theirs = slot.clone();
        let (reported, memory) = sync_channel(1);
        let (ends, ended) = sync_channel(1);
        let path = self.path.clone();
        let thread = move || {
            let suspects = file::read_text(&self.suspects());
            let left = Remains {
                suspects: suspects.clone(),
                saved: self.load(),
            };
            // The receiver is gone if the disk took too long.
            let _ = reported.send(left);
            self.write_all(&theirs, suspects);
            drop(ends);
        };
        std::thread::Builder::new().name("cache".to_owned()).spawn(thread)?;
        let left = memory.recv_timeout(PATIENCE).unwrap_or_else(|_| {
            let file = path.display();
            tracing::warn!(%file, "cannot read the cache within {PATIENCE:?}; the agent starts \
                                   without it");
            Remains::default()
        });
        Ok((CheckpointWriter(Output::Thread { slot, ended }), left))
    }

    fn suspects(&self) -> PathBuf {
        self.path.with_file_name(file_name(SUSPECTS, &self.node))
    }

    fn load(&self) -> Option<SavedState> {
        let started = Instant::now();
        let file = self.path.display();
        let loaded = file::read(&self.path).and_then(|content| {
            let mut loaded = format::decode(content.bytes, &self.node)?;
            let source = &*loaded.saved.cluster;
            let is_ours = match &self.source {
                Some(folder) => *source == **folder,
                None => !is_folder(source),
            };
            if !is_ours {
                return Err(FileError::OtherSource(source.to_owned()));
            }
            if loaded.saved.confirmed_ms == 0 {
                loaded.saved.confirmed_ms = content.written_ms;
            }
            Ok(loaded)
        });
        match loaded {
            Ok(format::CacheContent { saved, skipped }) => {
                tracing::info!(
                    %file,
                    objects = saved.objects.len(),
                    skipped,
                    took = ?started.elapsed(),
                    "read the cache of what this node served"
                );
                Some(saved)
            }
            Err(FileError::Absent) => None,
            Err(error) => {
                let error = chain(&error);
                tracing::warn!(
                    %file, error,
                    "cannot use the cache of what this node served; the agent will replace the \
                     file"
                );
                None
            }
        }
    }

    fn write_all(&self, slot: &WriteSlot, mut noted: String) {
        let file = self.path.display();
        let suspects = self.suspects();
        let mut complained = false;
        while let Some(item) = slot.next() {
            let saved = match item {
                Item::SavedState(saved) => saved,
                Item::Note(note) => {
                    if note != noted {
                        // Without notes, no death is explained: nothing else fails.
                        let _ = file::put(&suspects, &note);
                        noted = note;
                    }
                    continue;
                }
            };
            let started = Instant::now();
            let written = file::replace(&self.path, |to| format::encode(to, &self.node, &saved));
            match written {
                Ok(bytes) => {
                    let (objects, took) = (saved.objects.len(), started.elapsed());
                    tracing::debug!(%file, objects, bytes, ?took, "wrote the cache");
                    complained = false;
                }
                Err(error) if complained => {
                    tracing::debug!(%file, error = chain(&error), "still cannot write the cache");
                }
                Err(error) => {
                    tracing::warn!(
                        %file, error = chain(&error),
                        "cannot write the cache; the node is still served, but the next start will \
                         not restore its Services. Trying again with each change"
                    );
                    complained = true;
                }
            }
        }
    }
}

impl CheckpointWriter {
    /// Returns a way to write what the agent works on, in place of what was written before; `None` = there is no disk.
    pub fn notes(&self) -> Option<Tell> {
        let Output::Thread { slot, .. } = &self.0 else {
            return None;
        };
        let slot = Arc::clone(slot);
        Some(Box::new(move |note| slot.put_note(note)))
    }

    /// Hands over a state to write.
    pub fn take(&self, saved: SavedState) {
        match &self.0 {
            Output::Thread { slot, .. } => slot.put(Some(saved), false),
            Output::MemoryFile(content, node) => {
                let mut bytes = Vec::new();
                // Memory takes everything.
                let _ = format::encode(&mut bytes, node, &saved);
                *lock(content) = bytes;
            }
        }
    }

    /// Ends the thread and waits until it has written everything, for a few seconds at most.
    pub fn close(&self, last: Option<SavedState>) {
        let Output::Thread { slot, ended } = &self.0 else {
            last.into_iter().for_each(|saved| self.take(saved));
            return;
        };
        slot.put(last, true);
        if ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the cache is still not written after {PATIENCE:?}");
        }
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        if let Output::Thread { slot, ended } = &self.0 {
            slot.put(None, true);
            if std::thread::panicking() {
                // The note of what the engine worked on has to be written before the process ends.
                let _ = ended.recv_timeout(PATIENCE);
            }
        }
    }
}

fn lock(content: &MemoryFile) -> MutexGuard<'_, Vec<u8>> {
    // The content is replaced as a whole.
    content.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the files in a folder whose names begin with a prefix.
fn named(folder: &Path, prefix: &str) -> std::io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        if name.as_encoded_bytes().starts_with(prefix.as_bytes()) {
            files.push(entry.path());
        }
    }
    Ok(files)
}

/// Returns the name of a node's file. Names that are too long for a file name end with a hash.
fn file_name(prefix: &str, node: &str) -> String {
    if node.len() <= MAX_NAME {
        return format!("{prefix}{node}");
    }
    let mut hash = Digest::default();
    hash.add(ObjectHash::of(node.as_bytes()));
    let beginning = &node[..node.floor_char_boundary(MAX_NAME)];
    format!("{prefix}{beginning}-{hash}")
}
