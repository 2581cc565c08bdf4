//! The claim on a network namespace, which lets only one agent program its rules.
//!
//! The claim is an abstract Unix socket with a fixed name. Like the rules, the name belongs to the network
//! namespace, whatever process and mount namespaces agents are in. The kernel frees the name when its
//! process ends, for any reason. All backends share the name, because each removes what another kplane
//! backend left behind.
//!
//! Any process may bind such a name. A process of a user who is neither root nor the agent's own user
//! cannot program rules. The agent logs such a process and ignores it, so that no unprivileged process can
//! keep an agent from its node.

use std::fmt;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt,
};
use nix::unistd::geteuid;
use tokio::time::{Instant, sleep};

/// The name of the socket; tools show it as `@kplane-agent`.
const NAME: &str = "kplane-agent";
/// Longest wait at the start for an earlier agent that is ending. The earlier agent may have to finish a
/// large transaction first.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(100);
/// Least time between two log lines about refused processes, which any user may start.
const QUIET: Duration = Duration::from_secs(60);

/// The right to program this network namespace, for as long as this value lives.
#[derive(Debug)]
pub struct Claim {
    listener: UnixListener,
}

/// The process that holds the claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The process id; `None` when the process is in another process namespace.
    pub pid: Option<u32>,
    /// The user id of the process.
    pub uid: u32,
}

/// An agent already programs this network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "another kp-nodeagent ({0}) programs this network namespace (it has the abstract Unix socket \
     @kplane-agent), and two agents would undo each other's changes: stop the other one first"
)]
pub struct Taken(pub Holder);

impl Claim {
    /// Takes the claim if no other agent holds it. Returns `None` when that cannot be determined; this is
    /// logged, and the agent serves anyway.
    ///
    /// # Errors
    /// [`Taken`] names the process that holds the claim.
    pub fn take() -> Result<Option<Self>, Taken> {
        Self::take_named(NAME)
    }

    /// Takes the claim like [`Claim::take`], but first waits for up to [`PATIENCE`] for another agent to
    /// release it.
    ///
    /// # Errors
    /// [`Taken`].
    pub async fn wait_and_take() -> Result<Option<Self>, Taken> {
        Self::wait_and_take_named(NAME).await
    }

    /// Logs other processes that ask for the claim, until the returned future is dropped. Dropping the
    /// future does not release the claim.
    ///
    /// # Errors
    /// The runtime cannot use the socket.
    pub fn watch(&self) -> io::Result<impl Future<Output = ()> + Send + use<>> {
        let listener = self.listener.try_clone()?;
        listener.set_nonblocking(true)?;
        let listener = tokio::net::UnixListener::from_std(listener)?;
        Ok(log_contenders(listener))
    }

    fn take_named(name: &str) -> Result<Option<Self>, Taken> {
        // The holder may end between `bind` and the query, so a second attempt may succeed.
        for _ in 0..2 {
            match bind(name) {
                Ok(claim) => return Ok(Some(claim)),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return Ok(unknown(&error)),
            }
            match holder(name) {
                Ok(Some(holder)) if holder.is_believed() => return Err(Taken(holder)),
                Ok(Some(holder)) => {
                    tracing::warn!(
                        %holder,
                        "the abstract Unix socket @{name} belongs to a user who cannot run an \
                         agent; continuing, but a second agent on this node will not be detected"
                    );
                    return Ok(None);
                }
                Ok(None) => {}
                Err(error) => return Ok(unknown(&error.into())),
            }
        }
        let (pid, uid) = (None, 0);
        Err(Taken(Holder { pid, uid }))
    }

    async fn wait_and_take_named(name: &str) -> Result<Option<Self>, Taken> {
        let holder = match Self::take_named(name) {
            Err(Taken(holder)) => holder,
            taken => return taken,
        };
        tracing::info!(
            %holder,
            "another kp-nodeagent programs this network namespace; waiting up to {PATIENCE:?} for \
             it to end"
        );
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            sleep(PAUSE).await;
            if let Ok(claim) = bind(name) {
                return Ok(Some(claim));
            }
        }
        Self::take_named(name)
    }
}

impl Holder {
    /// Returns whether the process may be an agent: it runs as root or as this process' user.
    fn is_believed(self) -> bool {
        self.uid == 0 || self.uid == geteuid().as_raw()
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid} of user {}", self.uid),
            None => write!(
                f,
                "a process of user {} that cannot be seen from here",
                self.uid
            ),
        }
    }
}

/// Returns the agent that programs this network namespace, if one does.
///
/// # Errors
/// The socket cannot be queried.
pub fn at_work() -> Result<Option<Holder>, Errno> {
    Ok(holder(NAME)?.filter(|holder| holder.is_believed()))
}

fn bind(name: &str) -> io::Result<Claim> {
    let address = SocketAddr::from_abstract_name(name)?;
    let listener = UnixListener::bind_addr(&address)?;
    Ok(Claim { listener })
}

/// Queries the holder without waiting. Agents accept at once, so a full queue does not belong to an agent.
fn holder(name: &str) -> Result<Option<Holder>, Errno> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    let address = UnixAddr::new_abstract(name.as_bytes())?;
    match connect(socket.as_raw_fd(), &address) {
        Ok(()) => {
            let peer = getsockopt(&socket, sockopt::PeerCredentials)?;
            let pid = u32::try_from(peer.pid()).ok().filter(|pid| *pid > 0);
            let uid = peer.uid();
            Ok(Some(Holder { pid, uid }))
        }
        Err(Errno::ECONNREFUSED) => Ok(None),
        Err(Errno::EAGAIN) => Ok(Some(Holder {
            pid: None,
            uid: u32::MAX,
        })),
        Err(errno) => Err(errno),
    }
}

fn unknown(error: &io::Error) -> Option<Claim> {
    tracing::warn!(
        %error,
        "the abstract Unix socket @{NAME} cannot be used; continuing, but a second agent on this \
         node will not be detected"
    );
    None
}

async fn log_contenders(listener: tokio::net::UnixListener) {
    let mut quiet_until = Instant::now();
    loop {
        let pid = match listener.accept().await {
            Ok((stream, _)) => stream.peer_cred().ok().and_then(|peer| peer.pid()),
            // The usual cause is a lack of file descriptors.
            Err(_) => {
                sleep(PAUSE).await;
                continue;
            }
        };
        if Instant::now() >= quiet_until {
            quiet_until = Instant::now() + QUIET;
            tracing::warn!(
                pid = pid.unwrap_or(0),
                "refused another process that wants to program this network namespace, such as a \
                 second agent or a cleanup; this agent already does"
            );
        }
    }
}

#[cfg(test)]
mod tests;
