//! The state of the demo: a copy of the manifests, the network around them, and the processes on
//! it. One control plane and one agent for each node; their logs are files.

use std::ffi::OsString;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail, ensure};
use kplane_model::{Family, NodeFacts, ServiceName};
use kplane_proto::v1::{Fleet, NodeState, NodeStatus, SyncStats};
use kplane_rig::netns::NetNs;
use kplane_rig::process::{self, Process};
use kplane_rig::status::Status;
use kplane_rig::wait::eventually;
use kplane_tls::{ClientFiles, KeyPair};
use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;

use super::interrupt;
use super::manifests::Manifests;
use super::objects::{Objects, Service};
use super::world::{CONTROL, World};

/// kplane's programs.
const PROGRAMS: [&str; 3] = ["kp-controlplane", "kp-nodeagent", "kpctl"];
/// Port of the control plane for agents.
const AGENT_PORT: u16 = 7465;
/// The address of the status API, inside the control plane's namespace.
const STATUS: &str = "127.0.0.1:7466";
/// Name of the folder with certificates.
const CERTS: &str = "certs";
/// Name of the user of `kpctl`.
const AUDIENCE: &str = "audience";
/// Time that a process has to end when asked to.
const GRACE: Duration = Duration::from_secs(5);
/// Longest wait for the fleet: a busy machine needs a second or two to start.
const PATIENCE: Duration = Duration::from_secs(20);

/// Everything that exists between the first step and the last.
#[derive(Debug)]
pub(crate) struct Stage {
    /// The processes by name, the control plane first. They come first here: fields drop in order,
    /// and the processes live in namespaces.
    pub(crate) processes: Vec<(String, Process)>,
    status: Status,
    pub(crate) world: World,
    /// The objects in the manifests at the moment.
    pub(crate) objects: Objects,
    /// The manifests that the control plane watches.
    pub(crate) manifests: Manifests,
    families: Vec<Family>,
    /// The Service whose endpoints are replaced, once it has been chosen.
    pub(crate) star: Option<ServiceName>,
    programs: PathBuf,
    folder: TempDir,
}

/// Returns a folder with all programs in it.
pub(crate) fn find_programs(folder: &Path) -> Result<PathBuf> {
    let folder = std::path::absolute(folder)?;
    for path in PROGRAMS.map(|name| folder.join(name)) {
        ensure!(path.is_file(), "there is no {}", path.display());
    }
    Ok(folder)
}

impl Stage {
    /// Builds the network, without processes.
    pub(crate) fn build(programs: PathBuf, manifests: &Path) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("kplane-demo-")
            .tempdir()
            .context("create a folder for logs and manifests")?;
        fs::create_dir(folder.path().join("logs")).context("create a folder for logs")?;
        let manifests = Manifests::copy(manifests, folder.path().join("manifests"))?;
        let has_v6 = Path::new("/proc/net/if_inet6").exists();
        let mut families = Family::ALL.to_vec();
        families.retain(|family| has_v6 || *family == Family::V4);
        let objects = Objects::read(&manifests, &families)?;
        let world = World::build(&objects).context("build the network")?;
        let certs = folder.path().join(CERTS);
        let control = world.topology.host(CONTROL)?;
        certify(&programs, &certs, control.ips(), &objects).context("make certificates")?;
        let files = ClientFiles {
            authorities: certs.join("ca.crt"),
            pair: Some(KeyPair::in_folder(&certs, &format!("users/{AUDIENCE}"))),
        };
        Ok(Self {
            processes: Vec::new(),
            status: Status::secured(control.ns(), STATUS.parse()?, &files)?,
            world,
            objects,
            manifests,
            families,
            star: None,
            programs,
            folder,
        })
    }

    /// Starts all processes.
    pub(crate) fn start(&mut self) -> Result<()> {
        let mut command = self.command("kp-controlplane", "kp-controlplane")?;
        let (certs, own) = (self.certs(), KeyPair::in_folder(&self.certs(), "server"));
        command.arg("--tls-cert-file").arg(own.certificate);
        command.arg("--tls-private-key-file").arg(own.key);
        command.arg("--client-ca-file").arg(certs.join("ca.crt"));
        command.arg("--manifests").arg(&self.manifests.folder);
        // A dump's policies are not enforced: it lacks the Pods that they are about.
        let is_policy = |object: &Value| object["kind"] == "NetworkPolicy";
        if !self.manifests.objects().any(is_policy) {
            command.arg("--network-policy");
        }
        let process = self.control()?.command(command)?;
        self.processes.push(("kp-controlplane".to_owned(), process));
        let nodes: Vec<NodeFacts> = self.objects.nodes.clone();
        nodes.iter().try_for_each(|node| self.start_agent(&node.name))
    }

    /// Starts the agent of a node.
    pub(crate) fn start_agent(&mut self, node: &str) -> Result<()> {
        let command = self.agent(node, node, node)?;
        let process = self.world.topology.node(node)?.ns().command(command)?;
        self.processes.push((node.to_owned(), process));
        Ok(())
    }

    /// Starts an agent that speaks for `victim` with the certificate of `thief`, and programs nothing. Returns the
    /// control plane's answer.
    pub(crate) fn impersonate(&self, victim: &str, thief: &str) -> Result<String> {
        let log = "thief";
        let mut command = self.agent(log, victim, thief)?;
        command.args([
            "--backend=noop",
            "--healthz-bind-address=",
            "--metrics-bind-address=",
        ]);
        let _process = self.control()?.command(command)?;
        eventually(PATIENCE, "the thief gets an answer", || {
            let text = fs::read_to_string(self.log(log)).unwrap_or_default();
            let answer = text.lines().find_map(|line| line.split_once("reason="));
            answer.map(|(_, answer)| answer.replace(['"', '\\'], "")).ok_or("no answer yet")
        })
    }

    /// Returns the command of an agent that speaks for `node` with the certificate of `owner`.
    fn agent(&self, log: &str, node: &str, owner: &str) -> Result<Command> {
        let control = self.world.topology.host(CONTROL)?.ips().first();
        let address = control.context("the control host has no address")?;
        let plane = SocketAddr::new(*address, AGENT_PORT);
        let cidrs: Vec<String> = self.world.cluster_cidrs.iter().map(ToString::to_string).collect();
        let mut command = self.command("kp-nodeagent", log)?;
        command
            .args(self.identity(&format!("nodes/{owner}")))
            .arg(format!("--node-name={node}"))
            .arg(format!("--control-plane=https://{plane}"))
            .arg("--cache-dir")
            .arg(self.folder.path().join("cache"));
        if !cidrs.is_empty() {
            command.arg(format!("--cluster-cidr={}", cidrs.join(",")));
        }
        Ok(command)
    }

    /// Kills an agent without asking.
    pub(crate) fn kill_agent(&mut self, node: &str) {
        // Dropping it kills it.
        self.processes.retain(|(name, _)| name != node);
    }

    /// Ends all processes, agents first; fails if one does not end with success.
    pub(crate) fn stop(&mut self) -> Result<usize> {
        let processes = std::mem::take(&mut self.processes);
        let count = processes.len();
        for (_, process) in processes.iter().rev() {
            process.signal(Signal::SIGTERM)?;
        }
        for (name, process) in processes {
            let status = process.terminate(GRACE)?;
            if !status.success() {
                self.ended(&name, status)?;
            }
        }
        Ok(count)
    }

    /// Removes what an agent has left in a node's kernel.
    pub(crate) fn clean_up(&self, ns: &NetNs) -> Result<()> {
        let mut command = Command::new(self.programs.join("kp-nodeagent"));
        let cache = self.folder.path().join("cache");
        command.arg("--cleanup").arg("--cache-dir").arg(cache);
        ns.output(command).map(drop)
    }

    /// Returns a command of `kpctl`.
    pub(crate) fn kpctl(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.programs.join("kpctl"));
        let own = self.identity(&format!("users/{AUDIENCE}"));
        // A kubeconfig of the user's is about another cluster.
        command.args(["--server", "127.0.0.1"]).args(own).args(args);
        command.stdin(Stdio::null());
        command
    }

    /// Queries the fleet until the closure succeeds, or fails with its last error. It also gives up
    /// when a process has ended, and on Ctrl-C.
    pub(crate) fn wait<T>(
        &mut self,
        what: &str,
        mut look: impl FnMut(&Fleet) -> Result<T, String>,
    ) -> Result<T> {
        // The outer result ends the waiting, the inner one is for the caller.
        eventually(PATIENCE, what, || {
            if let Err(error) = self.check() {
                return Ok(Err(error));
            }
            let fleet = self.status.fleet().map_err(|error| format!("{error:#}"))?;
            look(&fleet).map(Ok)
        })?
    }

    /// Fails if a process has ended, or on Ctrl-C.
    fn check(&mut self) -> Result<()> {
        interrupt::check()?;
        let mut ended = None;
        for (name, process) in &mut self.processes {
            if let Some(status) = process.try_wait()? {
                ended = Some((name.clone(), status));
            }
        }
        ended.map_or(Ok(()), |(name, status)| self.ended(&name, status))
    }

    /// Changes the manifests and waits until every kernel holds the change. Returns the time from
    /// the file to the kernel's acknowledgement, for each node. It is rounded up, because the
    /// agent's clock, which is this machine's, ticks in milliseconds.
    pub(crate) fn edit(
        &mut self,
        change: impl Fn(&mut Value) -> bool,
    ) -> Result<Vec<(String, Duration)>> {
        let control = self.status.fleet()?.control_plane;
        let before = control.context("a fleet without a control plane")?.revision;
        let written = self.manifests.edit(change)?;
        self.wait("the change is in every kernel", |fleet| {
            let landing = |node: &NodeStatus| {
                let (wanted, report) = (node.wanted_revision, node.report.as_ref());
                let applied = report.map_or(0, |report| report.applied_revision);
                let sync = last_sync(node).filter(|sync| sync.revision > before);
                let sync = if wanted > before && applied >= wanted { sync } else { None };
                let sync = sync.ok_or_else(|| format!("{} does not hold it", node.name))?;
                let finished = UNIX_EPOCH + Duration::from_millis(sync.finished_at_ms + 1);
                let took = finished.duration_since(written).unwrap_or_default();
                Ok((node.name.clone(), took))
            };
            fleet.nodes.iter().map(landing).collect()
        })
    }

    /// Writes a manifest of its own, or removes it, and waits until every kernel holds that.
    pub(crate) fn publish(&mut self, name: &str, objects: Option<&[Value]>) -> Result<()> {
        let control = self.status.fleet()?.control_plane;
        let before = control.context("a fleet without a control plane")?.revision;
        self.manifests.put(name, objects)?;
        self.wait("the change is in every kernel", |fleet| {
            let revision = fleet.control_plane.as_ref().map_or(0, |of| of.revision);
            let late = fleet.nodes.iter().find(|node| node.state() != NodeState::InSync);
            match (revision > before, late) {
                (true, None) => Ok(()),
                (false, _) => Err("nothing is published".to_owned()),
                (true, Some(node)) => Err(format!("{} is {:?}", node.name, node.state())),
            }
        })
    }

    /// Reads the manifests again, after an edit.
    pub(crate) fn reread(&mut self) -> Result<()> {
        self.objects = Objects::read(&self.manifests, &self.families)?;
        Ok(())
    }

    /// Returns the Service under load as it is now, if there is one.
    pub(crate) fn star(&self) -> Result<Option<&Service>> {
        let star = self.star.as_ref();
        star.map(|name| self.objects.service(name)).transpose()
    }

    /// Returns the control plane's namespace.
    pub(crate) fn control(&self) -> Result<&NetNs> {
        Ok(self.world.topology.host(CONTROL)?.ns())
    }

    /// Ends everything at once; `keep` leaves the folder and returns its path.
    pub(crate) fn strike(self, keep: bool) -> Option<PathBuf> {
        keep.then(|| self.folder.keep())
    }

    /// Returns the path of a process' log.
    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.folder.path().join("logs").join(format!("{name}.log"))
    }

    /// Returns the options by which a program shows a certificate.
    fn identity(&self, name: &str) -> [OsString; 6] {
        let own = KeyPair::in_folder(&self.certs(), name);
        [
            "--certificate-authority".into(),
            self.certs().join("ca.crt").into(),
            "--client-certificate".into(),
            own.certificate.into(),
            "--client-key".into(),
            own.key.into(),
        ]
    }

    /// Returns the folder of the certificates.
    fn certs(&self) -> PathBuf {
        self.folder.path().join(CERTS)
    }

    fn command(&self, program: &str, name: &str) -> Result<Command> {
        let mut command = process::logging(&self.programs.join(program), &self.log(name))?;
        command.env("NO_COLOR", "1");
        Ok(command)
    }

    /// Fails for a process that has ended, with the end of its log.
    fn ended(&self, name: &str, status: ExitStatus) -> Result<()> {
        let (log, words) = (self.log(name), process::last_words(&self.log(name)));
        bail!(
            "{name} ended with {status}; the end of {}:\n{words}",
            log.display()
        )
    }
}

/// Makes certificates of the control plane, of each node and of the user of `kpctl`.
fn certify(programs: &Path, certs: &Path, control: &[IpAddr], objects: &Objects) -> Result<()> {
    let run = |kind: &str, args: &[String]| {
        let mut command = Command::new(programs.join("kp-controlplane"));
        command.args(["certs", kind]).arg(certs).args(args);
        process::output(command).map(drop)
    };
    let hosts = control.iter().map(|ip| format!("--host={ip}"));
    run("init", &Vec::from_iter(hosts))?;
    let nodes = objects.nodes.iter().map(|node| node.name.to_string());
    run("node", &Vec::from_iter(nodes))?;
    run("user", &[AUDIENCE.to_owned(), "--admin".to_owned()])
}

/// Returns the course of a node's last update.
pub(crate) fn last_sync(node: &NodeStatus) -> Option<&SyncStats> {
    node.report.as_ref()?.last_sync.as_ref()
}
