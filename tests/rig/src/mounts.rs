//! Mounts that only the calling thread and its children see.

use std::path::Path;

use anyhow::{Context as _, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

/// Gives the calling thread mounts of its own, for good: what it mounts from now on, no other program sees.
///
/// # Errors
/// The kernel forbids it.
pub fn separate() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context("the kernel forbids mounts of its own")?;
    let none = None::<&str>;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(none, "/", none, private, none).context("make mounts private")
}

/// Puts an empty writable folder in the place of a folder. Call [`separate`] first.
///
/// # Errors
/// The folder does not exist, or the kernel forbids it.
pub fn empty(folder: impl AsRef<Path>) -> Result<()> {
    let folder = folder.as_ref();
    let (kind, none) = (Some("tmpfs"), None::<&str>);
    mount(kind, folder, kind, MsFlags::empty(), none)
        .with_context(|| format!("mount an empty {}", folder.display()))
}
