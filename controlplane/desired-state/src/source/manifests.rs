//! The source of manifests: a folder, a file or standard input with ordinary Kubernetes YAML or JSON. It needs no
//! cluster, and reads files again whenever they change.
//!
//! The output of `kubectl get services,endpointslices,nodes,servicecidrs -A -o yaml` is valid input. Invalid input
//! is refused by name and line, and the rest is served. A file that is half written, emptied or unreadable deletes
//! nothing.
//!
//! Modules from the outside in: `watch` and `view` detect changes. `folder` reads files through `disk`, which
//! limits every wait. `text`, `tree`, `decode`, `object` and `document` turn text into objects, and `catalog` and
//! `claims` decide what these mean. From `text` on nothing does I/O.

mod catalog;
mod claims;
mod decode;
mod disk;
mod document;
mod doubts;
mod folder;
mod object;
mod text;
mod tree;
mod view;
mod watch;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use kplane_model::Issue;
use tokio::sync::mpsc;

use self::catalog::{Catalog, FileChange};
use self::disk::{Beat, Disk, Question};
use self::folder::{Root, display_name, read_limited};
use super::{Batch, Located, Source, SourceError};

/// Maximum size of a file in bytes: 250 MiB is 250,000 Services with slices.
pub const MAX_FILE_BYTES: u64 = 256 << 20;
/// Maximum number of objects of all files together; a file that would bring more is refused.
pub const MAX_OBJECTS: usize = 1_000_000;
/// Maximum number of issues that are reported at a time, errors first.
pub const MAX_ISSUES: usize = 1_000;
/// Maximum depth of subfolders.
pub const MAX_FOLDER_DEPTH: usize = 16;

/// The path that stands for standard input.
const STDIN: &str = "-";
/// Name of standard input in locations.
const STDIN_NAME: &str = "standard input";

/// The source of manifests.
#[derive(Clone, Debug)]
pub struct Manifests {
    path: PathBuf,
}

/// All objects and problems at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Loaded {
    /// The objects that are served, by kind, namespace and name.
    pub objects: Vec<Located>,
    /// The problems.
    pub issues: Vec<Issue>,
    /// Human-readable reasons why objects may be missing. With such doubts, a start does not count as the deletion
    /// of objects that are not named.
    pub doubts: Vec<String>,
}

impl Manifests {
    /// Creates a source for a path: a folder, a file, or `-` for standard input.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }
}

impl Source for Manifests {
    async fn run(self, sink: mpsc::Sender<Batch>) -> Result<(), SourceError> {
        if is_stdin(&self.path) {
            return watch::run_stdin(sink).await;
        }
        watch::run(&self.path, sink).await
    }
}

/// Reads everything once.
///
/// # Errors
/// The path cannot be read at all. Problems inside are [`Loaded::issues`].
pub fn load(path: &Path) -> Result<Loaded, SourceError> {
    let unreadable = |source| SourceError::Unreadable {
        path: path.display().to_string(),
        source,
    };
    let mut catalog = Catalog::default();
    if is_stdin(path) {
        catalog = load_stdin().map_err(unreadable)?;
    } else {
        let root = Root::at(path).map_err(unreadable)?;
        let mut disk = Disk::default();
        let listing = root.list(&mut disk).map_err(unreadable)?;
        let notices = view::unlisted(&listing);
        catalog.set_unseen(view::unseen(&listing, &BTreeMap::new()));
        let files = listing.files.into_keys().map(|path| Question {
            is_link: listing.links.contains(&path),
            path,
        });
        let read = view::read_all(&root, &mut disk, files.collect());
        let changes = read.into_iter().map(|(path, _, change)| (display_name(&path), change));
        catalog.apply(changes, notices);
    }
    Ok(catalog.into_loaded())
}

/// Parses one text, like standard input.
pub fn parse(text: Vec<u8>) -> Loaded {
    from_stdin(text).into_loaded()
}

fn is_stdin(path: &Path) -> bool {
    path == Path::new(STDIN)
}

fn load_stdin() -> io::Result<Catalog> {
    Ok(from_stdin(read_limited(
        io::stdin().lock(),
        &Beat::default(),
    )?))
}

fn from_stdin(text: Vec<u8>) -> Catalog {
    let mut catalog = Catalog::default();
    catalog.apply(
        [(STDIN_NAME.into(), FileChange::Contents(text))],
        Vec::new(),
    );
    catalog
}
