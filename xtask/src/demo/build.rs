//! The product's programs: built by cargo, or taken from a folder.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

const PROGRAMS: [&str; 3] = ["kp-controlplane", "kp-nodeagent", "kpctl"];

/// The paths of the programs.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    /// `kp-controlplane`.
    pub(crate) control_plane: PathBuf,
    /// `kp-nodeagent`.
    pub(crate) node_agent: PathBuf,
    /// `kpctl`.
    pub(crate) kpctl: PathBuf,
}

impl Programs {
    /// Takes the programs from a folder.
    pub(crate) fn in_folder(folder: &Path) -> Result<Self> {
        let folder = std::path::absolute(folder)?;
        let find = |name: &str| {
            let path = folder.join(name);
            ensure!(path.is_file(), "there is no {}", path.display());
            Ok(path)
        };
        let [control_plane, node_agent, kpctl] = PROGRAMS.map(find);
        Ok(Self {
            control_plane: control_plane?,
            node_agent: node_agent?,
            kpctl: kpctl?,
        })
    }

    /// Builds the programs, with cargo's own progress on standard error.
    pub(crate) fn build() -> Result<Self> {
        let mut command = kplane_tests::product::cargo();
        command.args([
            "build",
            "--release",
            "--message-format=json-render-diagnostics",
        ]);
        command.args(PROGRAMS.iter().flat_map(|name| ["--package", name]));
        command
            .current_dir(workspace())
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut child = command.spawn().context("start cargo")?;
        let stdout = child.stdout.take().context("cargo has no output")?;
        let mut found = Vec::new();
        for line in BufReader::new(stdout).lines() {
            found.extend(program(&line.context("read cargo's messages")?));
        }
        let status = child.wait().context("wait for cargo")?;
        ensure!(status.success(), "the build failed: cargo {status}");
        let find = |name: &str| {
            let built = found
                .iter()
                .find(|path| path.file_name().is_some_and(|n| n == name));
            built
                .cloned()
                .with_context(|| format!("cargo has built no {name}"))
        };
        let [control_plane, node_agent, kpctl] = PROGRAMS.map(find);
        Ok(Self {
            control_plane: control_plane?,
            node_agent: node_agent?,
            kpctl: kpctl?,
        })
    }
}

/// Returns the workspace's folder.
pub(crate) fn workspace() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package)
}

/// Returns the program that a message of cargo announces.
fn program(message: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(message).ok()?;
    message["executable"].as_str().map(PathBuf::from)
}
