//! Checks that nothing is left of a cluster when it ends, or when the process that holds it is killed.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_rig::process::Process;
use kplane_rig::real::{Options, Proxy, RealCluster};
use kplane_rig::userns;
use kplane_rig::wait::eventually;

/// The kernel removes what nobody uses a moment later.
const DEADLINE: Duration = Duration::from_secs(20);
/// Variable that makes this program hold a cluster until it is killed.
const HOLDER: &str = "KPLANE_RIG_HOLDER";

/// The things that a cluster could leave on the machine.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Everything {
    /// Ids of all processes that were started by a cluster.
    processes: BTreeSet<String>,
    mounts: BTreeSet<String>,
    cgroups: BTreeSet<String>,
    /// All namespaces that a process has.
    namespaces: BTreeSet<String>,
}

impl Everything {
    pub(crate) fn now() -> Result<Self> {
        let mut now = Self {
            processes: BTreeSet::new(),
            mounts: fs::read_to_string("/proc/self/mounts")?
                .lines()
                .map(str::to_owned)
                .collect(),
            cgroups: cgroups()?,
            namespaces: BTreeSet::new(),
        };
        for entry in fs::read_dir("/proc")? {
            let entry = entry?;
            let id = entry.file_name().to_string_lossy().into_owned();
            // A process that has just ended has nothing to read.
            let command = fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
            if command.contains("kplane-real-") {
                now.processes.insert(id);
            }
            for kind in ["net", "mnt", "pid", "uts", "ipc", "cgroup"] {
                let link = fs::read_link(entry.path().join("ns").join(kind));
                now.namespaces
                    .extend(link.map(|link| link.display().to_string()));
            }
        }
        Ok(now)
    }

    /// Waits until there is nothing that there was not before.
    pub(crate) fn is_all_there_is(&self) -> Result<()> {
        eventually(DEADLINE, "nothing is left of the cluster", || self.check())
    }

    /// Fails if there is something that there was not before.
    fn check(&self) -> Result<()> {
        let now = Self::now()?;
        let more = |now: &BTreeSet<String>, before| {
            let all: Vec<_> = now.difference(before).cloned().collect();
            ensure!(all.is_empty(), "{all:?}");
            Ok(())
        };
        more(&now.processes, &self.processes)?;
        more(&now.mounts, &self.mounts)?;
        more(&now.cgroups, &self.cgroups)?;
        more(&now.namespaces, &self.namespaces)
    }
}

/// Returns the folders of the rig in all hierarchies.
fn cgroups() -> Result<BTreeSet<String>> {
    let mut all = BTreeSet::new();
    for hierarchy in fs::read_dir("/sys/fs/cgroup")? {
        for entry in fs::read_dir(hierarchy?.path()).into_iter().flatten() {
            let path = entry?.path().display().to_string();
            all.extend(path.contains("kplane-rig-").then_some(path));
        }
    }
    Ok(all)
}

/// Returns whether this process only holds a cluster.
pub(crate) fn is_holder() -> bool {
    env::var_os(HOLDER).is_some()
}

/// Holds a cluster of one node until this process is killed.
pub(crate) fn hold() -> ExitCode {
    let cluster = userns::isolate().and_then(|_| {
        RealCluster::start(&Options {
            nodes: 1,
            proxy: Proxy::None,
            ..Options::default()
        })
    });
    match cluster {
        Ok(cluster) => {
            println!("{}", cluster.folder().display());
            loop {
                std::thread::park();
            }
        }
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

pub(crate) fn the_end_of_the_holding_process_ends_everything() -> Result<()> {
    let before = Everything::now()?;
    let mut command = Command::new(env::current_exe()?);
    command.env(HOLDER, "1").stdout(Stdio::piped());
    let mut holder = Process::start(command)?;
    let output = holder.stdout.take().context("it was asked for")?;
    let mut folder = String::new();
    BufReader::new(output).read_line(&mut folder)?;
    ensure!(!folder.is_empty(), "the holder has no cluster");
    ensure!(before.check().is_err(), "nothing was started");
    // As a crash would: the program cannot clean up.
    drop(holder);
    before.is_all_there_is()?;
    ensure!(!Path::new(folder.trim()).exists(), "{folder} is left");
    Ok(())
}
