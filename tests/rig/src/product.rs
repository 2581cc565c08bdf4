//! kplane's own programs, built by cargo for tests that run them as users do.

use std::env;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

/// The packages to build. The tests are among them, so that cargo reuses the dependencies built for
/// them.
const PACKAGES: [&str; 4] = ["kp-controlplane", "kp-nodeagent", "kpctl", "kplane-tests"];

/// The paths of the programs.
#[derive(Clone, Debug)]
pub struct Product {
    /// `kp-controlplane`.
    pub control_plane: PathBuf,
    /// `kp-nodeagent`.
    pub node_agent: PathBuf,
    /// `kpctl`.
    pub kpctl: PathBuf,
}

impl Product {
    /// Builds the programs as tests are built (without optimisation), with cargo's own progress on
    /// standard error. Nothing happens when they are up to date. Call it before the process leaves
    /// the machine's network, and before threads are started.
    ///
    /// # Errors
    /// They do not compile.
    pub fn build() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
        let mut child = cargo()
            .args([
                "build",
                "--bins",
                "--message-format=json-render-diagnostics",
            ])
            .args(PACKAGES.iter().flat_map(|name| ["--package", name]))
            .current_dir(root.context("tests lies in a checkout")?)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("start cargo")?;
        let stdout = child.stdout.take().context("cargo has no output")?;
        let mut built = Vec::new();
        for line in BufReader::new(stdout).lines() {
            let message: Value = serde_json::from_str(&line?).unwrap_or_default();
            built.extend(message["executable"].as_str().map(PathBuf::from));
        }
        let status = child.wait().context("wait for cargo")?;
        ensure!(status.success(), "cargo build: {status}");
        let find = |name: &str| {
            let mut all = built.iter();
            let found = all.find(|path| path.file_name().is_some_and(|file| file == name));
            let found = found.with_context(|| format!("cargo has built no {name}"))?;
            Ok::<_, anyhow::Error>(found.clone())
        };
        Ok(Self {
            control_plane: find("kp-controlplane")?,
            node_agent: find("kp-nodeagent")?,
            kpctl: find("kpctl")?,
        })
    }
}

/// Returns cargo for a program that cargo itself has started. Cargo's variables are removed: a
/// build script that checks them (ring's does) would otherwise build everything again.
#[must_use]
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        let told = name.to_str().is_some_and(|name| {
            name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
        });
        if told {
            command.env_remove(name);
        }
    }
    command
}
