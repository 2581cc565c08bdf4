//! The processes of the demo: one control plane, and one agent for each node. Their logs are files.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use kplane_model::Cidr;
use kplane_rig::netns::NetNs;
use kplane_rig::process::Process;
use nix::sys::signal::Signal;

use super::programs::Programs;

/// Port of the control plane for agents.
const AGENT_PORT: u16 = 7443;
/// Time that a process has to end when asked to.
const GRACE: Duration = Duration::from_secs(5);
/// Lines of a log that are quoted when its process has failed.
const LOG_LINES: usize = 5;

/// All processes. Dropping the cast kills them.
#[derive(Debug)]
pub(crate) struct Cast {
    programs: Programs,
    logs: PathBuf,
    control_plane: Option<Process>,
    agents: BTreeMap<String, Process>,
    /// Flags of all agents: the control plane's address, and how to detect pods.
    agent_flags: Vec<String>,
}

impl Cast {
    /// Creates a cast without processes.
    pub(crate) fn new(programs: Programs, logs: PathBuf) -> Result<Self> {
        fs::create_dir(&logs).with_context(|| format!("create {}", logs.display()))?;
        Ok(Self {
            programs,
            logs,
            control_plane: None,
            agents: BTreeMap::new(),
            agent_flags: Vec::new(),
        })
    }

    /// Starts the control plane on a folder of manifests.
    pub(crate) fn start_control_plane(
        &mut self,
        ns: &NetNs,
        manifests: &Path,
        (address, cluster_cidrs): (std::net::IpAddr, &[Cidr]),
    ) -> Result<()> {
        let mut command = self.command(&self.programs.control_plane, "control-plane")?;
        command.arg("--manifests").arg(manifests);
        self.control_plane = Some(ns.command(command)?);
        let address = SocketAddr::new(address, AGENT_PORT);
        self.agent_flags = vec![format!("--control-plane=http://{address}")];
        if !cluster_cidrs.is_empty() {
            let ranges: Vec<String> = cluster_cidrs.iter().map(ToString::to_string).collect();
            self.agent_flags
                .push(format!("--cluster-cidr={}", ranges.join(",")));
        }
        Ok(())
    }

    /// Starts the agent of a node.
    pub(crate) fn start_agent(&mut self, node: &str, ns: &NetNs) -> Result<()> {
        let mut command = self.command(&self.programs.node_agent, node)?;
        command
            .arg(format!("--node-name={node}"))
            .arg("--cache-dir")
            .arg(self.logs.with_file_name("cache"))
            .args(&self.agent_flags);
        self.agents.insert(node.to_owned(), ns.command(command)?);
        Ok(())
    }

    /// Kills an agent without asking.
    pub(crate) fn kill_agent(&mut self, node: &str) -> Result<()> {
        let agent = self.agents.remove(node);
        let mut agent = agent.with_context(|| format!("no agent on {node}"))?;
        agent.signal(Signal::SIGKILL)?;
        agent.wait().context("wait for the agent's end")?;
        Ok(())
    }

    /// Ends all processes, agents first; fails if one does not end with success.
    pub(crate) fn stop(&mut self) -> Result<usize> {
        let mut processes: Vec<(String, Process)> =
            std::mem::take(&mut self.agents).into_iter().collect();
        let control_plane = self.control_plane.take();
        processes.extend(control_plane.map(|process| ("control-plane".to_owned(), process)));
        let count = processes.len();
        for (_, process) in &processes {
            process.signal(Signal::SIGTERM)?;
        }
        for (name, process) in processes {
            let status = process.terminate(GRACE)?;
            if !status.success() {
                bail!("{name} ended with {status}{}", self.last_words(&name));
            }
        }
        Ok(count)
    }

    /// Removes what an agent has left in a node's kernel.
    pub(crate) fn clean_up(&self, ns: &NetNs) -> Result<()> {
        let mut command = Command::new(&self.programs.node_agent);
        command.arg("--cleanup").arg("--cache-dir");
        command.arg(self.logs.with_file_name("cache"));
        ns.output(command).map(drop)
    }

    /// Fails if a process has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        let everybody = self
            .agents
            .iter_mut()
            .map(|(name, process)| (name.clone(), process));
        let control_plane = self.control_plane.iter_mut();
        let everybody = control_plane
            .map(|p| ("control-plane".to_owned(), p))
            .chain(everybody);
        for (name, process) in everybody {
            if let Some(status) = process.try_wait()? {
                bail!(
                    "{name} ended with {status}{}",
                    last_words(&self.logs, &name)
                );
            }
        }
        Ok(())
    }

    /// Prints the output of `kpctl` as a user sees it; returns false if it failed.
    pub(crate) fn kpctl(&self, ns: &NetNs, args: &[&str]) -> Result<bool> {
        let mut command = Command::new(&self.programs.kpctl);
        command.args(args).stdin(Stdio::null());
        let status = ns.run(|| command.status().context("start kpctl"))?;
        Ok(status.success())
    }

    /// Runs `kpctl` without showing its output; returns false if it failed.
    pub(crate) fn kpctl_quietly(&self, ns: &NetNs, args: &[&str]) -> Result<bool> {
        let mut command = Command::new(&self.programs.kpctl);
        command
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let status = ns.run(|| command.status().context("start kpctl"))?;
        Ok(status.success())
    }

    /// Returns the programs.
    pub(crate) fn programs(&self) -> &Programs {
        &self.programs
    }

    /// Returns the folder of the logs.
    pub(crate) fn logs(&self) -> &Path {
        &self.logs
    }

    /// Returns process ids by name, the control plane's first.
    pub(crate) fn pids(&self) -> Vec<(String, u32)> {
        let control_plane = self
            .control_plane
            .iter()
            .map(|p| ("control-plane".to_owned(), p.id()));
        let agents = self
            .agents
            .iter()
            .map(|(name, process)| (name.clone(), process.id()));
        control_plane.chain(agents).collect()
    }

    fn last_words(&self, name: &str) -> String {
        last_words(&self.logs, name)
    }

    /// Returns a command that logs to a file and does not get the terminal's Ctrl-C.
    fn command(&self, program: &Path, name: &str) -> Result<Command> {
        let path = log(&self.logs, name);
        let file = File::options().create(true).append(true).open(&path);
        let file = file.with_context(|| format!("open {}", path.display()))?;
        let mut command = Command::new(program);
        command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file);
        command.process_group(0).env("NO_COLOR", "1");
        Ok(command)
    }
}

fn log(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.log"))
}

/// Returns the end of a process' log, for messages.
fn last_words(folder: &Path, name: &str) -> String {
    let path = log(folder, name);
    let text = fs::read_to_string(&path).unwrap_or_default();
    let mut lines: Vec<&str> = text.lines().rev().take(LOG_LINES).collect();
    lines.reverse();
    let quoted: String = lines
        .iter()
        .map(|line| format!("\n        | {line}"))
        .collect();
    format!("; the end of {}:{quoted}", path.display())
}
