//! A node as a machine of its own: namespaces, an init, file systems, and a way in.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::cgroups::Cgroups;
use crate::cluster::guard::{self, Guard};
use crate::netns::NetNs;
use crate::process::{self, Process};
use crate::wait::eventually;

const INIT: &str = include_str!("init.sh");
/// Longest wait for a node's init, on a busy machine.
const READY: Duration = Duration::from_secs(30);

/// A running machine. Dropping it kills every process in it, and removes its namespaces and mounts.
#[derive(Debug)]
pub(super) struct Machine {
    // Fields drop in order: the init takes all processes with it, and then their cgroups are empty.
    _init: Process,
    guard: Guard,
    cgroups: Cgroups,
    pid: u32,
    ns: NetNs,
}

/// The fixed properties of a machine.
pub(super) struct Setup<'a> {
    pub(super) name: &'a str,
    /// The folder of its state. What its programs write elsewhere is kept there, too.
    pub(super) folder: &'a Path,
    /// Folders of this machine that its programs read.
    pub(super) shared: &'a [PathBuf],
}

impl Machine {
    /// Starts a machine in a network namespace.
    ///
    /// # Errors
    /// The process is not root, or the kernel forbids a namespace; the message has the output of the node's init.
    pub(super) fn start(setup: &Setup<'_>, ns: NetNs) -> Result<Self> {
        let folder = setup.folder;
        for name in ["root", "changes", "work", "kubelet", "containerd", "logs"] {
            let path = folder.join(name);
            fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
        }
        let script = folder.join("init.sh");
        fs::write(&script, INIT).with_context(|| format!("write {}", script.display()))?;
        let noted = folder.join("init");
        if noted.exists() {
            fs::remove_file(&noted).with_context(|| format!("remove {}", noted.display()))?;
        }
        let cgroups = Cgroups::new(setup.name)?;
        let guard = Guard::new(&ns)?;
        let log = folder.join("logs/init.log");
        let shared: Vec<_> = setup.shared.iter().map(|it| it.to_string_lossy()).collect();
        let namespaces = ["--mount", "--uts", "--ipc", "--pid", "--cgroup"];
        let mut command = shell(&cgroups, &log)?;
        command
            .args(["unshare", "--fork", "--kill-child"])
            .args(namespaces)
            .arg("sh")
            .arg(&script)
            .env("NODE", setup.name)
            .env("FOLDER", folder)
            .env("SHARED", shared.join("\n"))
            .env("HIERARCHIES", cgroups.controllers());
        let mut init = guard.start(command)?;
        let pid = eventually(READY, "the node's init is ready", || {
            if let Ok(Some(status)) = init.try_wait() {
                return Ok(Err(status));
            }
            let text = fs::read_to_string(&noted).map_err(|error| error.to_string())?;
            text.trim().parse().map(Ok).map_err(|_| text)
        });
        let said = || format!("its output is {:?}", process::last_words(&log));
        let pid = match pid.with_context(said)? {
            Ok(pid) => pid,
            Err(status) => bail!("the init of {} has ended: {status}; {}", setup.name, said()),
        };
        Ok(Self {
            _init: init,
            guard,
            cgroups,
            pid,
            ns,
        })
    }

    /// Returns the machine's network namespace.
    pub(super) fn ns(&self) -> &NetNs {
        &self.ns
    }

    /// Returns the file of a process' namespace, by the number that the process has in the machine.
    pub(super) fn namespace(&self, pid: u32, kind: &str) -> PathBuf {
        format!("/proc/{}/root/proc/{pid}/ns/{kind}", self.pid).into()
    }

    /// Returns a path inside the machine, as others reach it.
    pub(super) fn path(&self, inside: &str) -> PathBuf {
        format!("/proc/{}/root{inside}", self.pid).into()
    }

    /// Starts a daemon inside, which is killed with its handle.
    ///
    /// # Errors
    /// The program could not be started.
    pub(super) fn daemon(
        &self,
        program: &Path,
        log: &Path,
        with: impl FnOnce(&mut Command),
    ) -> Result<Process> {
        let mut command = shell(&self.cgroups, log)?;
        command.arg("nsenter").args(self.enter());
        // The second program dies with the first, which is what the handle kills.
        command.args(["setpriv", "--pdeathsig", "KILL", "--"]);
        command.arg(program);
        with(&mut command);
        self.guard.start(command)
    }

    /// Returns a command that runs a program inside, when it is started in the machine's network namespace.
    pub(super) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(self.enter()).arg(program);
        command
    }

    fn enter(&self) -> Vec<String> {
        let kinds = ["--mount", "--uts", "--ipc", "--pid", "--cgroup"];
        let mut words = vec!["--target".to_owned(), self.pid.to_string()];
        words.extend(kinds.map(str::to_owned));
        words.push("--".to_owned());
        words
    }
}

/// Returns the start of a command that joins cgroups, appends its output to a file, and then becomes the
/// program given as next arguments.
fn shell(cgroups: &Cgroups, log: &Path) -> Result<Command> {
    let script = format!("{} exec \"$@\"", cgroups.join());
    let mut command = guard::command("sh");
    process::append(&mut command, log)?;
    // No proxy and no setting of cargo shall reach a node's programs.
    command.env_clear().env("HOME", "/root");
    if let Some(path) = std::env::var_os("PATH") {
        command.env("PATH", path);
    }
    command.args(["-c", &script, "sh"]);
    Ok(command)
}
