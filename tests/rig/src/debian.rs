//! Packages of Debian's archive, unpacked into a folder and not installed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};

use crate::cache;
use crate::process::output;

/// Returns a folder of the cache into which packages are unpacked, once for each of their versions.
///
/// # Errors
/// This is no Debian system, the archive does not have a package, or the cache is not writable.
pub fn unpacked(packages: &[&str]) -> Result<PathBuf> {
    let versions = versions(packages)?;
    let name = format!("debian-{}", cache::sum(&versions));
    let folder = cache::folder(cache::CLUSTER)?.join(name);
    cache::made(&folder, |fresh| {
        eprintln!("fetching {}", versions.join(", "));
        packages.iter().try_for_each(|package| unpack(package, fresh).map(drop))
    })?;
    Ok(folder)
}

/// Returns packages with the versions that the archive has, such as `runc=1.1.5+ds1-1`.
///
/// # Errors
/// This is no Debian system, or the archive does not have a package.
fn versions(packages: &[&str]) -> Result<Vec<String>> {
    static KNOWN: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    // apt-cache reads all of its lists each time, which takes half a second.
    if packages.iter().any(|package| !known.contains_key(*package)) {
        let found = candidates(packages).or_else(|_| {
            update()?;
            candidates(packages)
        })?;
        known.extend(found);
    }
    let named = |package: &&str| Some(format!("{package}={}", known.get(*package)?));
    Ok(packages.iter().filter_map(named).collect())
}

/// Returns the versions that the machine's list of packages has.
fn candidates(packages: &[&str]) -> Result<BTreeMap<String, String>> {
    let mut ask = Command::new("apt-cache");
    ask.arg("policy").args(packages).env("LC_ALL", "C");
    let found = parsed(&output(ask)?);
    for package in packages {
        ensure!(
            found.contains_key(*package),
            "the archive has no package {package}"
        );
    }
    Ok(found)
}

/// Returns packages and the versions to be installed, from what `apt-cache policy` prints.
fn parsed(policy: &str) -> BTreeMap<String, String> {
    let (mut package, mut found) = ("", BTreeMap::new());
    for line in policy.lines() {
        if let Some(version) = line.trim_start().strip_prefix("Candidate: ") {
            let exists = version != "(none)";
            found.extend(exists.then(|| (package.to_owned(), version.to_owned())));
        } else if !line.starts_with(' ') {
            package = line.trim_end_matches(':');
        }
    }
    found
}

/// Downloads a package and unpacks it into a folder, which is created if it is missing. Returns the package's version.
///
/// # Errors
/// This is no Debian system, the archive does not have the package, or the folder is not writable.
pub(crate) fn unpack(package: &str, into: &Path) -> Result<String> {
    fs::create_dir_all(into).with_context(|| format!("create {}", into.display()))?;
    let fresh = tempfile::tempdir_in(into).context("a folder for the download")?;
    // Package lists that are older than the archive name files that are gone from it.
    let archive = download(fresh.path(), package).or_else(|_| {
        update()?;
        download(fresh.path(), package)
    })?;
    let mut unpack = Command::new("dpkg-deb");
    unpack.arg("--extract").arg(&archive).arg(into);
    output(unpack)?;
    let mut field = Command::new("dpkg-deb");
    field.arg("--field").arg(&archive).arg("Version");
    Ok(output(field)?.trim().to_owned())
}

/// Gets the archive's list of packages.
///
/// # Errors
/// `apt-get update` fails.
pub(crate) fn update() -> Result<()> {
    let mut update = Command::new("apt-get");
    update.args(["-qq", "update"]);
    output(update).context("ask the archive for its packages").map(drop)
}

fn download(into: &Path, package: &str) -> Result<PathBuf> {
    let mut download = Command::new("apt-get");
    download.current_dir(into).args(["-qq", "download", package]);
    output(download)?;
    let mut files = into.read_dir().context("list what was downloaded")?;
    let file = files.next().context("apt-get has downloaded nothing")??.path();
    ensure!(
        file.extension().is_some_and(|it| it == "deb"),
        "{}",
        file.display()
    );
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_those_that_would_be_installed() {
        let policy = "runc:\n  Installed: 1.0\n  Candidate: 1.1.5+ds1-1\n  Version table:\n     1.1.5+ds1-1 500\n\
                      gone:\n  Installed: (none)\n  Candidate: (none)\n";
        let found = parsed(policy);
        assert_eq!(found.len(), 1);
        assert_eq!(found["runc"], "1.1.5+ds1-1");
    }
}
