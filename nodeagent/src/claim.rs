//! One agent a node: a name in the network namespace says who programs its rules.
//!
//! The name is an abstract Unix socket. It belongs to the network namespace, as the rules do, whatever
//! other namespaces (of processes, of mounts) agents are in, and the kernel takes it back when its process
//! ends, however it ends. All backends share it: each removes what another one of ours left behind.
//!
//! Any process may take such a name. One of a user who is neither root nor ours programs nothing, so it
//! is named in the log and not believed: nobody keeps an agent from its node that way.

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

/// The name; tools show it as `@kplane-agent`.
const NAME: &str = "kplane-agent";
/// How long a start waits for the agent before it, which may be ending: it may have to finish a large
/// transaction first.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// From one attempt to the next.
const PAUSE: Duration = Duration::from_millis(100);
/// From one line in the log about refused processes to the next: any user may make them.
const QUIET: Duration = Duration::from_secs(60);

/// The right to program this network namespace, as long as it lives.
#[derive(Debug)]
pub struct Claim {
    listener: UnixListener,
}

/// Who has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its process; `None` when it is in another process namespace.
    pub pid: Option<u32>,
    /// Its user.
    pub uid: u32,
}

/// An agent is at work in this network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "another kp-nodeagent ({0}) programs this network namespace (it has the abstract Unix socket \
     @kplane-agent), and two would undo each other's work: stop that one first"
)]
pub struct Taken(pub Holder);

impl Claim {
    /// Takes the right if nobody has it; `None` when that cannot be known, which is logged and no
    /// reason not to serve.
    ///
    /// # Errors
    /// [`Taken`] says who has it.
    pub fn take() -> Result<Option<Self>, Taken> {
        Self::take_named(NAME)
    }

    /// The same, but waits for whoever has it for up to [`PATIENCE`].
    ///
    /// # Errors
    /// [`Taken`].
    pub async fn wait_and_take() -> Result<Option<Self>, Taken> {
        Self::wait_and_take_named(NAME).await
    }

    /// Logs who else wants the right, until it is dropped. Dropping it does not give the right up.
    ///
    /// # Errors
    /// The socket cannot be used by the runtime.
    pub fn watch(&self) -> io::Result<impl Future<Output = ()> + Send + use<>> {
        let listener = self.listener.try_clone()?;
        listener.set_nonblocking(true)?;
        let listener = tokio::net::UnixListener::from_std(listener)?;
        Ok(log_contenders(listener))
    }

    fn take_named(name: &str) -> Result<Option<Self>, Taken> {
        // Whoever has it may end between the two questions: then nobody does.
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
                        "the abstract Unix socket @{name} is taken by a user who cannot be an agent; \
                         going on, but a second agent on this node will not be noticed"
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
            "another kp-nodeagent programs this network namespace; waiting up to {PATIENCE:?} for its end"
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
    /// It may be an agent: these are root's, or this user's.
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

/// Who programs this network namespace, if anybody does.
///
/// # Errors
/// The question cannot be asked.
pub fn at_work() -> Result<Option<Holder>, Errno> {
    Ok(holder(NAME)?.filter(|holder| holder.is_believed()))
}

fn bind(name: &str) -> io::Result<Claim> {
    let address = SocketAddr::from_abstract_name(name)?;
    let listener = UnixListener::bind_addr(&address)?;
    Ok(Claim { listener })
}

/// Asks without waiting: agents accept at once, so a queue that is full is no agent's.
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
        "the abstract Unix socket @{NAME} cannot be used; going on, but a second agent on this node \
         will not be noticed"
    );
    None
}

async fn log_contenders(listener: tokio::net::UnixListener) {
    let mut quiet_until = Instant::now();
    loop {
        let pid = match listener.accept().await {
            Ok((stream, _)) => stream.peer_cred().ok().and_then(|peer| peer.pid()),
            // Usually for lack of file descriptors.
            Err(_) => {
                sleep(PAUSE).await;
                continue;
            }
        };
        if Instant::now() >= quiet_until {
            quiet_until = Instant::now() + QUIET;
            tracing::warn!(
                pid = pid.unwrap_or(0),
                "another process wants to program this network namespace, such as a second agent or a \
                 clean-up; it is refused while this agent runs"
            );
        }
    }
}

#[cfg(test)]
mod tests;
