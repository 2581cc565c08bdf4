//! The programs that are compared with kplane: those of the machine, or Debian's, unpacked into a folder of the cache.
//! Nothing is installed, so no service of the system starts.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::debian;

/// Debian's packages, with those libraries that small systems lack.
const PACKAGES: [&str; 8] = [
    "haproxy",
    "nginx",
    "libnginx-mod-stream",
    "socat",
    "liblua5.3-0",
    "libopentracing-c-wrapper0",
    "libopentracing1",
    "libwrap0",
];

/// Where programs are, below the root of a file system.
const FOLDERS: [&str; 3] = ["usr/sbin", "usr/bin", "usr/local/sbin"];

/// The programs.
pub(crate) struct Programs {
    /// A file system with packages of Debian; `None` if the machine has all programs.
    unpacked: Option<PathBuf>,
}

impl Programs {
    /// Finds the programs, and downloads what is missing.
    pub(crate) fn ensure() -> Result<Self> {
        let machine = Self { unpacked: None };
        let names = ["haproxy", "nginx", "socat"];
        if names.iter().all(|name| machine.path(name).is_ok()) && machine.stream_module().is_some()
        {
            return Ok(machine);
        }
        let folder = debian::unpacked(&PACKAGES)?;
        Ok(Self {
            unpacked: Some(folder),
        })
    }

    fn root(&self) -> &Path {
        self.unpacked.as_deref().unwrap_or(Path::new("/"))
    }

    fn path(&self, name: &str) -> Result<PathBuf> {
        FOLDERS
            .map(|folder| self.root().join(folder).join(name))
            .into_iter()
            .find(|path| path.exists())
            .with_context(|| format!("there is no {name} below {}", self.root().display()))
    }

    /// Returns a command on the processor that all contenders get.
    pub(crate) fn command(&self, name: &str) -> Result<Command> {
        let mut command = pinned(&self.path(name)?);
        if let Some(root) = &self.unpacked {
            let library = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
            command.env("LD_LIBRARY_PATH", root.join(library));
        }
        Ok(command)
    }

    /// Returns nginx' module for TCP and UDP.
    pub(crate) fn stream_module(&self) -> Option<PathBuf> {
        let path = self.root().join("usr/lib/nginx/modules/ngx_stream_module.so");
        path.exists().then_some(path)
    }

    /// Returns the version that a program prints.
    pub(crate) fn version(&self, name: &str, argument: &str) -> Result<String> {
        let output = self
            .command(name)?
            .arg(argument)
            .output()
            .with_context(|| format!("run {name}"))?;
        ensure!(
            output.status.success(),
            "{name} {argument}: {}",
            output.status
        );
        // nginx prints it on standard error.
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        let is_number = |word: &&str| word.starts_with(|c: char| c.is_ascii_digit());
        let words = text.split([' ', '/', '\n', '-']);
        let number = words.into_iter().find(is_number);
        Ok(format!("{name} {}", number.unwrap_or("of unknown version")))
    }
}

/// Returns a command that runs on one processor, so that programs with a thread for each processor have one.
pub(crate) fn pinned(program: &Path) -> Command {
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", "0"]).arg(program);
    command
}
