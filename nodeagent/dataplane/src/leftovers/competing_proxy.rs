//! Detects a kube-proxy at work in this network namespace, without any privilege.
//!
//! There are two kinds of evidence, because kube-proxy may be in a process namespace that is invisible from
//! here (for an agent in a pod), or part of another program (k3s, microk8s):
//! * a process with kube-proxy's name that lists the sockets of this namespace (`/proc/PID/net/unix`, which
//!   every process may read, unlike `/proc/PID/ns/net`);
//! * a socket of another process that listens on a port of kube-proxy, and answers as kube-proxy does, or not
//!   at all.

mod ports;
#[cfg(test)]
mod tests;

use std::fs;
use std::io::Read as _;
use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use kplane_model::{HEALTHZ_PORT, METRICS_PORT};

/// Name of kube-proxy's process (`/proc/PID/comm`).
const NAME: &str = "kube-proxy";
/// Most bytes of a list of sockets that are read: a line has some 60.
const MAX_LIST: u64 = 16 << 20;

/// The ports on which a kube-proxy may listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports([u16; 4]);

impl Ports {
    /// Returns kube-proxy's default ports, and those that this node's configuration names.
    pub fn new(healthz: Option<SocketAddr>, metrics: Option<SocketAddr>) -> Self {
        let [healthz, metrics] = [healthz, metrics].map(|at| at.map(|at| at.port()));
        Self([
            HEALTHZ_PORT,
            METRICS_PORT,
            healthz.unwrap_or(HEALTHZ_PORT),
            metrics.unwrap_or(METRICS_PORT),
        ])
    }

    fn has(self, port: u16) -> bool {
        self.0.contains(&port)
    }
}

/// Evidence of a kube-proxy at work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompetingProxy {
    /// A process of kube-proxy.
    #[error("process {0} is a kube-proxy in this network namespace")]
    Process(u32),
    /// A process with kube-proxy's name, in an unknown namespace.
    #[error(
        "process {0} is a kube-proxy, perhaps in this network namespace: its /proc cannot be read"
    )]
    Hidden(u32),
    /// A port on which a program answers as kube-proxy does.
    #[error("{0} answers {1} as kube-proxy does")]
    Answers(SocketAddr, &'static str),
    /// A port of kube-proxy on which a program listens and does not answer.
    #[error("a program listens on kube-proxy's port at {0} and does not answer")]
    Silent(SocketAddr),
}

/// Checks for a kube-proxy that works in the calling thread's network namespace. Blocks, for a few seconds at
/// most.
pub fn running(ports: Ports) -> Option<CompetingProxy> {
    process().or_else(|| ports::answering(ports))
}

fn process() -> Option<CompetingProxy> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut hidden = None;
    for pid in pids {
        let name = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("comm"));
        if name.unwrap_or_default().trim_end() != NAME {
            continue;
        }
        match shares_our_network(pid) {
            Some(true) => return Some(CompetingProxy::Process(pid)),
            Some(false) => {}
            None => hidden = Some(CompetingProxy::Hidden(pid)),
        }
    }
    hidden
}

/// Returns whether a process lists a socket that is in this thread's network namespace; `None` if that is
/// unknown. This needs no right.
pub fn shares_our_network(pid: u32) -> Option<bool> {
    let mark = UnixDatagram::unbound().ok()?;
    let inode = inode(format!("/proc/thread-self/fd/{}", mark.as_raw_fd()))?;
    let mut list = String::new();
    let file = fs::File::open(format!("/proc/{pid}/net/unix"));
    let read = file.and_then(|file| file.take(MAX_LIST).read_to_string(&mut list));
    match read {
        // Num RefCount Protocol Flags Type St Inode Path
        Ok(_) => {
            Some(list.lines().any(|line| line.split_whitespace().nth(6) == Some(inode.as_str())))
        }
        // A process that has ended, but still exists as a zombie, has no network any more.
        Err(_) if !is_alive(pid) => Some(false),
        Err(_) => None,
    }
}

/// Returns the number of a socket as in lists of sockets, from a descriptor's entry in `/proc`.
fn inode(descriptor: impl AsRef<Path>) -> Option<String> {
    let link = fs::read_link(descriptor).ok()?;
    let inside = link.to_str()?.strip_prefix("socket:[")?;
    Some(inside.strip_suffix(']')?.to_owned())
}

fn is_alive(pid: u32) -> bool {
    // PID (NAME) STATE ..; the name ends with the last bracket.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}
