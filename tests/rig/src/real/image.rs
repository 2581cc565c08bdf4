//! Images of containers as archives, made of files of this machine.

use std::collections::BTreeMap;
use std::env::consts::ARCH;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use flate2::Compression;
use serde_json::json;

use crate::oci::{self, EXECUTABLE, Layer, READABLE};

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// A number to increase when the same entries make another archive than before.
const FORMAT: u32 = 3;

/// An image with one layer.
#[derive(Debug, Default, Hash)]
pub(super) struct Image {
    name: String,
    entrypoint: Vec<String>,
    /// What follows the entrypoint, unless a Pod has its own.
    arguments: Vec<String>,
    layer: Layer,
    /// Programs of this machine whose libraries the image has.
    programs: Vec<PathBuf>,
}

impl Image {
    /// Starts an image with a full name, such as `localhost/kplane/pod:test`.
    pub(super) fn new(name: &str, entrypoint: &[&str]) -> Self {
        Self {
            name: name.to_owned(),
            entrypoint: entrypoint.iter().map(ToString::to_string).collect(),
            ..Self::default()
        }
        .folder("tmp", 0o1777)
    }

    /// Sets the arguments of Pods that have none of their own.
    pub(super) fn arguments(mut self, arguments: &[&str]) -> Self {
        self.arguments = arguments.iter().map(ToString::to_string).collect();
        self
    }

    /// Adds a folder. Paths are relative to the image's root.
    pub(super) fn folder(mut self, path: &str, mode: u32) -> Self {
        self.layer.folder(path, mode);
        self
    }

    /// Adds a symbolic link.
    pub(super) fn link(mut self, path: &str, target: &str) -> Self {
        self.layer.link(path, target);
        self
    }

    /// Adds a text file.
    pub(super) fn text(mut self, path: &str, text: &str) -> Self {
        self.layer.file(path, READABLE, text);
        self
    }

    /// Adds a copy of a file of this machine, executable.
    pub(super) fn copy(mut self, path: &str, from: &Path) -> Self {
        self.layer.copy(path, EXECUTABLE, from);
        self
    }

    /// Adds a copy of a program or of a library of this machine, with the libraries that it needs.
    pub(super) fn program(mut self, path: &str, from: &Path) -> Self {
        self.programs.push(from.to_owned());
        self.copy(path, from)
    }

    /// Writes the archive into a folder, unless it is there already, and returns its path.
    ///
    /// # Errors
    /// A file cannot be read, or the folder is not writable.
    pub(super) fn archive(&self, folder: &Path) -> Result<PathBuf> {
        let file = folder.join(self.file_name()?);
        if !file.exists() {
            fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
            // Other processes see all of the file or nothing.
            let fresh = tempfile::NamedTempFile::new_in(folder)?;
            fs::write(fresh.path(), self.packed()?)
                .with_context(|| format!("write {}", file.display()))?;
            fresh.persist(&file).context("name an image's archive")?;
        }
        Ok(file)
    }

    /// Returns a name that changes with the image's contents.
    fn file_name(&self) -> Result<String> {
        let mut hasher = DefaultHasher::new();
        (FORMAT, self).hash(&mut hasher);
        for from in self.layer.sources() {
            let state = fs::metadata(from).with_context(|| from.display().to_string())?;
            (state.size(), state.mtime(), state.mtime_nsec()).hash(&mut hasher);
        }
        let name = self.name.replace(['/', ':'], "_");
        Ok(format!("{name}-{:016x}.tar", hasher.finish()))
    }

    /// Returns the archive's bytes.
    fn packed(&self) -> Result<Vec<u8>> {
        let mut layer = self.layer.clone();
        for from in &self.programs {
            let from = fs::canonicalize(from).with_context(|| from.display().to_string())?;
            for library in oci::libraries(&from) {
                layer.copy(&library.to_string_lossy(), EXECUTABLE, &library);
            }
        }
        let image = oci::Image {
            name: self.name.clone(),
            architecture: oci::architecture(ARCH).context("no images for this machine")?,
            container: json!({
                "Entrypoint": self.entrypoint,
                "Cmd": self.arguments,
                "Env": [PATH],
                "WorkingDir": "/",
            }),
            annotations: BTreeMap::new(),
            created: "1970-01-01T00:00:00Z".to_owned(),
            layers: vec![layer.pack(Compression::none())?],
        };
        Ok(image.archive()?.0)
    }
}
