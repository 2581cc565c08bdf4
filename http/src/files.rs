//! The limit of open files: each connection takes one.

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the soft limit of open files of this process to the hard one; returns it.
///
/// # Errors
/// The kernel's refusal. The process goes on with what it has.
pub fn raise_file_limit() -> Result<u64, Errno> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok(hard)
}

/// How many files this process may have open; if the kernel does not say, what it gives at least.
#[must_use]
pub fn file_limit() -> u64 {
    /// The usual soft limit.
    const USUAL: u64 = 1024;
    getrlimit(Resource::RLIMIT_NOFILE).map_or(USUAL, |(soft, _)| soft)
}
