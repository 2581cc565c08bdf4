//! Network namespaces as values: owned by a file descriptor, entered by threads.
//!
//! A namespace lives as long as a [`NetNs`], a socket or a thread in it. There is no bind mount and
//! no `ip` binary, so nothing is left behind when the process dies.

use std::fmt;
use std::fs::File;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::resume_unwind;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, Result};
use nix::sched::{CloneFlags, setns, unshare};

use crate::link::Netlink;
use crate::process::{self, Process};
use crate::sysctl;

/// The calling thread's own network namespace.
const THIS_THREAD: &str = "/proc/thread-self/ns/net";

/// A network namespace. Clones are handles to the same one.
#[derive(Clone)]
pub struct NetNs(Arc<Inner>);

struct Inner {
    name: String,
    file: File,
}

/// Keeps the calling thread inside a namespace until it is dropped. Not `Send`: the kernel keeps
/// the namespace per thread.
#[must_use = "the thread leaves the namespace when this is dropped"]
pub struct Entered {
    home: File,
    _this_thread_only: PhantomData<*const ()>,
}

/// A descriptor for netlink messages that name this namespace.
impl AsFd for NetNs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }
}

impl NetNs {
    /// Creates a namespace with `lo` up and the settings of [`sysctl::BASE`]. The name is for
    /// messages.
    ///
    /// # Errors
    /// The process may not create namespaces; see [`crate::userns::enter`].
    pub fn new(name: impl Into<String>) -> Result<Self> {
        Self::create(name.into(), || {
            sysctl::set_all(sysctl::BASE)?;
            Netlink::open()?.up("lo")
        })
    }

    /// Creates a namespace as the kernel makes it: `lo` is down.
    ///
    /// # Errors
    /// As [`NetNs::new`].
    pub fn bare(name: impl Into<String>) -> Result<Self> {
        Self::create(name.into(), || Ok(()))
    }

    fn create(name: String, furnish: impl FnOnce() -> Result<()> + Send) -> Result<Self> {
        let file = on_thread(&name, || {
            leave().context("be root, or call userns::enter() first")?;
            furnish()?;
            File::open(THIS_THREAD).context(THIS_THREAD)
        })
        .with_context(|| format!("new network namespace {name}"))?;
        Ok(Self(Arc::new(Inner { name, file })))
    }

    /// Returns the calling thread's own namespace, with a name for messages.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn current(name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        let file = File::open(THIS_THREAD).context("this thread's network namespace")?;
        Ok(Self(Arc::new(Inner { name, file })))
    }

    /// Opens the namespace of a file, such as `/proc/1/ns/net`, with a name for messages.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn open(name: impl Into<String>, file: &Path) -> Result<Self> {
        let name = name.into();
        let file =
            File::open(file).with_context(|| format!("network namespace {}", file.display()))?;
        Ok(Self(Arc::new(Inner { name, file })))
    }

    /// Returns the name given at creation.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Moves the calling thread inside until the guard is dropped.
    ///
    /// # Errors
    /// The thread may not enter.
    pub fn enter(&self) -> Result<Entered> {
        let home = File::open(THIS_THREAD).context(THIS_THREAD)?;
        self.join()?;
        Ok(Entered {
            home,
            _this_thread_only: PhantomData,
        })
    }

    /// Runs `f` on a fresh thread inside and waits for it. Sockets opened in `f` stay in this
    /// namespace wherever they are used afterwards. A panic in `f` continues in the caller.
    ///
    /// # Errors
    /// The error of `f`, or no thread could be started inside.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        on_thread(self.name(), || {
            self.join()?;
            f()
        })
    }

    /// Starts a long-running thread inside.
    ///
    /// # Errors
    /// No thread could be started inside.
    pub fn spawn<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> Result<JoinHandle<T>> {
        // A new thread starts in its creator's namespace.
        let _inside = self.enter()?;
        thread::Builder::new()
            .name(self.name().to_owned())
            .spawn(f)
            .context("start a thread")
    }

    /// Starts a child process inside; it is killed when the handle is dropped.
    ///
    /// # Errors
    /// The program could not be started.
    pub fn command(&self, command: Command) -> Result<Process> {
        self.run(|| Process::start(command))
    }

    /// Runs a program inside to its end and returns its standard output.
    ///
    /// # Errors
    /// The program could not be started, or failed; the message has its standard error.
    pub fn output(&self, command: Command) -> Result<String> {
        self.run(|| process::output(command))
    }

    /// Returns a connection for changing links, addresses and routes of this namespace.
    ///
    /// # Errors
    /// The socket could not be opened.
    pub fn netlink(&self) -> Result<Netlink> {
        self.run(Netlink::open)
    }

    /// Writes kernel settings such as `("net.ipv4.ip_forward", "1")`.
    ///
    /// # Errors
    /// See [`sysctl::set_all`].
    pub fn sysctl(&self, settings: &[(&str, &str)]) -> Result<()> {
        self.run(|| sysctl::set_all(settings))
    }

    fn join(&self) -> Result<()> {
        setns(&self.0.file, CloneFlags::CLONE_NEWNET)
            .with_context(|| format!("enter network namespace {}", self.name()))
    }
}

impl fmt::Debug for NetNs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NetNs({})", self.name())
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Err(error) = setns(&self.home, CloneFlags::CLONE_NEWNET) {
            // A thread left in the wrong namespace would send its packets there.
            eprintln!("cannot leave a network namespace: {error}");
            std::process::abort();
        }
    }
}

/// Moves the calling thread into a new namespace with `lo` up, for good. [`NetNs::new`] leaves the caller where
/// it is.
pub(crate) fn replace() -> Result<()> {
    leave()?;
    Netlink::open()?.up("lo")
}

/// Moves the calling thread into a new namespace. All namespaces of the rig begin here.
fn leave() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNET).context("the kernel forbids a network namespace")
}

/// Runs `f` on a new thread, so that changes to the thread end with it.
fn on_thread<T: Send>(name: &str, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        thread::Builder::new()
            .name(name.to_owned())
            .spawn_scoped(scope, f)
            .context("start a thread")?
            .join()
            .unwrap_or_else(|panic| resume_unwind(panic))
    })
}
