//! What benchmarks fill a kernel or an API server with.

pub mod objects;
pub mod workload;

use std::env;
use std::io;
use std::path::{Path, PathBuf};

use tokio::runtime::{Builder, Runtime};

/// Makes a runtime of the calling thread alone.
///
/// # Errors
/// The kernel refuses it.
pub fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// Returns the folder of the programs that were built with this benchmark: `target/release/deps/..` has them two levels
/// up.
///
/// # Errors
/// This program has no path, or not such a one.
pub fn programs() -> io::Result<PathBuf> {
    let me = env::current_exe()?;
    let folder = me.parent().and_then(Path::parent);
    folder
        .map(Path::to_owned)
        .ok_or(io::ErrorKind::NotFound.into())
}
