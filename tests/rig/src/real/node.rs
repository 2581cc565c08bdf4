//! A node: a machine with containerd and a kubelet.

use std::ffi::OsStr;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::machine::{Machine, Setup};
use super::programs::NodePrograms;
use super::settings::{self, CNI_FOLDER, SOCKET};
use crate::netns::NetNs;
use crate::process::{self, Process};
use crate::topology::NodeSpec;
use crate::wait::eventually;

/// Longest wait for a program to be ready, on a busy machine.
const READY: Duration = Duration::from_secs(60);
/// containerd's namespace of what the kubelet uses.
const NAMESPACE: &str = "k8s.io";

/// The settings that all nodes of a cluster share.
#[derive(Clone, Debug)]
pub(super) struct Common {
    pub(super) programs: NodePrograms,
    /// Folders of this machine that nodes see: the cluster's, and those of the programs.
    pub(super) shared: Vec<PathBuf>,
    pub(super) client_ca: PathBuf,
    pub(super) dns: IpAddr,
}

/// A node of a real cluster.
#[derive(Debug)]
pub struct Node {
    spec: NodeSpec,
    zone: String,
    folder: PathBuf,
    kubeconfig: PathBuf,
    common: Common,
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    // Fields drop in order.
    kubelet: Option<Process>,
    containerd: Process,
    machine: Machine,
}

impl Node {
    pub(super) fn new(
        spec: NodeSpec,
        zone: &str,
        folder: PathBuf,
        kubeconfig: PathBuf,
        common: Common,
    ) -> Self {
        Self {
            spec,
            zone: zone.to_owned(),
            folder,
            kubeconfig,
            common,
            running: Mutex::new(None),
        }
    }

    /// Returns the node's name, such as `node-1`.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Returns the node's addresses and the prefixes of its pods.
    pub fn spec(&self) -> &NodeSpec {
        &self.spec
    }

    /// Returns the node's zone, such as `a`.
    pub fn zone(&self) -> &str {
        &self.zone
    }

    /// Returns the node's network namespace.
    ///
    /// # Errors
    /// The node does not run.
    pub fn ns(&self) -> Result<NetNs> {
        self.with(|running| Ok(running.machine.ns().clone()))
    }

    /// Runs a program on the node to its end, and returns its standard output. The node sees the programs and files of
    /// this machine, and changes none of them.
    ///
    /// # Errors
    /// The node does not run, or the program fails; the message has its standard error.
    pub fn exec<S: AsRef<OsStr>>(&self, program: &str, args: &[S]) -> Result<String> {
        let mut command = self.command(program)?;
        command.args(args);
        self.ns()?.output(command)
    }

    /// Returns a command for the node, to be started in [`Node::ns`].
    ///
    /// # Errors
    /// The node does not run.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        let path = self.common.programs.path();
        self.with(|running| {
            let mut command = running.machine.command("env");
            let mut setting = std::ffi::OsString::from("PATH=");
            setting.push(path);
            command.arg(setting).arg(program);
            Ok(command)
        })
    }

    /// Returns the path by which this machine reads and writes a file of the node.
    ///
    /// # Errors
    /// The node does not run.
    pub fn path(&self, inside: &str) -> Result<PathBuf> {
        self.with(|running| Ok(running.machine.path(inside)))
    }

    /// Returns the folder with the logs of the node's programs.
    pub fn logs(&self) -> PathBuf {
        self.folder.join("logs")
    }

    /// Imports images from archives (OCI layout or `docker save`), whose names must be in them.
    ///
    /// # Errors
    /// An archive is unusable, or the node does not run.
    pub fn import(&self, archives: &[PathBuf]) -> Result<()> {
        for archive in archives {
            let archive = fs::canonicalize(archive)
                .with_context(|| format!("the archive {}", archive.display()))?;
            let mut command = self.ctr()?;
            // The archive is passed on standard input, because the node may not see its folder.
            command.args(["images", "import", "--local", "-"]);
            let file = fs::File::open(&archive).with_context(|| archive.display().to_string())?;
            command.stdin(file);
            self.ns()?
                .run(|| process::finish(&mut command))
                .with_context(|| format!("import {} on {}", archive.display(), self.name()))?;
        }
        Ok(())
    }

    /// Returns the names of the images that the node has.
    ///
    /// # Errors
    /// The node does not run.
    pub fn images(&self) -> Result<Vec<String>> {
        let mut command = self.ctr()?;
        command.args(["images", "list", "--quiet"]);
        let list = self.ns()?.output(command)?;
        Ok(list.lines().map(str::to_owned).collect())
    }

    /// Starts the kubelet.
    ///
    /// # Errors
    /// The kubelet runs, or the node does not.
    pub fn start_kubelet(&self) -> Result<()> {
        let mut running = self.running();
        let running = running.as_mut().context("the node does not run")?;
        ensure!(running.kubelet.is_none(), "the kubelet runs");
        running.kubelet = Some(self.kubelet(&running.machine)?);
        Ok(())
    }

    /// Starts the machine and containerd, in a network namespace.
    pub(super) fn boot(&self, ns: NetNs) -> Result<()> {
        let setup = Setup {
            name: self.name(),
            folder: &self.folder,
            shared: &self.common.shared,
        };
        let machine = Machine::start(&setup, ns)?;
        let network = machine.path(CNI_FOLDER);
        fs::create_dir_all(&network).with_context(|| format!("create {CNI_FOLDER}"))?;
        let conflist = settings::cni(&self.spec.pod_cidrs);
        write_json(&network.join("10-kplane-tests.conflist"), &conflist)?;
        let containerd = self.containerd(&machine)?;
        *self.running() = Some(Running {
            kubelet: None,
            containerd,
            machine,
        });
        let log = self.logs().join("containerd.log");
        eventually(READY, "containerd answers", || {
            self.check_containerd()?;
            let mut version = self.ctr()?;
            version.arg("version");
            self.ns()?.output(version)
        })
        .with_context(|| {
            let said = process::last_words(&log);
            format!("{}: the log of containerd ends with {said}", self.name())
        })?;
        Ok(())
    }

    /// Kills everything on the node, as a power failure would. Files stay.
    pub(super) fn halt(&self) {
        drop(self.running().take());
    }

    /// Returns the network namespace of a container.
    pub(super) fn container_ns(&self, name: &str, id: &str) -> Result<NetNs> {
        let file =
            format!("/run/containerd/io.containerd.runtime.v2.task/{NAMESPACE}/{id}/init.pid");
        self.with(|running| {
            let file = running.machine.path(&file);
            let pid = fs::read_to_string(&file)
                .with_context(|| file.display().to_string())?
                .trim()
                .parse()
                .context("the id of a process")?;
            NetNs::open(name, &running.machine.namespace(pid, "net"))
        })
    }

    fn containerd(&self, machine: &Machine) -> Result<Process> {
        let config = self.folder.join("containerd.toml");
        fs::write(&config, settings::containerd(&self.common.programs))
            .with_context(|| format!("write {}", config.display()))?;
        self.daemon(machine, "containerd", |command| {
            command.arg("--config").arg(&config);
        })
    }

    fn kubelet(&self, machine: &Machine) -> Result<Process> {
        let config = self.folder.join("kubelet.json");
        // Empty: names outside of the cluster are nobody's here.
        let resolv_conf = self.folder.join("resolv.conf");
        fs::write(&resolv_conf, "").context("write resolv.conf")?;
        let common = &self.common;
        let settings = settings::kubelet(&common.client_ca, common.dns, &resolv_conf);
        write_json(&config, &settings)?;
        // A node has addresses of the families of its pods.
        let ips: Vec<_> = self
            .spec
            .ips
            .iter()
            .take(self.spec.pod_cidrs.len())
            .map(IpAddr::to_string)
            .collect();
        self.daemon(machine, "kubelet", |command| {
            command
                .arg("--config")
                .arg(&config)
                .arg("--kubeconfig")
                .arg(&self.kubeconfig)
                .args(["--node-ip", &ips.join(",")])
                .args(["--hostname-override", self.name()])
                .args(["--root-dir", "/var/lib/kubelet"])
                .args(["--cert-dir", "/var/lib/kubelet/pki"])
                .args(["--v", "2"]);
        })
    }

    fn daemon(
        &self,
        machine: &Machine,
        name: &str,
        with: impl FnOnce(&mut Command),
    ) -> Result<Process> {
        let programs = &self.common.programs;
        let program = match name {
            "kubelet" => programs.kubelet(),
            other => programs.containerd(other),
        };
        let log = self.logs().join(format!("{name}.log"));
        machine.daemon(&program, &log, |command| {
            command.env("PATH", programs.path());
            with(command);
        })
    }

    fn ctr(&self) -> Result<Command> {
        let mut command = self.command(self.common.programs.containerd("ctr"))?;
        command.args(["--address", SOCKET, "--namespace", NAMESPACE]);
        Ok(command)
    }

    fn check_containerd(&self) -> Result<()> {
        let mut running = self.running();
        let running = running.as_mut().context("the node does not run")?;
        let status = running.containerd.try_wait()?;
        ensure!(status.is_none(), "containerd has ended");
        Ok(())
    }

    fn with<T>(&self, look: impl FnOnce(&Running) -> Result<T>) -> Result<T> {
        let running = self.running();
        let missing = || format!("{} does not run", self.name());
        look(running.as_ref().with_context(missing)?)
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        // A panic cannot spoil a handle, which is there or not.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn write_json(to: &Path, value: &Value) -> Result<()> {
    fs::write(to, serde_json::to_vec_pretty(value)?)
        .with_context(|| format!("write {}", to.display()))
}
