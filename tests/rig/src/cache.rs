//! What tests build or download once: in the user's cache, for all checkouts.
//!
//! The folder is `$XDG_CACHE_HOME/kplane`, or `$HOME/.cache/kplane`. Each name in it has the versions and a sum of the
//! recipe, so that checkouts with different recipes do not use each other's programs. Something with its name is
//! complete, because it is moved there after it was made. One process makes it, and others wait.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::oci::Digest;

/// The part with the programs and images of clusters.
pub(crate) const CLUSTER: &str = "cluster";
/// The part with Kubernetes' own tests.
pub(crate) const E2E: &str = "e2e";
/// The part with the kernels of virtual machines.
pub(crate) const VM: &str = "vm";
/// The number of digits of a sum that are part of a name.
const SHOWN: usize = 12;

/// Returns a part of the cache, without symbolic links, because a node sees the folder and not the links.
///
/// # Errors
/// There is no home, or it is not writable.
pub(crate) fn folder(part: &str) -> Result<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = cache
        .filter(|path| path.is_absolute())
        .or_else(home)
        .context("neither XDG_CACHE_HOME nor HOME is set")?;
    let folder = cache.join("kplane").join(part);
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    fs::canonicalize(&folder).with_context(|| folder.display().to_string())
}

/// Returns a short sum of the parts of a recipe. Two lists of parts have the same sum only if they are equal.
pub(crate) fn sum<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> String {
    let mut all = Vec::new();
    for part in parts {
        let part = part.as_ref();
        all.extend(part.len().to_be_bytes());
        all.extend(part);
    }
    Digest::of(&all).hex().chars().take(SHOWN).collect()
}

/// Waits until no other process has the lock, and returns it. It ends with the file, also when this process is killed.
///
/// # Errors
/// The folder of the lock is not writable.
pub(crate) fn lock(path: &Path) -> Result<File> {
    let file = File::create(path).with_context(|| format!("create {}", path.display()))?;
    file.lock()
        .with_context(|| format!("wait for another process at {}", path.display()))?;
    Ok(file)
}

/// Makes a folder, unless it is there.
///
/// # Errors
/// `make` fails, or the parent is not writable.
pub(crate) fn made(folder: &Path, make: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if folder.exists() {
        return Ok(());
    }
    let _lock = lock(&beside(folder, ".lock"))?;
    if folder.exists() {
        return Ok(());
    }
    let fresh = empty(beside(folder, ".new"))?;
    make(&fresh)?;
    fs::rename(&fresh, folder).with_context(|| format!("name {}", folder.display()))
}

/// Returns a folder after everything in it has been removed.
///
/// # Errors
/// It is not writable.
pub(crate) fn empty(folder: PathBuf) -> Result<PathBuf> {
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    Ok(folder)
}

/// Returns a path with more at the end of its name.
fn beside(path: &Path, more: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(more);
    name.into()
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn equal_recipes_alone_have_the_same_sum() {
        assert_eq!(sum(["ab", "c"]), sum(["ab", "c"]));
        assert_ne!(sum(["ab", "c"]), sum(["a", "bc"]));
        assert_ne!(sum(["ab"]), sum(["ab", ""]));
    }

    #[test]
    fn a_folder_has_its_name_when_it_is_complete() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("a-1.2");
        let half = made(&folder, |fresh| {
            fs::write(fresh.join("half"), "")?;
            bail!("killed")
        });
        assert!(half.is_err() && !folder.exists());
        made(&folder, |fresh| Ok(fs::write(fresh.join("all"), "")?)).unwrap();
        assert!(folder.join("all").exists() && !folder.join("half").exists());
        made(&folder, |_| bail!("made twice")).unwrap();
    }
}
