//! The control planes of a fleet: real programs on loopback, with certificates of a common authority.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use kplane_agents::certs;
use kplane_http::client::becomes;
use kplane_rig::process::Process;
use kplane_rig::usage::{self, Memory};
use kplane_tls::{ClientConfig, ClientFiles, Files as _, KeyPair};

/// Ports of the first replica: of agents, of the status API, and of metrics. Another has the next ten.
const PORTS: [u16; 3] = [7465, 7466, 7467];
/// Distance of the ports of two replicas.
const APART: u16 = 10;

/// Returns the address at which a replica serves agents.
pub fn agent_address(replica: usize) -> SocketAddr {
    address(replica, 0)
}

/// Returns the address of a replica's metrics.
pub fn metrics_address(replica: usize) -> SocketAddr {
    address(replica, 2)
}

fn address(replica: usize, port: usize) -> SocketAddr {
    let nth = u16::try_from(replica).unwrap_or_default();
    (Ipv4Addr::LOCALHOST, PORTS[port] + APART * nth).into()
}

/// Where everything of a fleet lies.
#[derive(Clone, Debug)]
pub(super) struct Places {
    pub(super) program: PathBuf,
    pub(super) certs: PathBuf,
    /// The flag that names the source, and its value.
    pub(super) source: (&'static str, PathBuf),
    pub(super) replicas: usize,
}

/// Makes an authority, and the certificates of servers on this machine and of nodes.
pub(super) fn make_certs(folder: &Path, nodes: Vec<String>) -> Result<()> {
    let (dir, host) = (folder.to_owned(), Vec::new());
    certs::run(&certs::Command::Init { dir, host })?;
    if !nodes.is_empty() {
        let (dir, names) = (folder.to_owned(), nodes);
        certs::run(&certs::Command::Node { dir, names })?;
    }
    Ok(())
}

impl Places {
    /// Starts all replicas, and waits until they are ready.
    pub(super) async fn start(&self) -> Result<Vec<Option<Process>>> {
        let planes = self.start_first(self.replicas).await?;
        Ok(planes.into_iter().map(Some).collect())
    }

    /// Starts the first replicas, and waits until they are ready.
    pub(super) async fn start_first(&self, replicas: usize) -> Result<Vec<Process>> {
        let planes = (0..replicas).map(|replica| self.spawn(replica)).collect::<Result<_>>()?;
        for replica in 0..replicas {
            becomes(metrics_address(replica), "/readyz", 200).await;
        }
        Ok(planes)
    }

    fn spawn(&self, replica: usize) -> Result<Process> {
        let file = |name: &str| self.certs.join(name).into_os_string();
        let mut command = Command::new(&self.program);
        let ports = ["--agent-listen", "--status-listen", "--http-listen"];
        for (port, flag) in ports.into_iter().enumerate() {
            command.args([flag, &address(replica, port).to_string()]);
        }
        let (flag, source) = &self.source;
        command.args([flag.as_ref(), source.as_os_str()]);
        command.args(["--tls-cert-file".into(), file("server.crt")]);
        command.args(["--tls-private-key-file".into(), file("server.key")]);
        command.args(["--client-ca-file".into(), file("ca.crt")]);
        command.arg("--audit-log=");
        if self.replicas > 1 {
            let peers = (0..self.replicas).map(|peer| address(peer, 1).to_string());
            command.args(["--peers", &Vec::from_iter(peers).join(",")]);
            command.args(["--peer-server-name", "localhost"]);
        }
        let level = std::env::var("RUST_LOG").unwrap_or_else(|_| "error".to_owned());
        command.env("RUST_LOG", level).stdin(Stdio::null());
        Process::start(command)
    }
}

/// Returns how the agent of a node proves who it is.
///
/// # Errors
/// The node has no certificate.
pub fn identity(certs: &Path, node: &str) -> Result<std::sync::Arc<ClientConfig>> {
    let files = ClientFiles {
        authorities: certs.join("ca.crt"),
        pair: Some(KeyPair::in_folder(certs, &format!("nodes/{node}"))),
    };
    files.load().with_context(|| format!("certificate of {node}"))
}

/// What running replicas use.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// CPU time since they began.
    pub cpu: Duration,
    /// Resident memory.
    pub memory: Memory,
}

/// Returns what processes use together.
pub(super) fn usage(pids: &[u32]) -> Result<Usage> {
    Ok(Usage {
        cpu: usage::cpu(pids)?,
        memory: usage::memory(pids)?,
    })
}
