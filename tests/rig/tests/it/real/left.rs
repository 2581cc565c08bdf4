//! Checks that nothing is left of a cluster when it ends, or when the process that holds it is killed.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
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

/// The things by which a cluster is found on the machine.
#[derive(Debug)]
pub(crate) struct Traces {
    folder: String,
    /// The beginning of the names of its cgroups.
    cgroups: String,
    /// All namespaces that its processes have, and this process has not.
    namespaces: BTreeSet<String>,
}

impl Traces {
    /// Finds the traces of a cluster that runs, with its folder and the process that holds it.
    pub(crate) fn of(folder: &Path, holder: u32) -> Result<Self> {
        let mut traces = Self {
            folder: folder.display().to_string(),
            cgroups: format!("kplane-rig-{holder}-"),
            namespaces: BTreeSet::new(),
        };
        for process in processes()? {
            if traces.are_of(&process) {
                traces.namespaces.extend(namespaces(&process));
            }
        }
        for own in [
            Path::new("/proc/self"),
            Path::new("/proc/thread-self"),
            Path::new("/proc/1"),
        ] {
            for namespace in namespaces(own) {
                traces.namespaces.remove(&namespace);
            }
        }
        // A node has six, and the control plane has a network.
        ensure!(traces.namespaces.len() > 6, "{:?}", traces.namespaces);
        ensure!(
            traces.check().is_err(),
            "a running cluster leaves no traces"
        );
        Ok(traces)
    }

    /// Waits until nothing is left.
    pub(crate) fn vanish(&self) -> Result<()> {
        eventually(DEADLINE, "nothing is left of the cluster", || self.check())
    }

    fn check(&self) -> Result<()> {
        for process in processes()? {
            let own = namespaces(&process);
            let kept = own.iter().find(|it| self.namespaces.contains(*it));
            ensure!(
                kept.is_none() && !self.are_of(&process),
                "{} runs, in {kept:?}",
                process.display()
            );
        }
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        ensure!(!mounts.contains(&self.folder), "{mounts}");
        for hierarchy in fs::read_dir("/sys/fs/cgroup")? {
            for entry in fs::read_dir(hierarchy?.path()).into_iter().flatten() {
                let path = entry?.path().display().to_string();
                ensure!(!path.contains(&self.cgroups), "{path} is there");
            }
        }
        ensure!(
            !Path::new(&self.folder).exists(),
            "{} is there",
            self.folder
        );
        Ok(())
    }

    /// Returns whether a process is the cluster's.
    fn are_of(&self, process: &Path) -> bool {
        // A process that has just ended has nothing to read.
        let read = |file| fs::read_to_string(process.join(file)).unwrap_or_default();
        read("cgroup").contains(&self.cgroups) || read("cmdline").contains(&self.folder)
    }
}

/// Returns the folders of all processes.
fn processes() -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        all.extend(path.join("cgroup").exists().then_some(path));
    }
    // A link to this process.
    all.retain(|path| !path.ends_with("self") && !path.ends_with("thread-self"));
    Ok(all)
}

/// Returns the namespaces of a process, unless it has ended.
fn namespaces(process: &Path) -> Vec<String> {
    let kinds = ["net", "mnt", "pid", "uts", "ipc", "cgroup"];
    kinds
        .map(|kind| fs::read_link(process.join("ns").join(kind)))
        .into_iter()
        .flatten()
        .map(|link| link.display().to_string())
        .collect()
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
    let mut command = Command::new(env::current_exe()?);
    command.arg("real").env(HOLDER, "1").stdout(Stdio::piped());
    let mut holder = Process::start(command)?;
    let output = holder.stdout.take().context("it was asked for")?;
    let mut folder = String::new();
    BufReader::new(output).read_line(&mut folder)?;
    ensure!(!folder.is_empty(), "the holder has no cluster");
    let traces = Traces::of(Path::new(folder.trim()), holder.id())?;
    // As a crash would: the program cannot clean up.
    drop(holder);
    traces.vanish()
}
