//! kplane's own programs, built by cargo for tests that run them as users do.

use std::env;
use std::io::{BufRead as _, BufReader};
use std::path::{self, Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

/// Variable that names a folder with the built programs. Cargo is not started then.
pub const PROGRAMS: &str = "KPLANE_PROGRAMS";

/// The paths of the programs.
#[derive(Clone, Debug)]
pub struct Product {
    /// `kp-controlplane`.
    pub control_plane: PathBuf,
    /// `kp-nodeagent`.
    pub node_agent: PathBuf,
    /// `kpctl`.
    pub kpctl: PathBuf,
    /// `kplane-dev`, the developers' program.
    pub dev: PathBuf,
    /// The folder of all of them.
    pub folder: PathBuf,
}

impl Product {
    /// Returns the programs in the folder that [`PROGRAMS`] names. Without this variable, cargo builds them as it
    /// builds tests (without optimisation), with its own progress on standard error; nothing happens when they
    /// are up to date. Call it before the process leaves the machine's network, and before threads are started.
    ///
    /// # Errors
    /// They do not compile, or the folder lacks one.
    pub fn build() -> Result<Self> {
        static BUILT: Mutex<Option<Product>> = Mutex::new(None);
        let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(product) = &*built {
            return Ok(product.clone());
        }
        let product = match env::var_os(PROGRAMS) {
            Some(folder) => Self::find(&path::absolute(folder)?, || {
                format!(
                    "{PROGRAMS} names this folder; `cargo build --workspace --bins` makes the program"
                )
            }),
            None => Self::find(&compile()?, || "cargo has not built it".to_owned()),
        }?;
        Ok(built.insert(product).clone())
    }

    fn find(folder: &Path, hint: impl Fn() -> String) -> Result<Self> {
        let find = |name: &str| {
            let program = folder.join(name);
            let is_there = program.is_file();
            ensure!(is_there, "there is no {}: {}", program.display(), hint());
            Ok(program)
        };
        Ok(Self {
            control_plane: find("kp-controlplane")?,
            node_agent: find("kp-nodeagent")?,
            kpctl: find("kpctl")?,
            dev: find("kplane-dev")?,
            folder: folder.to_owned(),
        })
    }
}

/// Builds all programs, and returns their folder. The whole workspace is named, so that cargo builds
/// dependencies with the features that they have in `cargo test --workspace`, and nothing twice.
fn compile() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    let mut child = cargo()
        .args(["build", "--workspace", "--bins"])
        .arg("--message-format=json-render-diagnostics")
        .current_dir(root.context("tests lies in a checkout")?)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("start cargo")?;
    let stdout = child.stdout.take().context("cargo has no output")?;
    let mut folder = None;
    for line in BufReader::new(stdout).lines() {
        let message: Value = serde_json::from_str(&line?).unwrap_or_default();
        let program = message["executable"].as_str().map(Path::new);
        folder = folder.or_else(|| program?.parent().map(PathBuf::from));
    }
    let status = child.wait().context("wait for cargo")?;
    ensure!(status.success(), "cargo build: {status}");
    folder.context("cargo has built no program")
}

/// Returns cargo for a program that cargo itself has started. Cargo's variables are removed: a
/// build script that checks them (ring's does) would otherwise build everything again.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        let reported = name.to_str().is_some_and(|name| {
            name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
        });
        if reported {
            command.env_remove(name);
        }
    }
    command
}
