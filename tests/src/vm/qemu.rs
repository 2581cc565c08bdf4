//! A running machine: one process of qemu.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use crate::cluster::guard;
use crate::process::Process;

/// What the kernel is told. Errors end the machine; nobody attacks it, so it need not be slowed down
/// by defences; emulated clocks are never wrong.
const KERNEL_OPTIONS: &str = "console=ttyS0 quiet loglevel=5 panic=-1 oops=panic mitigations=off \
    nokaslr audit=0 apparmor=0 selinux=0 random.trust_cpu=on tsc=reliable";
/// Between two looks whether it has ended.
const PAUSE: Duration = Duration::from_millis(20);
/// So much of what the kernel said is shown when something went wrong.
const LAST_WORDS: usize = 4000;

/// Where the guest's command reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Console {
    /// Its output comes out of pipes; it reads nothing.
    Pipes,
    /// This process' terminal.
    Terminal,
}

/// How to start one.
#[derive(Debug)]
pub(super) struct Qemu<'a> {
    pub(super) image: PathBuf,
    pub(super) initramfs: PathBuf,
    pub(super) cpus: u8,
    /// MiB.
    pub(super) memory: u16,
    pub(super) console: Console,
    /// The guest may open connections to whatever this thread's network namespace reaches.
    pub(super) network: bool,
    /// Both sides read and write here.
    pub(super) share: &'a Path,
    /// The same, at the same path on both sides.
    pub(super) writable: Option<PathBuf>,
}

impl Qemu<'_> {
    /// Runs it to its end and returns the command's exit code.
    pub(super) fn run(&self, deadline: Option<Duration>) -> Result<u8> {
        let mut process = Process::start(self.command())?;
        let mut copies: Vec<JoinHandle<()>> = Vec::new();
        if let Some(output) = process.stdout.take() {
            copies.push(thread::spawn(|| copy(output, io::stdout())));
        }
        if let Some(output) = process.stderr.take() {
            copies.push(thread::spawn(|| copy(output, io::stderr())));
        }
        let ended = wait(&mut process, deadline);
        drop(process);
        for copy in copies {
            // They panic nowhere.
            let _ = copy.join();
        }
        ended
            .and_then(|()| self.exit_code())
            .with_context(|| self.last_words())
    }

    fn command(&self) -> Command {
        let mut command = guard::command("qemu-system-x86_64");
        command
            .args([
                "-nodefaults",
                "-no-user-config",
                "-display",
                "none",
                "-no-reboot",
            ])
            .args(["-machine", "q35", "-accel", "tcg,thread=multi"])
            .args([
                "-smp",
                &self.cpus.to_string(),
                "-m",
                &self.memory.to_string(),
            ])
            .arg("-kernel")
            .arg(&self.image)
            .arg("-initrd")
            .arg(&self.initramfs)
            .args(["-append", KERNEL_OPTIONS])
            .args(["-device", "virtio-rng-pci"])
            .arg("-serial")
            .arg(joined("file:", &self.kernel_log()))
            .args(["-device", "virtio-serial-pci"]);
        folder(&mut command, "root", Path::new("/"), true);
        folder(&mut command, "share", self.share, false);
        if let Some(writable) = &self.writable {
            folder(&mut command, "writable", writable, false);
        }
        if self.network {
            command.args(["-netdev", "user,id=net,ipv6=off"]);
            command.args(["-device", "virtio-net-pci,netdev=net,romfile="]);
        }
        match self.console {
            Console::Pipes => {
                for (name, descriptor) in [("out", 1), ("err", 2)] {
                    let file = format!("file,id={name},path=/proc/self/fd/{descriptor},append=on");
                    let port = format!("virtserialport,chardev={name},name={name}");
                    command.args(["-chardev", &file, "-device", &port]);
                }
                command
                    .stdin(Stdio::null())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped());
            }
            Console::Terminal => {
                command.args(["-chardev", "stdio,id=terminal,signal=off"]);
                command.args(["-device", "virtconsole,chardev=terminal"]);
            }
        }
        command
    }

    fn exit_code(&self) -> Result<u8> {
        let file = self.share.join("exit");
        let code = fs::read_to_string(&file).context("the machine ended before its command")?;
        code.trim().parse().context("an exit code")
    }

    fn kernel_log(&self) -> PathBuf {
        self.share.join("kernel.log")
    }

    fn last_words(&self) -> String {
        let log = fs::read(self.kernel_log()).unwrap_or_default();
        let end = &log[log.len().saturating_sub(LAST_WORDS)..];
        let end = String::from_utf8_lossy(end);
        format!(
            "virtual machine; its kernel's last words:\n{}\n",
            end.trim()
        )
    }
}

/// Lets the guest see a folder.
fn folder(command: &mut Command, name: &str, path: &Path, read_only: bool) {
    let read_only = if read_only { ",readonly=on" } else { "" };
    let options = format!("local,id={name},security_model=none,multidevs=remap{read_only},path=");
    command.arg("-fsdev").arg(joined(&options, path));
    let device = format!("virtio-9p-pci,fsdev={name},mount_tag={name}");
    command.args(["-device", &device]);
}

/// qemu wants commas twice.
fn joined(options: &str, path: &Path) -> OsString {
    let mut all = OsString::from(options);
    all.push(path.to_string_lossy().replace(',', ",,"));
    all
}

fn wait(process: &mut Process, deadline: Option<Duration>) -> Result<()> {
    let began = Instant::now();
    loop {
        if let Some(status) = process.try_wait().context("wait for qemu")? {
            ensure!(status.success(), "qemu: {status}");
            return Ok(());
        }
        if deadline.is_some_and(|deadline| began.elapsed() >= deadline) {
            bail!(
                "killed, for its deadline of {:?} has passed",
                deadline.unwrap_or_default()
            );
        }
        thread::sleep(PAUSE);
    }
}

/// Passes on what comes, as it comes.
fn copy(mut from: impl Read, mut to: impl Write) {
    let mut buffer = [0; 8192];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        // Nobody reads: the guest goes on all the same.
        let _ = to.write_all(&buffer[..count]).and_then(|()| to.flush());
    }
}
