//! Packages of Debian's archive, unpacked into a folder and not installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::process::output;

/// Downloads a package and unpacks it into a folder, which is created if it is missing.
///
/// # Errors
/// This is no Debian system, the archive does not have the package, or the folder is not writable.
pub fn unpack(package: &str, into: &Path) -> Result<()> {
    fs::create_dir_all(into).with_context(|| format!("create {}", into.display()))?;
    let fresh = tempfile::tempdir_in(into).context("a folder for the download")?;
    // Package lists that are older than the archive name files that are gone from it.
    let archive = download(fresh.path(), package).or_else(|_| {
        update()?;
        download(fresh.path(), package)
    })?;
    let mut unpack = Command::new("dpkg-deb");
    unpack.arg("--extract").arg(&archive).arg(into);
    output(unpack).map(drop)
}

/// Gets the archive's list of packages.
///
/// # Errors
/// `apt-get update` fails.
pub(crate) fn update() -> Result<()> {
    let mut update = Command::new("apt-get");
    update.args(["-qq", "update"]);
    output(update)
        .context("ask the archive for its packages")
        .map(drop)
}

fn download(into: &Path, package: &str) -> Result<PathBuf> {
    let mut download = Command::new("apt-get");
    download
        .current_dir(into)
        .args(["-qq", "download", package]);
    output(download)?;
    let mut files = into.read_dir().context("list what was downloaded")?;
    let file = files
        .next()
        .context("apt-get has downloaded nothing")??
        .path();
    ensure!(
        file.extension().is_some_and(|it| it == "deb"),
        "{}",
        file.display()
    );
    Ok(file)
}
