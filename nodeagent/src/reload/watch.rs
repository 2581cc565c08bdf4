//! Notices that a file may have changed: it was written, replaced by a rename, or one of the
//! symbolic links on the way to it was swapped, as in the volume of a ConfigMap.

use std::ffi::OsString;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use futures_util::StreamExt;
use inotify::{EventMask, EventStream, Inotify, WatchDescriptor, WatchMask, Watches};
use tokio::time::{Instant, timeout_at};

/// Most symbolic links that are followed, as in the kernel.
const MAX_LINKS: usize = 40;

/// Time without events after which a change counts as complete: editors write, rename and remove
/// within a millisecond.
const QUIET: Duration = Duration::from_millis(20);

/// Longest wait for a change to be complete.
const GATHER_AT_MOST: Duration = Duration::from_millis(500);

/// Size of the buffer for events in bytes. An event with a name of 255 bytes takes 272, so it holds
/// 60.
const EVENT_BUFFER_BYTES: usize = 16 << 10;

/// Watches every folder on the way to a file.
pub(super) struct FileWatch {
    path: PathBuf,
    watches: Watches,
    events: EventStream<Vec<u8>>,
    /// The watched folders, the file itself, and the names in the folders that matter.
    watched: Vec<(WatchDescriptor, Entry)>,
}

/// A name in a folder on the way to the file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    folder: PathBuf,
    /// The name; empty for the file itself, which may be mounted alone and written from elsewhere.
    name: OsString,
}

impl FileWatch {
    /// Begins to watch.
    ///
    /// # Errors
    /// The kernel's limits on watches.
    pub(super) fn new(path: &Path) -> io::Result<Self> {
        let inotify = Inotify::init()?;
        let watches = inotify.watches();
        let events = inotify.into_event_stream(vec![0; EVENT_BUFFER_BYTES])?;
        let mut watch = Self {
            path: std::path::absolute(path)?,
            watches,
            events,
            watched: Vec::new(),
        };
        watch.follow()?;
        Ok(watch)
    }

    /// Waits until the file may have changed.
    pub(super) async fn changed(&mut self) {
        while !self.next_matters().await {}
        let deadline = Instant::now() + GATHER_AT_MOST;
        let mut quiet = Instant::now() + QUIET;
        while let Ok(matters) = timeout_at(deadline.min(quiet), self.next_matters()).await {
            if matters {
                quiet = Instant::now() + QUIET;
            }
        }
        if let Err(error) = self.follow() {
            tracing::debug!(%error, path = %self.path.display(), "cannot watch all folders and \
                links on the path");
        }
    }

    /// Returns whether the next event concerns the file or the way to it.
    async fn next_matters(&mut self) -> bool {
        match self.events.next().await {
            Some(Ok(event)) => {
                let name = event.name.unwrap_or_default();
                let overflow = event.mask.contains(EventMask::Q_OVERFLOW);
                let is_it = |(descriptor, entry): &(WatchDescriptor, Entry)| {
                    *descriptor == event.wd && (name.is_empty() || name == entry.name)
                };
                overflow || self.watched.iter().any(is_it)
            }
            // Events may be lost, so an error counts as a change.
            Some(Err(_)) => true,
            None => std::future::pending().await,
        }
    }

    /// Watches the folders that are on the way now, and no others.
    fn follow(&mut self) -> io::Result<()> {
        let before = std::mem::take(&mut self.watched);
        let mut result = Ok(());
        for entry in on_the_way(&self.path) {
            // For the file itself the name is empty, and the folder is the file.
            match self.watches.add(&entry.folder, mask()) {
                Ok(descriptor) => self.watched.push((descriptor, entry)),
                // The file may be created later. The folders above it are watched for that.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => result = Err(error),
            }
        }
        for (descriptor, _) in before {
            if !self.watched.iter().any(|(now, _)| *now == descriptor) {
                // The watch is gone already if the folder is.
                let _ = self.watches.remove(descriptor);
            }
        }
        result
    }
}

fn mask() -> WatchMask {
    WatchMask::CLOSE_WRITE
        | WatchMask::CREATE
        | WatchMask::DELETE
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE
        | WatchMask::MOVE_SELF
}

/// Returns every name on the way to a file, links followed, and the file itself.
fn on_the_way(path: &Path) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut links = 0;
    let mut rest = components(path);
    let mut folder = PathBuf::from("/");
    while let Some(name) = rest.pop() {
        if name == ".." {
            folder.pop();
            continue;
        }
        let entry = folder.join(&name);
        entries.push(Entry {
            folder: folder.clone(),
            name,
        });
        match std::fs::read_link(&entry) {
            Ok(target) if links < MAX_LINKS => {
                links += 1;
                if target.is_absolute() {
                    folder = PathBuf::from("/");
                }
                rest.extend(components(&target));
            }
            _ => folder = entry,
        }
    }
    entries.push(Entry {
        folder,
        name: OsString::new(),
    });
    entries
}

/// Returns the names on a path, the last one first.
fn components(path: &Path) -> Vec<OsString> {
    path.components()
        .rev()
        .filter_map(|part| match part {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some(OsString::from("..")),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
        })
        .collect()
}

#[cfg(test)]
mod tests;
