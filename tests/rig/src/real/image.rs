//! Images of containers as archives with an OCI layout, made of files of this machine.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};

use super::tar::Tar;
use crate::process::output;

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// A number to increase when the same entries make another archive than before.
const FORMAT: u32 = 2;
/// The annotation from which containerd takes the name of an imported image.
const NAME: &str = "io.containerd.image.name";
/// The annotation of the OCI layout for a tag.
const TAG: &str = "org.opencontainers.image.ref.name";

/// An image with one layer.
#[derive(Debug, Default, Hash)]
pub(super) struct Image {
    name: String,
    entrypoint: Vec<String>,
    /// What follows the entrypoint, unless a Pod has its own.
    arguments: Vec<String>,
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug, Hash)]
enum Entry {
    Folder(u32),
    Link(String),
    Text(String),
    /// A copy of a file of this machine.
    Copy(PathBuf),
    /// A copy of a file of this machine, and of the libraries that the file needs.
    Program(PathBuf),
}

impl Image {
    /// Starts an image with a full name, such as `localhost/kplane/pod:test`.
    pub(super) fn new(name: &str, entrypoint: &[&str]) -> Self {
        Self {
            name: name.to_owned(),
            entrypoint: entrypoint.iter().map(ToString::to_string).collect(),
            arguments: Vec::new(),
            entries: BTreeMap::new(),
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
        self.entries.insert(path.to_owned(), Entry::Folder(mode));
        self
    }

    /// Adds a symbolic link.
    pub(super) fn link(mut self, path: &str, target: &str) -> Self {
        let entry = Entry::Link(target.to_owned());
        self.entries.insert(path.to_owned(), entry);
        self
    }

    /// Adds a text file.
    pub(super) fn text(mut self, path: &str, text: &str) -> Self {
        let entry = Entry::Text(text.to_owned());
        self.entries.insert(path.to_owned(), entry);
        self
    }

    /// Adds a copy of a file of this machine, executable.
    pub(super) fn copy(mut self, path: &str, from: &Path) -> Self {
        let entry = Entry::Copy(from.to_owned());
        self.entries.insert(path.to_owned(), entry);
        self
    }

    /// Adds a copy of a program or of a library of this machine, with the libraries that it needs.
    pub(super) fn program(mut self, path: &str, from: &Path) -> Self {
        let entry = Entry::Program(from.to_owned());
        self.entries.insert(path.to_owned(), entry);
        self
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
            fs::write(fresh.path(), self.layout()?)
                .with_context(|| format!("write {}", file.display()))?;
            fresh.persist(&file).context("name an image's archive")?;
        }
        Ok(file)
    }

    /// Returns a name that changes with the image's contents.
    fn file_name(&self) -> Result<String> {
        let mut hasher = DefaultHasher::new();
        (FORMAT, self).hash(&mut hasher);
        for entry in self.entries.values() {
            if let Entry::Copy(from) | Entry::Program(from) = entry {
                let state = fs::metadata(from).with_context(|| from.display().to_string())?;
                (state.size(), state.mtime(), state.mtime_nsec()).hash(&mut hasher);
            }
        }
        let name = self.name.replace(['/', ':'], "_");
        Ok(format!("{name}-{:016x}.tar", hasher.finish()))
    }

    /// Returns the archive's bytes (OCI image layout, version 1.0.0).
    fn layout(&self) -> Result<Vec<u8>> {
        let layer = self.layer()?;
        let mut blobs = BTreeMap::new();
        let layer_digest = sha256(&layer);
        let config = json!({
            "architecture": architecture(),
            "os": "linux",
            "config": {
                "Entrypoint": self.entrypoint,
                "Cmd": self.arguments,
                "Env": [PATH],
                "WorkingDir": "/",
            },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{layer_digest}")] },
        });
        let layer = blob(&mut blobs, LAYER, layer);
        let config = blob(&mut blobs, CONFIG, serde_json::to_vec(&config)?);
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer],
        });
        let mut manifest = blob(&mut blobs, MANIFEST, serde_json::to_vec(&manifest)?);
        let tag = self.name.rsplit(':').next().unwrap_or_default();
        manifest["annotations"] = json!({ NAME: self.name, TAG: tag });
        let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
        let mut tar = Tar::default();
        tar.file("oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        tar.file("index.json", 0o644, &serde_json::to_vec(&index)?)?;
        for (digest, blob) in blobs {
            tar.file(&format!("blobs/sha256/{digest}"), 0o644, &blob)?;
        }
        Ok(tar.finish())
    }

    fn layer(&self) -> Result<Vec<u8>> {
        let libraries = self.libraries()?;
        let all: BTreeMap<_, _> = libraries.iter().chain(&self.entries).collect();
        let mut tar = Tar::default();
        let mut folders = BTreeSet::new();
        for (path, entry) in all {
            for (end, _) in path.match_indices('/') {
                if folders.insert(&path[..end]) {
                    tar.folder(&path[..end], 0o755)?;
                }
            }
            match entry {
                Entry::Folder(mode) => tar.folder(path, *mode)?,
                Entry::Link(target) => tar.link(path, target)?,
                Entry::Text(text) => tar.file(path, 0o644, text.as_bytes())?,
                Entry::Copy(from) | Entry::Program(from) => {
                    let content = fs::read(from).with_context(|| from.display().to_string())?;
                    tar.file(path, 0o755, &content)?;
                }
            }
        }
        Ok(tar.finish())
    }

    /// Returns the libraries of all programs, by their paths in the image.
    fn libraries(&self) -> Result<BTreeMap<String, Entry>> {
        let mut all = BTreeMap::new();
        for entry in self.entries.values() {
            let Entry::Program(from) = entry else {
                continue;
            };
            let from = fs::canonicalize(from).with_context(|| from.display().to_string())?;
            for library in libraries(&from) {
                let inside = library.trim_start_matches('/').to_owned();
                all.insert(inside, Entry::Copy(library.into()));
            }
        }
        Ok(all)
    }
}

/// Adds a blob and returns its descriptor.
fn blob(blobs: &mut BTreeMap<String, Vec<u8>>, media_type: &str, content: Vec<u8>) -> Value {
    let digest = sha256(&content);
    let descriptor = json!({
        "mediaType": media_type,
        "digest": format!("sha256:{digest}"),
        "size": content.len(),
    });
    blobs.insert(digest, content);
    descriptor
}

fn sha256(bytes: &[u8]) -> String {
    let sum = digest(&SHA256, bytes);
    sum.as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Returns this machine's architecture as images name it.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Returns the libraries of a program, and the program that loads them; none for a static program.
fn libraries(program: &Path) -> Vec<String> {
    let mut ldd = Command::new("ldd");
    ldd.arg(program);
    // ldd fails for a static program; a file that is missing is noticed by others.
    let text = output(ldd).unwrap_or_default();
    let paths = text.lines().filter_map(|line| {
        let (path, _) = line.split_once(" (0x")?;
        path.split_whitespace().next_back()
    });
    let files = paths.filter(|path| path.starts_with('/'));
    files.map(str::to_owned).collect()
}
