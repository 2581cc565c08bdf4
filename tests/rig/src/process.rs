//! Child processes that do not outlive their handle.

use std::borrow::BorrowMut;
use std::fs::{self, File};
use std::ops::{Deref, DerefMut};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

use crate::wait::eventually;

/// Lines of a log that are quoted when its process has failed.
const LOG_LINES: usize = 20;

/// A running child process. Dropping it kills and reaps the process.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
}

impl Process {
    /// Starts a program in the calling thread's namespaces.
    ///
    /// # Errors
    /// The program could not be started.
    pub fn start(mut command: Command) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().with_context(|| format!("start {name}"))?;
        Ok(Self { name, child })
    }

    /// Sends a signal. After SIGSTOP, waits until all threads stand: on a busy machine others go on for a while.
    ///
    /// # Errors
    /// The process has ended already.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.child.id().try_into()?);
        kill(pid, signal).with_context(|| format!("send {signal} to {}", self.name))?;
        if signal == Signal::SIGSTOP {
            let stands = WaitPidFlag::WSTOPPED | WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
            waitid(Id::Pid(pid), stands)
                .with_context(|| format!("wait until {} stands", self.name))?;
        }
        Ok(())
    }

    /// Asks the process to end (SIGTERM) and waits for that.
    ///
    /// # Errors
    /// The process has not ended within `grace`.
    pub fn terminate(mut self, grace: Duration) -> Result<ExitStatus> {
        self.signal(Signal::SIGTERM)?;
        let what = format!("{} ends", self.name);
        eventually(grace, &what, || match self.child.try_wait() {
            Ok(Some(status)) => Ok(status),
            Ok(None) => Err("it is running".to_owned()),
            Err(error) => Err(error.to_string()),
        })
    }
}

impl Deref for Process {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.child
    }
}

impl DerefMut for Process {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.child
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only when the process has been reaped already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a command without input, whose output is appended to a file. It does not get the Ctrl-C of
/// this process' terminal.
///
/// # Errors
/// The file could not be opened.
pub fn logging(program: &Path, log: &Path) -> Result<Command> {
    let mut command = Command::new(program);
    append(&mut command, log)?;
    command.process_group(0);
    Ok(command)
}

/// Gives a command no input, and appends its output to a file.
///
/// # Errors
/// The file could not be opened.
pub(crate) fn append(command: &mut Command, log: &Path) -> Result<()> {
    let file = File::options()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("open {}", log.display()))?;
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    Ok(())
}

/// Returns the last lines of a log, for messages.
pub fn last_words(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
}

/// Runs a program to its end and returns its standard output.
///
/// # Errors
/// The program could not be started, or failed; the message has its standard error and output.
pub fn output(mut command: impl BorrowMut<Command>) -> Result<String> {
    finish(command.borrow_mut().stdin(Stdio::null()))
}

/// Runs a program with its own standard input to its end, and returns its standard output.
///
/// # Errors
/// As [`output`].
pub(crate) fn finish(command: &mut Command) -> Result<String> {
    let shown = format!("{command:?}");
    let output = command.output().with_context(|| format!("start {shown}"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let stdout = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "{shown}: {}: {}",
        output.status,
        [stderr.trim_end(), stdout.trim_end()].join("\n").trim()
    );
    String::from_utf8(output.stdout).with_context(|| format!("output of {shown}"))
}
