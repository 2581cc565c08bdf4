//! The limit of open files. Each connection needs one.

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the process's soft limit of open files to the hard limit; returns the limit.
///
/// # Errors
/// The kernel's error. The process continues with its old limit.
pub fn raise_file_limit() -> Result<u64, Errno> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok(hard)
}

/// Returns how many files this process may open, or the kernel's usual soft limit if the kernel
/// does not report it.
pub fn file_limit() -> u64 {
    /// The usual soft limit.
    const USUAL: u64 = 1024;
    getrlimit(Resource::RLIMIT_NOFILE).map_or(USUAL, |(soft, _)| soft)
}
