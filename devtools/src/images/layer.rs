//! The layers of an image: archives whose bytes depend on their entries alone.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use flate2::{Compression, GzBuilder};
use tar::{Builder, EntryType, Header};

use super::digest::Digest;

/// Mode of folders, programs and libraries.
pub(super) const EXECUTABLE: u32 = 0o755;
/// Mode of other files.
pub(super) const READABLE: u32 = 0o644;

/// Files, folders and links by their path, relative to the image's root.
#[derive(Clone, Debug, Default)]
pub(super) struct Layer {
    entries: BTreeMap<String, Entry>,
}

#[derive(Clone, Debug)]
enum Entry {
    Folder,
    Link(String),
    File { mode: u32, content: Vec<u8> },
}

/// A compressed layer.
#[derive(Clone, Debug)]
pub(super) struct Packed {
    /// The compressed archive.
    pub(super) bytes: Vec<u8>,
    /// The digest of the archive itself.
    pub(super) diff_id: Digest,
    /// The size of all files, in bytes.
    pub(super) unpacked: usize,
}

impl Layer {
    /// Adds a file with a content.
    pub(super) fn file(&mut self, path: &str, mode: u32, content: impl Into<Vec<u8>>) {
        let content = content.into();
        self.add(path, Entry::File { mode, content });
    }

    /// Adds a copy of a file of this machine.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn copy(&mut self, path: &str, mode: u32, from: &Path) -> Result<()> {
        let content = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        self.file(path, mode, content);
        Ok(())
    }

    /// Adds a symbolic link.
    pub(super) fn link(&mut self, path: &str, target: &str) {
        self.add(path, Entry::Link(target.to_owned()));
    }

    /// Adds an entry, and the folders in which it is.
    fn add(&mut self, path: &str, entry: Entry) {
        let path = path.trim_start_matches('/');
        for (end, _) in path.match_indices('/') {
            let folder = path[..end].to_owned();
            self.entries.entry(folder).or_insert(Entry::Folder);
        }
        self.entries.insert(path.to_owned(), entry);
    }

    /// Returns the paths of all entries, in order.
    #[cfg(test)]
    pub(super) fn paths(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Returns the archive, compressed at a level. Equal entries give equal bytes.
    ///
    /// # Errors
    /// A path is too long for the format.
    pub(super) fn pack(&self, level: Compression) -> Result<Packed> {
        let archive = self.archive()?;
        let mut gzip = GzBuilder::new().mtime(0).write(Vec::new(), level);
        gzip.write_all(&archive)?;
        let bytes = gzip.finish()?;
        let sizes = self.entries.values().map(|entry| match entry {
            Entry::File { content, .. } => content.len(),
            Entry::Folder | Entry::Link(_) => 0,
        });
        Ok(Packed {
            diff_id: Digest::of(&archive),
            unpacked: sizes.sum(),
            bytes,
        })
    }

    fn archive(&self) -> Result<Vec<u8>> {
        let mut archive = Archive::default();
        for (path, entry) in &self.entries {
            match entry {
                Entry::Folder => archive.folder(path)?,
                Entry::Link(target) => archive.link(path, target)?,
                Entry::File { mode, content } => archive.file(path, *mode, content)?,
            }
        }
        archive.finish()
    }
}

/// An archive in memory. Owner and time of all entries are 0.
pub(super) struct Archive(Builder<Vec<u8>>);

impl Default for Archive {
    fn default() -> Self {
        Self(Builder::new(Vec::new()))
    }
}

impl Archive {
    /// Adds a folder.
    pub(super) fn folder(&mut self, path: &str) -> Result<()> {
        let mut header = header(EntryType::Directory, EXECUTABLE);
        self.append(&mut header, &format!("{path}/"), &[])
    }

    /// Adds a file.
    pub(super) fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        let mut header = header(EntryType::Regular, mode);
        header.set_size(content.len() as u64);
        self.append(&mut header, path, content)
    }

    /// Adds a symbolic link.
    pub(super) fn link(&mut self, path: &str, target: &str) -> Result<()> {
        let mut header = header(EntryType::Symlink, 0o777);
        self.0
            .append_link(&mut header, path, target)
            .with_context(|| format!("cannot archive {path}"))
    }

    fn append(&mut self, header: &mut Header, path: &str, content: &[u8]) -> Result<()> {
        ensure!(
            !path.starts_with('/') && !path.contains(".."),
            "{path} would be outside of the image"
        );
        self.0
            .append_data(header, path, content)
            .with_context(|| format!("cannot archive {path}"))
    }

    /// Returns the archive's bytes.
    pub(super) fn finish(self) -> Result<Vec<u8>> {
        self.0.into_inner().context("cannot finish an archive")
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
