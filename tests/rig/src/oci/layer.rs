//! The layers of an image: archives whose bytes depend on their entries alone.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use flate2::{Compression, GzBuilder};
use tar::{Builder, EntryType, Header};

use super::digest::Digest;

/// Mode of folders, programs and libraries.
pub const EXECUTABLE: u32 = 0o755;
/// Mode of other files.
pub const READABLE: u32 = 0o644;
/// Media types of layers.
const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// Files, folders and links by their path, relative to the image's root.
#[derive(Clone, Debug, Default, Hash)]
pub struct Layer {
    entries: BTreeMap<String, Entry>,
}

#[derive(Clone, Debug, Hash)]
enum Entry {
    Folder(u32),
    Link(String),
    File(u32, Vec<u8>),
    /// A file of this machine, which is read when the layer is packed.
    Copy(u32, PathBuf),
}

/// A layer as an image has it.
#[derive(Clone, Debug)]
pub struct Packed {
    /// The kind of the archive.
    pub(super) media_type: &'static str,
    /// The archive, compressed or not.
    pub bytes: Vec<u8>,
    /// The digest of the archive itself.
    pub diff_id: Digest,
    /// The size of all files, in bytes.
    pub unpacked: usize,
}

impl Layer {
    /// Adds a file with a content.
    pub fn file(&mut self, path: &str, mode: u32, content: impl Into<Vec<u8>>) {
        self.add(path, Entry::File(mode, content.into()));
    }

    /// Adds a copy of a file of this machine.
    pub fn copy(&mut self, path: &str, mode: u32, from: &Path) {
        self.add(path, Entry::Copy(mode, from.to_owned()));
    }

    /// Adds a folder. Those in which other entries are need not be added.
    pub fn folder(&mut self, path: &str, mode: u32) {
        self.add(path, Entry::Folder(mode));
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) {
        self.add(path, Entry::Link(target.to_owned()));
    }

    /// Adds an entry, and the folders in which it is.
    fn add(&mut self, path: &str, entry: Entry) {
        let path = path.trim_start_matches('/');
        for (end, _) in path.match_indices('/') {
            let folder = path[..end].to_owned();
            let folder = self.entries.entry(folder);
            folder.or_insert(Entry::Folder(EXECUTABLE));
        }
        self.entries.insert(path.to_owned(), entry);
    }

    /// Returns the paths of all entries, in order.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Returns the files of this machine that the layer copies.
    pub fn sources(&self) -> impl Iterator<Item = &Path> {
        self.entries.values().filter_map(|entry| match entry {
            Entry::Copy(_, from) => Some(from.as_path()),
            Entry::Folder(_) | Entry::Link(_) | Entry::File(..) => None,
        })
    }

    /// Returns the archive, compressed at a level, or as it is with [`Compression::none`]. Equal entries give equal
    /// bytes.
    ///
    /// # Errors
    /// A file cannot be read, or a path is too long for the format.
    pub fn pack(&self, level: Compression) -> Result<Packed> {
        let (archive, unpacked) = self.archive()?;
        let diff_id = Digest::of(&archive);
        let is_plain = level == Compression::none();
        let bytes = if is_plain {
            archive
        } else {
            let mut gzip = GzBuilder::new().mtime(0).write(Vec::new(), level);
            gzip.write_all(&archive)?;
            gzip.finish()?
        };
        Ok(Packed {
            media_type: if is_plain { TAR } else { GZIP },
            bytes,
            diff_id,
            unpacked,
        })
    }

    /// Returns the archive, and the size of all files.
    fn archive(&self) -> Result<(Vec<u8>, usize)> {
        let mut archive = Archive::default();
        for (path, entry) in &self.entries {
            match entry {
                Entry::Folder(mode) => archive.folder(path, *mode)?,
                Entry::Link(target) => archive.link(path, target)?,
                Entry::File(mode, content) => archive.file(path, *mode, content)?,
                Entry::Copy(mode, from) => {
                    let content = fs::read(from)
                        .with_context(|| format!("cannot read {}", from.display()))?;
                    archive.file(path, *mode, &content)?;
                }
            }
        }
        let unpacked = archive.unpacked;
        Ok((archive.finish()?, unpacked))
    }
}

/// An archive in memory. Owner and time of all entries are 0.
pub(super) struct Archive {
    to: Builder<Vec<u8>>,
    /// The size of all files, in bytes.
    unpacked: usize,
}

impl Default for Archive {
    fn default() -> Self {
        Self {
            to: Builder::new(Vec::new()),
            unpacked: 0,
        }
    }
}

impl Archive {
    /// Adds a folder.
    pub(super) fn folder(&mut self, path: &str, mode: u32) -> Result<()> {
        let mut header = header(EntryType::Directory, mode);
        self.append(&mut header, &format!("{path}/"), &[])
    }

    /// Adds a file.
    pub(super) fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        let mut header = header(EntryType::Regular, mode);
        header.set_size(content.len() as u64);
        self.unpacked += content.len();
        self.append(&mut header, path, content)
    }

    /// Adds a symbolic link.
    pub(super) fn link(&mut self, path: &str, target: &str) -> Result<()> {
        let mut header = header(EntryType::Symlink, 0o777);
        self.to
            .append_link(&mut header, path, target)
            .with_context(|| format!("cannot archive {path}"))
    }

    fn append(&mut self, header: &mut Header, path: &str, content: &[u8]) -> Result<()> {
        ensure!(
            !path.starts_with('/') && !path.contains(".."),
            "{path} would be outside of the image"
        );
        self.to
            .append_data(header, path, content)
            .with_context(|| format!("cannot archive {path}"))
    }

    /// Returns the archive's bytes.
    pub(super) fn finish(self) -> Result<Vec<u8>> {
        self.to.into_inner().context("cannot finish an archive")
    }
}

fn header(kind: EntryType, mode: u32) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(0);
    header
}

#[cfg(test)]
mod tests {
    use flate2::read::GzDecoder;

    use super::*;

    fn layer(order: &[&str]) -> Layer {
        let mut layer = Layer::default();
        for name in order {
            layer.file(&format!("usr/bin/{name}"), EXECUTABLE, *name);
        }
        layer.link("sbin", "usr/bin");
        layer
    }

    #[test]
    fn equal_entries_give_equal_bytes() {
        let [one, other] =
            [["a", "b"], ["b", "a"]].map(|order| layer(&order).pack(Compression::best()).unwrap());
        assert_eq!(one.bytes, other.bytes);
        assert_eq!(one.diff_id, other.diff_id);
        let different = layer(&["a", "c"]).pack(Compression::best()).unwrap();
        assert_ne!(one.diff_id, different.diff_id);
        let plain = layer(&["a", "b"]).pack(Compression::none()).unwrap();
        assert_eq!(Digest::of(&plain.bytes), one.diff_id);
    }

    #[test]
    fn an_archive_has_each_folder_once_and_before_its_files() {
        let packed = layer(&["a", "b"]).pack(Compression::best()).unwrap();
        let mut archive = tar::Archive::new(GzDecoder::new(&*packed.bytes));
        let entries = archive.entries().unwrap().map(|entry| {
            let entry = entry.unwrap();
            let header = entry.header();
            let owner = (header.uid().unwrap(), header.mtime().unwrap());
            assert_eq!(owner, (0, 0));
            entry.path().unwrap().display().to_string()
        });
        let expected = ["sbin", "usr/", "usr/bin/", "usr/bin/a", "usr/bin/b"];
        assert_eq!(entries.collect::<Vec<_>>(), expected);
        assert_eq!(packed.unpacked, 2);
    }
}
