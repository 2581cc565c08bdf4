//! The limit of what the compiler keeps to be faster the next time: it never removes what belongs to older states of
//! the workspace.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::cargo::programs;

/// Size of the folder in bytes from which it is removed. One state of the workspace takes 6 GiB.
const MOST: u64 = 16 << 30;

/// Removes the compiler's folder if it is too large. The next build is a first one then.
///
/// # Errors
/// The folder cannot be removed.
pub(super) fn prune() -> Result<()> {
    let folder = programs("dev")?.join("incremental");
    if size(&folder) > MOST {
        println!("removing {}, which is too large", folder.display());
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    Ok(())
}

/// Returns the size of a folder in bytes. What cannot be read counts as empty.
fn size(folder: &Path) -> u64 {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(of) if of.is_dir() => size(&entry.path()),
            Ok(of) => of.len(),
            Err(_) => 0,
        })
        .sum()
}
