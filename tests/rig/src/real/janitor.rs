//! A process that cleans up after a cluster whose own process was killed.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result};

use super::cgroups;

/// Ends with the first line of its input. If the input ends without one, removes cgroups and a folder. The kernel lets
/// a cgroup go when the last process has left, so there are several tries.
const SCRIPT: &str = r#"
read -r line && exit
for try in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    left=$(find "$@" -maxdepth 1 -name "$CGROUPS*" 2>/dev/null)
    [ -n "$left" ] || break
    find $left -depth -type d -exec rmdir {} + 2>/dev/null
    sleep 0.2
done
[ -z "$FOLDER" ] || rm -rf "$FOLDER"
"#;

/// The process. It acts when this process ends without dropping the handle.
#[derive(Debug)]
pub(super) struct Janitor {
    child: Child,
}

impl Janitor {
    /// Starts the process, for the cgroups of this process' clusters and a temporary folder.
    ///
    /// # Errors
    /// There is no shell.
    pub(super) fn start(temporary: Option<&Path>) -> Result<Self> {
        let mut command = Command::new("sh");
        command
            .args(["-c", SCRIPT, "sh"])
            .args(cgroups::mounts()?)
            .env("CGROUPS", cgroups::prefix())
            .env("FOLDER", temporary.unwrap_or(Path::new("")))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // What kills this process by its terminal shall not kill the other.
            .process_group(0);
        let child = command.spawn().context("start the janitor of a cluster")?;
        Ok(Self { child })
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        // Both cannot fail unless the process has been killed.
        let _ = self.child.stdin.take().map(|mut input| writeln!(input));
        let _ = self.child.wait();
    }
}
