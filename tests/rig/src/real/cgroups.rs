//! A node's own part of each hierarchy of cgroups (version 1).

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::wait::eventually;

/// The beginning of the folders' names, before the id of the process that made them.
const PREFIX: &str = "kplane-rig-";
/// The number of the next node of this process, because clusters may have nodes of the same name.
static NUMBER: AtomicU32 = AtomicU32::new(1);
/// Longest wait for killed processes to leave.
const GRACE: Duration = Duration::from_secs(20);
/// Settings of a new folder of the cpuset hierarchy that must be written before a process can join.
const CPUSET: [&str; 2] = ["cpuset.cpus", "cpuset.mems"];

/// Folders of a node, one in each hierarchy. Dropping them removes them, after their processes have ended.
#[derive(Debug)]
pub(super) struct Cgroups {
    hierarchies: Vec<Hierarchy>,
    name: String,
}

/// A mounted hierarchy.
#[derive(Debug)]
struct Hierarchy {
    at: PathBuf,
    /// Its controllers, such as `cpu,cpuacct`, or its name, such as `name=systemd`.
    controllers: String,
}

impl Cgroups {
    /// Creates the folders of a node.
    ///
    /// # Errors
    /// The machine has cgroups of version 2 only, or the process may not create them.
    pub(super) fn new(node: &str) -> Result<Self> {
        let hierarchies = mounted()?;
        ensure!(
            hierarchies.iter().any(|it| it.controllers == "memory"),
            "a real cluster needs cgroups of version 1, which this machine does not mount: start its kernel with \
             systemd.unified_cgroup_hierarchy=0"
        );
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}{number}-{node}", prefix());
        let cgroups = Self { hierarchies, name };
        for (folder, parent) in cgroups.folders().zip(&cgroups.hierarchies) {
            fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
            for setting in CPUSET {
                if let Ok(value) = fs::read(parent.at.join(setting)) {
                    fs::write(folder.join(setting), value)
                        .with_context(|| format!("set {setting} of {}", folder.display()))?;
                }
            }
        }
        Ok(cgroups)
    }

    /// Returns the controllers of each hierarchy, one hierarchy a line.
    pub(super) fn controllers(&self) -> String {
        let all: Vec<&str> = self.hierarchies.iter().map(|it| &*it.controllers).collect();
        all.join("\n")
    }

    /// Returns a command of the shell by which the shell joins.
    pub(super) fn join(&self) -> String {
        let mut text = String::new();
        for folder in self.folders() {
            text += &format!("echo $$ > '{}/cgroup.procs'; ", folder.display());
        }
        text
    }

    fn folders(&self) -> impl Iterator<Item = PathBuf> {
        self.hierarchies.iter().map(|it| it.at.join(&self.name))
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        let removed = eventually(GRACE, "the node's processes leave their cgroups", || {
            self.folders().try_for_each(|folder| remove(&folder))
        });
        if let Err(error) = removed {
            eprintln!("cannot remove the cgroups of {}: {error:#}", self.name);
        }
    }
}

/// Returns the prefix of the names of this process' cgroups.
pub(super) fn prefix() -> String {
    format!("{PREFIX}{}-", std::process::id())
}

/// Returns the folders where hierarchies are mounted.
pub(super) fn mounts() -> Result<Vec<PathBuf>> {
    Ok(mounted()?.into_iter().map(|it| it.at).collect())
}

fn mounted() -> Result<Vec<Hierarchy>> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("list mounts")?;
    Ok(hierarchies(&mounts))
}

/// Returns the hierarchies among the lines of a mountinfo, each once.
fn hierarchies(mountinfo: &str) -> Vec<Hierarchy> {
    /// Options of the mount that are no controllers.
    const OTHERS: [&str; 4] = ["rw", "ro", "xattr", "clone_children"];
    let mut seen = BTreeSet::new();
    mountinfo
        .lines()
        .filter_map(|line| {
            let (mount, kind) = line.split_once(" - cgroup ")?;
            let at = mount.split_whitespace().nth(4)?;
            let options: Vec<&str> = kind
                .split_whitespace()
                .nth(1)?
                .split(',')
                .filter(|option| !OTHERS.contains(option) && !option.starts_with("release_agent="))
                .collect();
            let controllers = options.join(",");
            seen.insert(controllers.clone()).then(|| Hierarchy {
                at: at.into(),
                controllers,
            })
        })
        .collect()
}

/// Removes a folder and those below. A folder with a process cannot be removed.
fn remove(folder: &Path) -> Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries.with_context(|| folder.display().to_string())?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove(&entry.path())?;
        }
    }
    fs::remove_dir(folder).with_context(|| folder.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_are_found_among_mounts() {
        let text = "30 24 0:26 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n\
            31 24 0:27 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
            32 24 0:27 / /elsewhere rw - cgroup cgroup rw,xattr,name=systemd\n\
            33 24 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let found: Vec<_> = hierarchies(text).into_iter().map(|it| it.controllers).collect();
        assert_eq!(found, ["cpu,cpuacct", "name=systemd"]);
    }
}
