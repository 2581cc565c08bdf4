//! The folder or file of manifests as the file system shows it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::catalog::Change;
use super::{MAX_FILE_BYTES, MAX_FOLDER_DEPTH};

/// Name endings of files that are read.
const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// What to read: a folder with its subfolders, or one file of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Root {
    /// The folder.
    pub(super) folder: PathBuf,
    /// The one file.
    pub(super) only: Option<PathBuf>,
}

/// Tells whether a file is another one, or has been written, since it was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// What is in the folder.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// Manifests by their path in the folder; without a stamp if there is no telling.
    pub(super) files: BTreeMap<PathBuf, Option<Stamp>>,
    /// The folder itself, as an empty path, and its subfolders, hidden ones left out.
    pub(super) folders: Vec<PathBuf>,
    /// Subfolders that cannot be listed.
    pub(super) unlisted: Vec<(PathBuf, io::Error)>,
    /// Some manifest is a symbolic link: its contents may change without any event on it.
    pub(super) has_links: bool,
}

impl Root {
    /// The root at a path, which must exist.
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

    /// Whether a path in the folder is one of a manifest.
    pub(super) fn is_manifest(&self, path: &Path) -> bool {
        if let Some(only) = &self.only {
            return path == only;
        }
        let extension = path.extension().and_then(OsStr::to_str);
        extension.is_some_and(|e| EXTENSIONS.contains(&e)) && !is_hidden(path)
    }

    /// Which directory the folder is at the moment: device and inode.
    pub(super) fn identity(&self) -> io::Result<(u64, u64)> {
        let metadata = fs::metadata(&self.folder)?;
        Ok((metadata.dev(), metadata.ino()))
    }

    /// Lists the folder; fails only if the folder itself cannot be listed.
    pub(super) fn list(&self) -> io::Result<Listing> {
        let mut listing = Listing::default();
        self.list_into(Path::new(""), &mut listing)?;
        Ok(listing)
    }

    fn list_into(&self, folder: &Path, listing: &mut Listing) -> io::Result<()> {
        let entries = fs::read_dir(self.folder.join(folder))?;
        listing.folders.push(folder.to_owned());
        for entry in entries {
            let entry = entry?;
            let path = folder.join(entry.file_name());
            // The type of the entry itself: links to folders are not followed, they may be rings.
            let file_type = entry.file_type()?;
            if file_type.is_dir() {
                let deep = path.components().count() > MAX_FOLDER_DEPTH;
                if self.only.is_some() || is_hidden(&path) || deep {
                    continue;
                }
                if let Err(error) = self.list_into(&path, listing) {
                    listing.unlisted.push((path, error));
                }
            } else if self.is_manifest(&path) {
                listing.has_links |= file_type.is_symlink();
                let stamp = self.stamp(&path).ok();
                listing.files.insert(path, stamp);
            }
        }
        Ok(())
    }

    /// The stamp of a manifest, or of what it is a link to.
    pub(super) fn stamp(&self, path: &Path) -> io::Result<Stamp> {
        fs::metadata(self.folder.join(path)).map(|metadata| Stamp {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }

    /// A file that appears is complete if it is a link, of either kind: then nobody writes to it.
    pub(super) fn appears_complete(&self, path: &Path) -> bool {
        let metadata = fs::symlink_metadata(self.folder.join(path));
        metadata.is_ok_and(|metadata| metadata.is_symlink() || metadata.nlink() > 1)
    }

    /// Reads a manifest.
    pub(super) fn read(&self, path: &Path) -> Change {
        let full = self.folder.join(path);
        match fs::symlink_metadata(&full) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Change::Gone,
            Err(error) => return Change::Unreadable(error.to_string()),
            Ok(_) => {}
        }
        match read_file(&full) {
            Ok(bytes) => Change::Contents(bytes),
            Err(error) => Change::Unreadable(error.to_string()),
        }
    }
}

/// The name of a manifest as people see it.
pub(super) fn display_name(path: &Path) -> Arc<str> {
    path.to_string_lossy().into()
}

fn is_hidden(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.as_encoded_bytes().starts_with(b".")
}

fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    // Opening a pipe would wait for a writer.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    read_limited(fs::File::open(path)?)
}

/// Reads to the end, or fails where there is more than the limit.
pub(super) fn read_limited(input: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    input.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let mebibytes = MAX_FILE_BYTES >> 20;
        return Err(io::Error::other(format!(
            "it is larger than {mebibytes} MiB"
        )));
    }
    Ok(bytes)
}
