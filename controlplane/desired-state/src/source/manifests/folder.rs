//! The folder or file of manifests in the file system.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::OFlag;

use super::catalog::FileChange;
use super::disk::{Beat, Disk, Question};
use super::{MAX_FILE_BYTES, MAX_FOLDER_DEPTH};

/// Number of bytes after which a reader reports progress.
const PART_BYTES: u64 = 1 << 20;

/// Name endings of files that are read.
const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// The root to read: a folder with its subfolders, or one file of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Root {
    pub(super) folder: PathBuf,
    /// The only file to read.
    pub(super) only: Option<PathBuf>,
}

/// Identifies a version of a file: changes when the file is replaced or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// The content of the folder.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// Manifests by their path in the folder; without a stamp if that cannot be read.
    pub(super) files: BTreeMap<PathBuf, Option<Stamp>>,
    /// The folder itself, as an empty path, and its subfolders, hidden ones left out.
    pub(super) folders: Vec<PathBuf>,
    /// Subfolders that cannot be listed.
    pub(super) unlisted: Vec<(PathBuf, io::Error)>,
    /// Manifests that are symbolic links: their content may change without an event.
    pub(super) links: BTreeSet<PathBuf>,
}

/// The content of one folder: links that may be manifests are kept apart from files.
#[derive(Debug, Default)]
struct Entries {
    files: Vec<Question>,
    folders: Vec<PathBuf>,
}

impl Root {
    /// Returns the root for a path, which must exist.
    pub(super) fn at(path: &Path) -> io::Result<Self> {
        let path = std::path::absolute(path)?;
        if fs::metadata(&path)?.is_dir() {
            let (folder, only) = (path, None);
            return Ok(Self { folder, only });
        }
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let only = Some(PathBuf::from(name));
        let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self {
            folder: folder.to_owned(),
            only,
        })
    }

    /// Returns whether a path in the folder is a manifest's.
    pub(super) fn is_manifest(&self, path: &Path) -> bool {
        if let Some(only) = &self.only {
            return path == only;
        }
        let extension = path.extension().and_then(OsStr::to_str);
        extension.is_some_and(|e| EXTENSIONS.contains(&e)) && !is_hidden(path)
    }

    /// Returns the device and inode of the current folder.
    pub(super) fn identity(&self) -> io::Result<(u64, u64)> {
        let metadata = fs::metadata(&self.folder)?;
        Ok((metadata.dev(), metadata.ino()))
    }

    /// Lists the folder; fails only if the folder itself cannot be listed.
    pub(super) fn list(&self, disk: &mut Disk) -> io::Result<Listing> {
        let mut listing = Listing::default();
        let mut files = Vec::new();
        let mut level = vec![Question::plain(PathBuf::new())];
        while !level.is_empty() {
            let root = self.clone();
            let listed = disk.each(level, move |folder, _| root.list_folder(folder));
            level = Vec::new();
            for (folder, entries) in listed {
                match entries.unwrap_or_else(|silence| Err(io::Error::other(silence))) {
                    Ok(entries) => {
                        listing.folders.push(folder);
                        files.extend(entries.files);
                        level.extend(entries.folders.into_iter().map(Question::plain));
                    }
                    Err(error) if folder.as_os_str().is_empty() => return Err(error),
                    Err(error) => listing.unlisted.push((folder, error)),
                }
            }
        }
        let links = files.iter().filter(|file| file.is_link);
        listing.links = links.map(|link| link.path.clone()).collect();
        let root = self.clone();
        let stamps = disk.each(files, move |path, _| root.stamp(path).ok()).into_iter();
        listing.files = stamps.map(|(path, stamp)| (path, stamp.ok().flatten())).collect();
        Ok(listing)
    }

    /// Lists one folder.
    fn list_folder(&self, folder: &Path) -> io::Result<Entries> {
        let mut found = Entries::default();
        for entry in fs::read_dir(self.folder.join(folder))? {
            let entry = entry?;
            let path = folder.join(entry.file_name());
            // The type of the entry itself: links to folders are not followed, because they may
            // form rings.
            let file_type = entry.file_type()?;
            if file_type.is_dir() {
                let deep = path.components().count() > MAX_FOLDER_DEPTH;
                if self.only.is_none() && !is_hidden(&path) && !deep {
                    found.folders.push(path);
                }
            } else if self.is_manifest(&path) {
                let is_link = file_type.is_symlink();
                found.files.push(Question { path, is_link });
            }
        }
        Ok(found)
    }

    /// Returns the stamp of a manifest, or of its link's target.
    pub(super) fn stamp(&self, path: &Path) -> io::Result<Stamp> {
        fs::metadata(self.folder.join(path)).map(|metadata| Stamp {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }

    /// Returns whether a new file is already complete: this holds for links of either kind, because
    /// no program writes to them.
    pub(super) fn appears_complete(&self, path: &Path) -> bool {
        let metadata = fs::symlink_metadata(self.folder.join(path));
        metadata.is_ok_and(|metadata| metadata.is_symlink() || metadata.nlink() > 1)
    }

    /// Reads a manifest.
    pub(super) fn read(&self, path: &Path, beat: &Beat) -> FileChange {
        let full = self.folder.join(path);
        match fs::symlink_metadata(&full) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return FileChange::Gone,
            Err(error) => return FileChange::Unreadable(error.to_string()),
            Ok(_) => {}
        }
        match read_file(&full, beat) {
            Ok(bytes) => FileChange::Contents(bytes),
            Err(error) => FileChange::Unreadable(error.to_string()),
        }
    }
}

/// Returns the human-readable name of a manifest.
pub(super) fn display_name(path: &Path) -> Arc<str> {
    path.to_string_lossy().into()
}

fn is_hidden(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.as_encoded_bytes().starts_with(b".")
}

/// Reads a regular file, and nothing else: a pipe may never have a writer, and opening a device may
/// have effects. If the path was replaced meanwhile, the open call does not wait either.
fn read_file(path: &Path, beat: &Beat) -> io::Result<Vec<u8>> {
    must_be_file(&fs::metadata(path)?)?;
    let at_once = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let mut options = fs::OpenOptions::new();
    let file = options.read(true).custom_flags(at_once.bits()).open(path)?;
    must_be_file(&file.metadata()?)?;
    read_limited(file, beat).map_err(|error| match error.kind() {
        // Files such as /proc/kmsg claim to be regular files.
        io::ErrorKind::WouldBlock => io::Error::other("reading it would block; it may be a log"),
        _ => error,
    })
}

fn must_be_file(metadata: &fs::Metadata) -> io::Result<()> {
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    if metadata.len() > MAX_FILE_BYTES {
        return Err(too_large());
    }
    Ok(())
}

fn too_large() -> io::Error {
    let mebibytes = MAX_FILE_BYTES >> 20;
    io::Error::other(format!("it is larger than {mebibytes} MiB"))
}

/// Reads to the end; fails if the content exceeds the limit.
pub(super) fn read_limited(input: impl Read, beat: &Beat) -> io::Result<Vec<u8>> {
    let mut input = input.take(MAX_FILE_BYTES + 1);
    let mut bytes = Vec::new();
    while input.by_ref().take(PART_BYTES).read_to_end(&mut bytes)? > 0 {
        beat.beat();
    }
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(too_large());
    }
    Ok(bytes)
}
