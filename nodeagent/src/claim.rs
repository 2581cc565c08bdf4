//! The claim on a network namespace, which lets only one agent program its rules.
//!
//! The claim is an abstract Unix socket with a fixed name. Like the rules, the name belongs to the network
//! namespace, whatever process and mount namespaces agents are in. The kernel frees the name when its
//! process ends, for any reason. All backends share the name, because each removes what another kplane
//! backend left behind.
//!
//! Any process may bind such a name, also a container with the node's network. So an agent locks a file in the folder of
//! its cache as well, which only root of the node and the agents' own Pods reach. A process with the name is an agent if
//! that file is locked. All others are logged and ignored, so that none of them keeps an agent from its node. Without such
//! a folder, a process counts as an agent if its user is root or the agent's own.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt,
};
use nix::unistd::geteuid;
use tokio::time::{Instant, sleep};

/// The name of the socket; tools show it as `@kplane-agent`.
const NAME: &str = "kplane-agent";
/// Start of the name of the file that agents lock, in the folder of their cache. The number of the network namespace
/// follows, so that agents of several namespaces may share a folder.
pub(crate) const LOCK: &str = "agent.lock";
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
    /// The name; `None` = another program has it.
    listener: Option<UnixListener>,
    /// The locked file; `None` = there is no folder for it.
    lock_file: Option<File>,
}

/// The file that agents lock.
enum Lock {
    /// This process has locked it.
    Ours(File),
    /// Another process has locked it.
    Theirs,
    /// There is no such file, or it cannot be used.
    Unknown,
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
    /// Takes the claim if no other agent holds it; `folder` is that of the agents' cache. Returns `None` when that cannot
    /// be determined; this is logged, and the agent serves anyway.
    ///
    /// # Errors
    /// [`Taken`] names the process that holds the claim.
    pub fn take(folder: Option<&Path>) -> Result<Option<Self>, Taken> {
        Self::take_named(NAME, folder)
    }

    /// Takes the claim like [`Claim::take`], but first waits for up to [`PATIENCE`] for another agent to
    /// release it. Creates the folder.
    ///
    /// # Errors
    /// [`Taken`].
    pub async fn wait_and_take(folder: Option<&Path>) -> Result<Option<Self>, Taken> {
        if let Some(folder) = folder {
            // Without the file there is less proof. The cache says what is wrong with the folder.
            let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
            let _ = made.and_then(|()| open(folder, OpenOptions::new().create(true).mode(0o600)));
        }
        Self::wait_and_take_named(NAME, folder).await
    }

    /// Logs other processes that ask for the claim, until the returned future is dropped. Dropping the
    /// future does not release the claim.
    ///
    /// # Errors
    /// The runtime cannot use the socket.
    pub fn watch(&self) -> io::Result<impl Future<Output = ()> + Send + use<>> {
        let listener = self.listener.as_ref().map(UnixListener::try_clone);
        let listener = listener
            .transpose()?
            .map(|listener| {
                listener.set_nonblocking(true)?;
                tokio::net::UnixListener::from_std(listener)
            })
            .transpose()?;
        Ok(async move {
            if let Some(listener) = listener {
                log_contenders(listener).await;
            }
        })
    }

    fn take_named(name: &str, folder: Option<&Path>) -> Result<Option<Self>, Taken> {
        let mut found = None;
        // A holder may end between `bind` and the query, or its lock before its name, so a second attempt may succeed.
        for attempt in 0..2 {
            if attempt > 0 {
                // The lock would be in the way of the next one.
                drop(found.take());
                std::thread::sleep(PAUSE);
            }
            let listener = match bind(name) {
                Ok(listener) => Some(listener),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => None,
                Err(error) => return Ok(unknown(&error)),
            };
            // After the name, so that the kernel frees the name first when this process ends.
            let lock = lock(folder);
            if listener.is_some() && !matches!(lock, Lock::Theirs) {
                return Ok(Some(Self::new(listener, lock)));
            }
            drop(listener);
            match holder(name) {
                Ok(holder) if is_agent(holder, &lock) => {
                    return Err(Taken(holder.unwrap_or(UNSEEN)));
                }
                Ok(holder) => found = holder.map(|holder| (holder, lock)),
                Err(error) => return Ok(unknown(&error.into())),
            }
        }
        let (holder, lock) = found.ok_or(Taken(UNSEEN))?;
        tracing::warn!(
            %holder,
            "the process that has the abstract Unix socket @{name} is not an agent, because it is not root or has not \
             locked the agents' folder; continuing"
        );
        let claim = Self::new(None, lock);
        Ok(Some(claim).filter(|claim| claim.lock_file.is_some()))
    }

    fn new(listener: Option<UnixListener>, lock: Lock) -> Self {
        let lock_file = match lock {
            Lock::Ours(file) => Some(file),
            Lock::Theirs | Lock::Unknown => None,
        };
        Self {
            listener,
            lock_file,
        }
    }

    async fn wait_and_take_named(name: &str, folder: Option<&Path>) -> Result<Option<Self>, Taken> {
        let holder = match Self::take_named(name, folder) {
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
            // An agent that goes on is not asked again and again.
            let is_free = match lock(folder) {
                Lock::Ours(_) => true,
                Lock::Theirs => false,
                Lock::Unknown => bind(name).is_ok(),
            };
            if is_free && let Ok(taken) = Self::take_named(name, folder) {
                return Ok(taken);
            }
        }
        Self::take_named(name, folder)
    }
}

impl Holder {
    /// Returns whether the user of the process may run an agent: root, or the user of this process.
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

/// A holder that has shown nothing of itself.
const UNSEEN: Holder = Holder { pid: None, uid: 0 };

/// Returns the agent that programs this network namespace, if one does; `folder` is that of its cache.
///
/// # Errors
/// The socket cannot be queried.
pub fn at_work(folder: Option<&Path>) -> Result<Option<Holder>, Errno> {
    let holder = holder(NAME)?;
    Ok(is_agent(holder, &lock(folder)).then_some(holder.unwrap_or(UNSEEN)))
}

/// Returns whether there is an agent, which may be the process that has the name.
fn is_agent(holder: Option<Holder>, lock: &Lock) -> bool {
    match lock {
        Lock::Ours(_) => false,
        Lock::Theirs => true,
        Lock::Unknown => holder.is_some_and(Holder::is_believed),
    }
}

fn bind(name: &str) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

/// Tries to lock the file in a folder.
fn lock(folder: Option<&Path>) -> Lock {
    let file = folder.map(|folder| open(folder, &mut OpenOptions::new()));
    let Some(Ok(file)) = file else {
        return Lock::Unknown;
    };
    match file.try_lock() {
        Ok(()) => Lock::Ours(file),
        Err(TryLockError::WouldBlock) => Lock::Theirs,
        Err(TryLockError::Error(_)) => Lock::Unknown,
    }
}

fn open(folder: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let options = options.read(true).write(true);
    options
        .custom_flags(flags.bits())
        .open(folder.join(format!("{LOCK}-{}", namespace()?)))
}

/// Returns the number of the calling thread's network namespace.
fn namespace() -> io::Result<u64> {
    Ok(fs::metadata("/proc/thread-self/ns/net")?.ino())
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
