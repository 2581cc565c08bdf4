//! `cargo xtask cluster`: the tests' Kubernetes clusters, for manual use.
//!
//! `up` starts this program again in the background (`serve`). That process holds the cluster until
//! SIGTERM, and everything it started ends with it. Its files are in `.cache/cluster/run`.

use std::env;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use kplane_rig::wait::eventually;
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;

mod shape;

use shape::Shape;

/// The folder of the state, below the root of the checkout.
const FOLDER: &str = ".cache/cluster/run";
/// Longest wait for the cluster to be ready; a busy machine needs a while.
const READY: Duration = Duration::from_secs(300);
/// Longest wait for all processes to be killed.
const GRACE: Duration = Duration::from_secs(20);

/// Options of `cargo xtask cluster`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Needs Go for the first start (4 to 7 minutes of building, then seconds), and no root where the kernel
allows user namespaces. With --real it needs root and cgroups of version 1, and builds for 15 minutes once.

Examples:
  cargo xtask cluster up --nodes 3
  cargo xtask cluster shell -- kubectl get nodes
  cargo xtask cluster shell                        a shell with KUBECONFIG, kubectl, and the network
  cargo xtask cluster shell -- target/debug/kp-controlplane --kubeconfig .cache/cluster/run/kubeconfig
  cargo xtask cluster down
  cargo xtask cluster up --real --dual-stack       real nodes, with containerd, and Pods that really run
  cargo xtask cluster shell --node node-1          a shell on a node: nft, ip, ctr and so on")]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Start a cluster in the background: etcd, API server, controllers, nodes
    Up(Shape),
    /// End it and delete its state
    Down,
    /// Run a command, or a shell, where the cluster is
    Shell {
        /// Run it on this node of a real cluster, and not beside the control plane
        #[arg(long)]
        node: Option<String>,
        /// The command and its arguments [default: $SHELL]
        #[arg(last = true)]
        command: Vec<String>,
    },
    /// Hold the cluster until SIGTERM (`up` starts this)
    #[command(hide = true)]
    Serve(Shape),
}

/// Runs the requested command.
pub(crate) fn run(args: &Args) -> Result<()> {
    let folder = crate::workspace().join(FOLDER);
    match &args.action {
        Action::Up(shape) => up(&folder, shape),
        Action::Down => down(&folder),
        Action::Shell { node, command } => shell(&folder, node.as_deref(), command),
        Action::Serve(shape) => serve(&folder, shape),
    }
}

/// Returns the file in which the process that holds the cluster writes its id, once the cluster is
/// ready.
fn note(folder: &Path) -> PathBuf {
    folder.join("holder")
}

fn up(folder: &Path, shape: &Shape) -> Result<()> {
    if let Some(pid) = holder(folder) {
        bail!("a cluster is up (process {pid}); `cargo xtask cluster down` ends it");
    }
    // This runs with the machine's network, because Go may have to download.
    shape.prepare()?;
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let log = folder.join("log");
    let output = File::create(&log).with_context(|| log.display().to_string())?;
    let mut child = Command::new(env::current_exe()?)
        .args(["cluster", "serve"])
        .args(shape.arguments())
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        // Ctrl-C in this terminal must not reach the new process.
        .process_group(0)
        .spawn()
        .context("start the process that holds the cluster")?;
    eventually(READY, "the cluster is ready", || {
        if let Some(status) = child.try_wait()? {
            let said = fs::read_to_string(&log).unwrap_or_default();
            return Ok(Err(anyhow::anyhow!("{status}: {}", said.trim_end())));
        }
        ensure!(note(folder).exists(), "see {}", log.display());
        Ok(Ok(()))
    })??;
    let nodes = shape.nodes;
    let what = shape.described();
    println!(
        "A cluster with {nodes} nodes is up, in a network namespace of its own.\n\n  \
         KUBECONFIG={}\n\n  cargo xtask cluster shell                  a shell inside, with \
         kubectl\n  cargo xtask cluster shell -- COMMAND       one command inside\n  cargo xtask \
         cluster down                   end it\n\n{what}; logs are in {}.",
        folder.join("kubeconfig").display(),
        folder.join("logs").display()
    );
    Ok(())
}

fn down(folder: &Path) -> Result<()> {
    let Some(pid) = holder(folder) else {
        println!("no cluster is up");
        return Ok(());
    };
    kill(pid, Signal::SIGTERM).with_context(|| format!("end process {pid}"))?;
    eventually(GRACE, "the cluster has ended", || {
        ensure!(holder(folder).is_none(), "process {pid} is there");
        Ok::<_, anyhow::Error>(())
    })?;
    fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    println!("the cluster has ended; its files are removed");
    Ok(())
}

fn shell(folder: &Path, node: Option<&str>, command: &[String]) -> Result<()> {
    let pid = holder(folder).context("no cluster is up: cargo xtask cluster up")?;
    let path = shape::path(folder)?;
    let mut shell = match node {
        Some(node) => enter(folder, node)?,
        None => {
            join(pid)?;
            Command::new("env")
        }
    };
    let default = [env::var("SHELL").unwrap_or_else(|_| "/bin/sh".to_owned())];
    let words = if command.is_empty() { &default } else { command };
    shell.arg(path).args(words);
    let error = shell.env("KUBECONFIG", folder.join("kubeconfig")).exec();
    Err(error).context("run the command")
}

/// Returns a command that runs `env` on a node of a real cluster.
fn enter(folder: &Path, node: &str) -> Result<Command> {
    let init = folder.join(node).join("init");
    let pid = fs::read_to_string(&init)
        .with_context(|| format!("no real node {node}: cargo xtask cluster up --real"))?;
    let kinds = ["--net", "--mount", "--uts", "--ipc", "--pid", "--cgroup"];
    let mut command = Command::new("nsenter");
    command.args(["--target", pid.trim()]).args(kinds);
    command.args(["--", "env"]);
    Ok(command)
}

/// Enters the namespaces of the cluster's process: first its user namespace, then its network.
fn join(pid: Pid) -> Result<()> {
    let open = |kind: &str| {
        let path = format!("/proc/{pid}/ns/{kind}");
        File::open(&path).with_context(|| path.clone())
    };
    let (net, mount) = (open("net")?, open("mnt")?);
    let own = fs::read_link("/proc/self/ns/user")?;
    if fs::read_link(format!("/proc/{pid}/ns/user"))? != own {
        setns(open("user")?, CloneFlags::CLONE_NEWUSER).context("enter its user namespace")?;
        let here = env::current_dir()?;
        setns(mount, CloneFlags::CLONE_NEWNS).context("enter its mount namespace")?;
        env::set_current_dir(here)?;
    }
    setns(net, CloneFlags::CLONE_NEWNET).context("enter its network namespace")
}

/// Holds the cluster until SIGTERM.
fn serve(folder: &Path, shape: &Shape) -> Result<()> {
    shape.enter()?;
    // The signal is blocked in all later threads, so that only the thread below gets it.
    let signals = SigSet::from_iter([Signal::SIGTERM]);
    signals.thread_block()?;
    let cluster = shape.start(folder)?;
    // `shell` enters the network of this process' first thread.
    std::mem::forget(cluster.ns().enter()?);
    let own = std::process::id();
    let mut file = File::create(note(folder).with_extension("new"))?;
    writeln!(file, "{own} {}", started(own)?)?;
    fs::rename(note(folder).with_extension("new"), note(folder))?;
    signals.wait()?;
    drop(cluster);
    Ok(())
}

/// Returns the process that holds the cluster, if its id still belongs to it.
fn holder(folder: &Path) -> Option<Pid> {
    let text = fs::read_to_string(note(folder)).ok()?;
    let (pid, began) = text.trim().split_once(' ')?;
    let pid: u32 = pid.parse().ok()?;
    let same = started(pid).ok()? == began;
    same.then(|| pid.try_into().ok().map(Pid::from_raw))?
}

/// Returns the start of a process, in clock ticks since the machine's start. No other process with the
/// same id has the same value. A zombie counts as ended.
fn started(pid: u32) -> Result<String> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    // The name is in parentheses and may contain spaces: the fields after it begin with the state.
    let (_, fields) = text.rsplit_once(')').with_context(|| path.clone())?;
    let mut fields = fields.split_whitespace();
    let state = fields.next();
    ensure!(state != Some("Z"), "process {pid} has ended");
    // This is field 22 of all, in proc_pid_stat(5).
    let began = fields.nth(18).with_context(|| path.clone())?;
    Ok(began.to_owned())
}
