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

/// The kernel's command line. Errors end the machine. Defences are off, since there is no attacker
/// and they cost time. The emulated clocks are reliable.
const KERNEL_OPTIONS: &str = "console=ttyS0 quiet loglevel=5 panic=-1 oops=panic mitigations=off \
    nokaslr audit=0 apparmor=0 selinux=0 random.trust_cpu=on tsc=reliable";
/// Pause between two checks whether qemu has ended.
const PAUSE: Duration = Duration::from_millis(20);
/// Most bytes of the kernel's output that are shown after an error.
const LAST_WORDS: usize = 4000;

/// The input and output of the guest's command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Console {
    /// Its output comes out of pipes; there is no input.
    Pipes,
    /// This process' terminal.
    Terminal,
}

/// The settings of a start.
#[derive(Debug)]
pub(super) struct Qemu<'a> {
    pub(super) image: PathBuf,
    pub(super) initramfs: PathBuf,
    pub(super) cpus: u8,
    /// The memory in MiB.
    pub(super) memory: u16,
    pub(super) console: Console,
    /// Whether the guest may open connections to everything that this thread's network namespace
    /// reaches.
    pub(super) network: bool,
    /// The folder that both sides read and write.
    pub(super) share: &'a Path,
    /// A writable folder, at the same path on both sides.
    pub(super) writable: Option<PathBuf>,
}

impl Qemu<'_> {
    /// Runs the machine to its end and returns the command's exit code.
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
            // The copying threads do not panic.
            let _ = copy.join();
        }
        ended.and_then(|()| self.exit_code()).with_context(|| self.last_words())
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
            .args(["-append", &format!("{KERNEL_OPTIONS}{}", counter())])
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
                command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
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
            "virtual machine; the last messages of its kernel:\n{}\n",
            end.trim()
        )
    }
}

/// Shows a folder to the guest.
fn folder(command: &mut Command, name: &str, path: &Path, read_only: bool) {
    let read_only = if read_only { ",readonly=on" } else { "" };
    let options = format!("local,id={name},security_model=none,multidevs=remap{read_only},path=");
    command.arg("-fsdev").arg(joined(&options, path));
    let device = format!("virtio-9p-pci,fsdev={name},mount_tag={name}");
    command.args(["-device", &device]);
}

/// Appends a path to options; qemu requires commas to be doubled.
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
                "killed after its deadline of {:?}",
                deadline.unwrap_or_default()
            );
        }
        thread::sleep(PAUSE);
    }
}

/// Copies everything as it arrives.
fn copy(mut from: impl Read, mut to: impl Write) {
    let mut buffer = [0; 8192];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        // If the reader is gone, the guest goes on all the same.
        let _ = to.write_all(&buffer[..count]).and_then(|()| to.flush());
    }
}

/// Returns the kernel option with the rate of the processor's counter, if this machine tells it. The emulated processor
/// counts as this one does. A kernel that measures the rate while this machine is busy may take a twentieth of it for all,
/// and then its clock runs ahead of every deadline.
fn counter() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_once(": ")).map(|(_, value)| value)
    };
    let flags: Vec<&str> = field("flags").unwrap_or_default().split(' ').collect();
    // Elsewhere the speed that is shown is the one of the moment.
    let is_rate = flags.contains(&"hypervisor") && !flags.contains(&"aperfmperf");
    match field("cpu MHz").map(str::parse::<f64>) {
        Some(Ok(mhz)) if is_rate => format!(" tsc_early_khz={:.0}", mhz * 1e3),
        _ => String::new(),
    }
}
