//! The view of a watched folder: the files that have changed, the files that are being written, and
//! the content read so far. Synchronous; [`super::watch`] feeds it with events.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};

use inotify::{EventMask, EventOwned, WatchDescriptor, WatchMask, Watches};
use kplane_model::{Issue, ObjectRef, Reason};

use super::catalog::{Catalog, FileChange, keep};
use super::disk::{Disk, Question};
use super::folder::{Listing, Root, Stamp, display_name};
use crate::source::{Event, SourceError};

/// Contents read from files; not believed until it is known that no program wrote meanwhile.
pub(super) type FileReads = Vec<(PathBuf, Option<Stamp>, FileChange)>;

/// The view of a watched folder.
#[derive(Debug)]
pub(super) struct FolderView {
    root: Root,
    pub(super) catalog: Catalog,
    watches: Watches,
    /// Watched folders by their watch; paths are relative to the root.
    watched: HashMap<WatchDescriptor, PathBuf>,
    /// Watch of the root's parent folder, to detect that the root comes back.
    parent: Option<WatchDescriptor>,
    /// Files that a program is writing at the moment.
    writing: BTreeSet<PathBuf>,
    pending: PendingEvents,
    /// Files that were read, with their stamps at that time.
    stamps: BTreeMap<PathBuf, Option<Stamp>>,
    /// Device and inode of the root; `None` before the start, and once it has been away.
    identity: Option<(u64, u64)>,
    /// Manifests that are links, according to the last listing.
    links: BTreeSet<PathBuf>,
    disk: Disk,
    /// Problems of the folder as a whole.
    notices: Vec<Issue>,
    /// Files that are gone according to events.
    removed: BTreeSet<PathBuf>,
    /// Files that could not be read at the first read, because a program was writing them; `None`
    /// before that read.
    unread: Option<BTreeSet<PathBuf>>,
    /// Folders that could not be listed, and whose content is unknown; human-readable.
    unseen: BTreeSet<String>,
}

/// Events that have not been handled yet.
#[derive(Debug, Default)]
struct PendingEvents {
    files: BTreeSet<PathBuf>,
    everything: bool,
}

impl FolderView {
    pub(super) fn new(root: Root, watches: Watches) -> Self {
        Self {
            root,
            catalog: Catalog::default(),
            watches,
            watched: HashMap::new(),
            parent: None,
            writing: BTreeSet::new(),
            pending: PendingEvents::default(),
            stamps: BTreeMap::new(),
            identity: None,
            links: BTreeSet::new(),
            disk: Disk::default(),
            notices: Vec::new(),
            removed: BTreeSet::new(),
            unread: None,
            unseen: BTreeSet::new(),
        }
    }

    /// Begins to watch; everything is to be read then.
    pub(super) fn start(&mut self, path: &Path) -> Result<(), SourceError> {
        self.pending.everything = true;
        let watched = self.watches.add(&self.root.folder, folder_mask());
        watched.map(drop).map_err(|source| SourceError::Unwatchable {
            path: path.display().to_string(),
            source,
        })
    }

    pub(super) fn has_nothing_pending(&self) -> bool {
        self.pending.files.is_empty() && !self.pending.everything
    }

    /// Schedules a scan where changes cause no events. Called at intervals.
    pub(super) fn poll(&mut self) {
        self.pending.everything |= !self.links.is_empty() || !self.notices.is_empty();
    }

    /// Handles a loss of events.
    pub(super) fn note_loss(&mut self) {
        self.pending.everything = true;
        self.writing.clear();
    }

    pub(super) fn note(&mut self, event: &EventOwned) {
        let mask = event.mask;
        if mask.contains(EventMask::Q_OVERFLOW) {
            self.note_loss();
        } else if self.parent.as_ref() == Some(&event.wd) {
            self.pending.everything |= event.name.as_deref() == self.root.folder.file_name();
        } else if let Some(folder) = self.watched.get(&event.wd) {
            match &event.name {
                Some(name) => self.note_entry(folder.join(name), mask),
                None => {
                    let lost = EventMask::DELETE_SELF | EventMask::MOVE_SELF;
                    let lost = lost | EventMask::UNMOUNT | EventMask::IGNORED;
                    self.pending.everything |= mask.intersects(lost);
                }
            }
            if mask.contains(EventMask::IGNORED) {
                let folder = self.watched.remove(&event.wd);
                if folder.is_some_and(|folder| folder.as_os_str().is_empty()) {
                    // Another folder may have its path and its inode number by now.
                    self.identity = None;
                }
            }
        }
    }

    fn note_entry(&mut self, path: PathBuf, mask: EventMask) {
        let renamed = EventMask::MOVED_FROM | EventMask::MOVED_TO;
        let comes_or_goes = mask.intersects(renamed | EventMask::CREATE | EventMask::DELETE);
        if mask.contains(EventMask::ISDIR) {
            self.pending.everything |= comes_or_goes && self.root.only.is_none();
        } else if !self.root.is_manifest(&path) {
            // `..data` of a mounted ConfigMap: every manifest is a link through it.
            self.pending.everything |= comes_or_goes && !self.links.is_empty();
        } else if mask.contains(EventMask::MODIFY)
            || (mask.contains(EventMask::CREATE) && !self.root.appears_complete(&path))
        {
            self.writing.insert(path);
        } else if !(mask.contains(EventMask::ATTRIB) && self.writing.contains(&path)) {
            self.writing.remove(&path);
            if mask.intersects(EventMask::DELETE | EventMask::MOVED_FROM) {
                self.removed.insert(path.clone());
            }
            self.pending.files.insert(path);
        }
    }

    /// Reads what is pending, except files that are being written: they are read when that ends.
    pub(super) fn read_pending(&mut self) -> FileReads {
        let pending = std::mem::take(&mut self.pending);
        let mut paths = pending.files;
        if pending.everything || !self.notices.is_empty() {
            match self.look_around() {
                Ok(changed) => paths.extend(changed),
                Err(error) => {
                    self.identity = None;
                    // Removing the folder does not count as removing each of its files.
                    self.removed.clear();
                    self.notices = vec![self.vanished(&error)];
                    return FileReads::new();
                }
            }
        }
        let quiet =
            paths
                .into_iter()
                .filter(|path| !self.writing.contains(path))
                .map(|path| Question {
                    is_link: self.links.contains(&path),
                    path,
                });
        read_all(&self.root, &mut self.disk, quiet.collect())
    }

    /// Applies the contents that were read. A file that was written meanwhile may have been read
    /// half: it is read again later, even if its writer is done by now.
    pub(super) fn accept(&mut self, read: FileReads) -> Vec<Event> {
        let mut changes = Vec::with_capacity(read.len());
        let first = self.unread.is_none();
        let mut unread = self.unread.take().unwrap_or_else(|| self.writing.clone());
        let alone = read.len() == 1;
        for (path, stamp, mut change) in read {
            let unsure = self.pending.everything || self.pending.files.contains(&path);
            if unsure || self.writing.contains(&path) {
                unread.extend(first.then_some(path));
                continue;
            }
            unread.remove(&path);
            let name = display_name(&path);
            let named = self.removed.remove(&path);
            if change == FileChange::Gone {
                self.stamps.remove(&path);
                // `rm` of a single file is intended. Where more has changed, a file may have been
                // renamed and damaged, and a folder that lacks many files may be incomplete.
                if named && alone {
                    change = FileChange::Removed;
                }
            } else {
                self.stamps.insert(path, stamp);
            }
            changes.push((name, change));
        }
        let writing = unread.iter().map(|path| format!("{} is being written", path.display()));
        let unseen = self.unseen.iter().cloned().chain(writing).collect();
        self.catalog.set_unseen(unseen);
        self.unread = Some(unread);
        self.catalog.apply(changes, self.notices.clone())
    }

    /// Lists the folder, watches all of it, and returns the files that differ from what was read.
    fn look_around(&mut self) -> io::Result<Vec<PathBuf>> {
        let identity = self.identity()?;
        let (listing, mut notices) = loop {
            let listing = self.root.list(&mut self.disk)?;
            let (grown, notices) = self.watch(&listing.folders)?;
            // Files that came into a new folder before it was watched are found by listing again.
            if !grown {
                break (listing, notices);
            }
        };
        let replaced = self.identity != Some(identity);
        if replaced && listing.files.is_empty() && self.catalog.len() > 0 {
            return Err(io::Error::other("a folder without manifests replaced it"));
        }
        self.identity = Some(identity);
        self.links.clone_from(&listing.links);
        notices.extend(unlisted(&listing));
        self.notices = notices;
        self.unseen = unseen(&listing, &self.stamps);

        let unlisted = |path: &Path| listing.unlisted.iter().any(|(dir, _)| path.starts_with(dir));
        let gone = self
            .stamps
            .keys()
            .filter(|path| !listing.files.contains_key(*path) && !unlisted(path));
        let changed = listing.files.iter().filter(|(path, stamp)| {
            stamp.is_none() || self.stamps.get(*path).is_none_or(|known| known != *stamp)
        });
        Ok(gone.chain(changed.map(|(path, _)| path)).cloned().collect())
    }

    /// Returns the device and inode of the current folder, if the disk answers.
    fn identity(&mut self) -> io::Result<(u64, u64)> {
        let root = self.root.clone();
        let question = Question::plain(PathBuf::new());
        let mut answers = self.disk.each(vec![question], move |_, _| root.identity());
        let answer = answers.pop().map(|(_, answer)| answer);
        answer.map_or_else(
            || Err(io::ErrorKind::NotFound.into()),
            |answer| answer.map_err(io::Error::other)?,
        )
    }

    /// Watches these folders and no others. Returns true if one was not watched before.
    fn watch(&mut self, folders: &[PathBuf]) -> io::Result<(bool, Vec<Issue>)> {
        let mut notices = Vec::new();
        let mut grown = false;
        let mut watched = HashMap::with_capacity(folders.len());
        for folder in folders {
            match self.watches.add(self.root.folder.join(folder), folder_mask()) {
                Ok(watch) => {
                    grown |= self.watched.remove(&watch).is_none();
                    watched.insert(watch, folder.clone());
                }
                Err(error) if folder.as_os_str().is_empty() => return Err(error),
                Err(error) => notices.push(notice(
                    folder,
                    format!(
                        "cannot be watched, so changes in it take effect late: {error}; check \
                         fs.inotify.max_user_watches"
                    ),
                )),
            }
        }
        for (stale, _) in std::mem::replace(&mut self.watched, watched) {
            // This fails if the folder is gone, and the watch with it.
            let _ = self.watches.remove(stale);
        }
        let parent = self.root.folder.parent();
        self.parent = parent.and_then(|parent| self.watches.add(parent, parent_mask()).ok());
        Ok((grown, notices))
    }

    fn vanished(&self, error: &io::Error) -> Issue {
        notice(
            &self.root.folder,
            format!(
                "cannot be read: {error}; restore it, until then {}",
                keep(self.catalog.len(), "")
            ),
        )
    }
}

/// Reads files, as far as they can be read in time.
pub(super) fn read_all(root: &Root, disk: &mut Disk, files: Vec<Question>) -> FileReads {
    let root = root.clone();
    let read = disk.each(files, move |path, beat| {
        (root.stamp(path).ok(), root.read(path, beat))
    });
    read.into_iter()
        .map(|(path, answer)| match answer {
            Ok((stamp, change)) => (path, stamp, change),
            Err(silence) => (path, None, FileChange::Unreadable(silence.to_string())),
        })
        .collect()
}

/// Returns the subfolders that cannot be listed and of which nothing was ever read, human-readable.
pub(super) fn unseen(
    listing: &Listing,
    read: &BTreeMap<PathBuf, Option<Stamp>>,
) -> BTreeSet<String> {
    listing
        .unlisted
        .iter()
        .filter(|(dir, _)| !read.keys().any(|path| path.starts_with(dir)))
        .map(|(dir, error)| format!("{} cannot be listed: {error}", dir.display()))
        .collect()
}

/// Returns issues about subfolders that cannot be listed.
pub(super) fn unlisted(listing: &Listing) -> Vec<Issue> {
    listing
        .unlisted
        .iter()
        .map(|(folder, error)| {
            notice(
                folder,
                format!(
                    "cannot be read: {error}; check its permissions, until then objects in \
                 it keep their last good state"
                ),
            )
        })
        .collect()
}

fn notice(path: &Path, reason: String) -> Issue {
    let folder = ObjectRef::new("folder", "", "");
    Issue::error(Reason::FolderUnreadable, folder, reason).at(path.display().to_string())
}

fn folder_mask() -> WatchMask {
    WatchMask::CLOSE_WRITE
        | WatchMask::MODIFY
        | WatchMask::ATTRIB
        | WatchMask::CREATE
        | WatchMask::DELETE
        | WatchMask::MOVED_FROM
        | WatchMask::MOVED_TO
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF
        | WatchMask::ONLYDIR
}

fn parent_mask() -> WatchMask {
    WatchMask::CREATE
        | WatchMask::DELETE
        | WatchMask::MOVED_FROM
        | WatchMask::MOVED_TO
        | WatchMask::ONLYDIR
}
