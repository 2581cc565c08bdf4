//! A machine with Debian's stock kernel, which has what this machine's kernel may lack: IPVS, ipset
//! and dummy devices. Plain emulation by qemu, so that neither root nor `/dev/kvm` is needed.
//!
//! The guest sees this machine's file system (read-only below an overlay that is thrown away), so
//! programs run there by the path that they have here:
//!
//! ```no_run
//! use std::{process::Command, time::Duration};
//! use kplane_rig::vm::{Run, Vm};
//!
//! # fn main() -> anyhow::Result<()> {
//! let vm = Vm::ensure()?;
//! let mut command = Command::new("ipvsadm");
//! command.arg("-Ln");
//! let code = vm.run(&Run::new(&command, Duration::from_secs(60)))?;
//! # Ok(())
//! # }
//! ```
//!
//! [`Vm::ensure`] puts the kernel into `~/.cache/kplane/vm`, once: 70 MB from Debian's archive
//! by `apt-get`, unpacked. The programs needed are in [`PROGRAMS`]. From start to the command's first line
//! it takes 2.4 s of this machine's CPU; everything inside runs some ten times slower than outside.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::privilege;

mod initramfs;
mod kernel;
mod qemu;
mod script;

use kernel::Kernel;
use qemu::{Console, Qemu};

/// Variable that is set inside a machine.
const INSIDE: &str = "KPLANE_VM";
/// Variable that runs tests in a machine ([`is_wanted`]), if set to anything but `0` or nothing.
pub const IN_VM: &str = "KPLANE_IN_VM";
/// Variable that runs all tests in a machine ([`runs_all`]), if set to anything but `0` or nothing.
pub const ALL: &str = "KPLANE_VM_ALL";
/// The programs that a machine needs, and Debian's packages that contain them.
pub const PROGRAMS: [(&str, &str); 6] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("depmod", "kmod"),
    ("xz", "xz-utils"),
    ("ipvsadm", "ipvsadm"),
    ("ipset", "ipset"),
];

/// Returns whether this process runs in such a machine.
pub fn is_inside() -> bool {
    privilege::is_set(INSIDE)
}

/// Returns whether this process should run its tests in a machine ([`IN_VM`]) and is not in one yet.
pub fn is_wanted() -> bool {
    privilege::is_set(IN_VM) && !is_inside()
}

/// Returns whether to run tests that take long in a machine, too ([`ALL`]).
pub fn runs_all() -> bool {
    privilege::is_set(ALL)
}

/// Runs this program again in a fresh machine, with the same arguments; see [`or_skip`].
pub fn run_myself(deadline: Duration) -> ExitCode {
    or_skip(|| {
        let mut again = Command::new(env::current_exe().context("this program's path")?);
        again.args(env::args_os().skip(1));
        Vm::ensure()?.run(&Run::new(&again, deadline))
    })
}

/// Runs a function that needs a machine, and returns an exit code. Where a machine is impossible, the
/// function fails in CI, and prints a line elsewhere.
pub fn or_skip(run: impl FnOnce() -> Result<u8>) -> ExitCode {
    if let (Some((program, package)), false) = (missing(), privilege::is_strict()) {
        privilege::skip(&format!(
            "{program} is not on the PATH: apt-get install {package}"
        ));
        return ExitCode::SUCCESS;
    }
    run().map_or_else(
        |error| {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        },
        ExitCode::from,
    )
}

/// Returns the program of [`PROGRAMS`] that is missing on this machine, with its package.
pub fn missing() -> Option<(&'static str, &'static str)> {
    PROGRAMS.into_iter().find(|(program, _)| !privilege::is_on_path(program))
}

/// The parts of a machine; any number of machines can be started from it.
#[derive(Debug)]
pub struct Vm {
    kernel: Kernel,
    /// Virtual processors. With two, work takes twice the time of this machine's processors.
    pub cpus: u8,
    /// Memory in MiB; this machine provides it as the guest uses it.
    pub memory: u16,
    /// Whether the guest may open connections. It reaches what the starting thread's network namespace
    /// reaches, at the same addresses.
    pub network: bool,
}

/// One start of a machine, which runs one command and ends.
#[derive(Debug)]
pub struct Run<'a> {
    command: &'a Command,
    deadline: Duration,
    writable: Option<&'a Path>,
}

impl<'a> Run<'a> {
    /// Creates a run of a command with its arguments, its folder (the caller's by default) and the
    /// variables set for it. Other variables are passed on only when they concern cargo, tests or the
    /// terminal. The machine is killed when the deadline passes.
    pub fn new(command: &'a Command, deadline: Duration) -> Self {
        Self {
            command,
            deadline,
            writable: None,
        }
    }

    /// Keeps what the command writes below this folder of this machine. All other changes are lost.
    #[must_use]
    pub fn writable(mut self, folder: &'a Path) -> Self {
        self.writable = Some(folder);
        self
    }
}

impl Vm {
    /// Finds the kernel, and fetches it first if necessary. Prints its progress on standard error.
    ///
    /// # Errors
    /// A program is missing, a download failed, or the cache is not writable.
    pub fn ensure() -> Result<Self> {
        if let Some((program, package)) = missing() {
            anyhow::bail!("{program} is not on the PATH: apt-get install {package}");
        }
        Ok(Self {
            kernel: Kernel::ensure()?,
            cpus: 1,
            memory: 2048,
            network: false,
        })
    }

    /// Returns the guest's kernel, such as `6.1.0-56-amd64`.
    pub fn kernel(&self) -> &str {
        &self.kernel.version
    }

    /// Starts a machine, runs a command in it and passes on its output. Returns its exit code.
    ///
    /// # Errors
    /// The machine did not start, died, or was killed at the deadline; with its last output.
    pub fn run(&self, run: &Run<'_>) -> Result<u8> {
        let share = tempfile::tempdir().context("a folder shared with the machine")?;
        self.prepare(share.path(), run, "run")?;
        let machine = self.machine(share.path(), Console::Pipes, run.writable);
        machine.run(Some(run.deadline))
    }

    /// Starts a machine with a shell on this terminal, until the shell ends.
    ///
    /// # Errors
    /// See [`Vm::run`].
    pub fn shell(&self, writable: Option<&Path>) -> Result<()> {
        let share = tempfile::tempdir().context("a folder shared with the machine")?;
        let mut shell = Command::new(env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into()));
        shell.env("PS1", "vm# ");
        let mut run = Run::new(&shell, Duration::MAX);
        run.writable = writable;
        self.prepare(share.path(), &run, "shell")?;
        let machine = self.machine(share.path(), Console::Terminal, writable);
        machine.run(None).map(drop)
    }

    fn prepare(&self, share: &Path, run: &Run<'_>, mode: &str) -> Result<()> {
        let here = env::current_dir().context("the current folder")?;
        let writable = run.writable.map(fs::canonicalize).transpose()?;
        if let Some(folder) = &writable {
            ensure!(folder.is_dir(), "{} is no folder", folder.display());
        }
        let settings = script::Settings {
            modules: &self.kernel.modules(),
            mode,
            network: self.network,
            writable: writable.as_deref(),
        };
        fs::write(share.join("settings"), settings.text()?)?;
        fs::write(share.join("main"), script::MAIN)?;
        let command = script::command(run.command, &here, INSIDE)?;
        fs::write(share.join("command"), command).context("write the command to run")
    }

    fn machine<'a>(
        &'a self,
        share: &'a Path,
        console: Console,
        writable: Option<&'a Path>,
    ) -> Qemu<'a> {
        Qemu {
            image: self.kernel.image(),
            initramfs: self.kernel.initramfs(),
            cpus: self.cpus,
            memory: self.memory,
            console,
            network: self.network,
            share,
            writable: writable.map(PathBuf::from),
        }
    }
}
