//! Folders of one process, so that two runs of the tests at a time do not write the same files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process;

use anyhow::{Context as _, Result};

/// Returns a new folder that no other process uses: `NAME-PID` in `parent`. The caller removes it. First removes such
/// folders of processes that have ended without doing so.
///
/// # Errors
/// `parent` is not writable.
pub fn folder(parent: &Path, name: &str) -> Result<PathBuf> {
    fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    let prefix = format!("{name}-");
    let own = process::id();
    for entry in parent.read_dir().with_context(|| parent.display().to_string())? {
        let entry = entry?;
        let file = entry.file_name();
        let pid = file.to_str().and_then(|file| file.strip_prefix(&prefix));
        let Some(pid) = pid.and_then(|pid| pid.parse::<u32>().ok()) else {
            continue;
        };
        if pid == own || !Path::new("/proc").join(pid.to_string()).exists() {
            // Another process may remove it at the same time.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    let folder = parent.join(format!("{prefix}{own}"));
    fs::create_dir(&folder).with_context(|| format!("create {}", folder.display()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_ended_processes_are_removed_and_no_others() {
        let parent = tempfile::tempdir().unwrap();
        // No process has this id: the kernel's largest is 2^22.
        for name in ["x-4194305", "x-1", "y-4194305", "x-file"] {
            fs::create_dir(parent.path().join(name)).unwrap();
        }
        let own = folder(parent.path(), "x").unwrap();
        let again = folder(parent.path(), "x").unwrap();
        assert_eq!(own, again);
        let left = |name: &str| parent.path().join(name).exists();
        assert!(!left("x-4194305") && left("x-1") && left("y-4194305") && left("x-file"));
    }
}
