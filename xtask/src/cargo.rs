//! Runs cargo and other programs in the workspace.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// The benchmarks, which are a workspace of their own.
pub(crate) const BENCH: &str = "bench/Cargo.toml";
/// The targets for fuzzing, which are another one.
pub(crate) const FUZZ: &str = "fuzz/Cargo.toml";
/// Checks lints.
const CLIPPY: &str = "clippy-driver";

/// Returns the root of the workspace.
pub(crate) fn root() -> Result<&'static Path> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    root.context("xtask lies in a folder of the workspace")
}

/// Returns the folder with everything that cargo builds.
fn target() -> Result<PathBuf> {
    let folder = env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    Ok(root()?.join(folder))
}

/// Returns the folder with a profile's programs. The folder of profile `dev` is `debug`.
pub(crate) fn programs(profile: &str) -> Result<PathBuf> {
    Ok(target()?.join(if profile == "dev" { "debug" } else { profile }))
}

/// Prepares cargo without the variables that describe this program's package. Build scripts that
/// read such variables (ring's does) would take them for a change of everything.
pub(crate) fn cargo() -> Result<Command> {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()?);
    for (name, _) in env::vars_os() {
        let of_package = name.to_str().is_some_and(|name| {
            name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
        });
        if of_package {
            command.env_remove(name);
        }
    }
    Ok(command)
}

/// Prepares a command of cargo for a workspace beside the product's. It reads the profiles in the product's manifest as
/// configuration, and takes the dependencies that are compiled for the product.
pub(crate) fn apart(manifest: &str, command: &str) -> Result<Command> {
    let mut cargo = cargo()?;
    cargo.args([
        command,
        "--manifest-path",
        manifest,
        "--config",
        "Cargo.toml",
    ]);
    cargo.arg("--target-dir").arg(target()?);
    Ok(cargo)
}

/// Prepares cargo as tests are built: rustc, which compiles the workspace's own crates, also runs clippy's lints. A
/// separate `cargo clippy` would read each line a second time. Without clippy, rustc alone compiles.
pub(crate) fn as_tests() -> Result<Command> {
    let mut command = cargo()?;
    if has_clippy() {
        command.env("RUSTC_WORKSPACE_WRAPPER", CLIPPY);
    }
    Ok(command)
}

/// Returns whether clippy is installed.
pub(crate) fn has_clippy() -> bool {
    let version = Command::new(CLIPPY).arg("--version").output();
    version.is_ok_and(|output| output.status.success())
}

/// Builds all programs as tests are built. The whole workspace is named, so that dependencies have the features that
/// they have in the tests, and nothing is built twice.
pub(crate) fn build_as_tests(options: &[&str]) -> Result<()> {
    status(as_tests()?.args(["build", "--workspace", "--bins"]).args(options))
}

/// Runs cargo.
///
/// # Errors
/// Cargo cannot be started, or fails.
pub(crate) fn run(args: &[&str]) -> Result<()> {
    status(cargo()?.args(args))
}

/// Runs a program to its end.
///
/// # Errors
/// The program cannot be started, or fails.
pub(crate) fn status(command: &mut Command) -> Result<()> {
    let shown = shown(command);
    let status = command.status().with_context(|| format!("cannot run {shown}"))?;
    ensure!(status.success(), "{shown}: {status}");
    Ok(())
}

/// Runs a program and returns what it prints.
///
/// # Errors
/// The program cannot be started, fails, or prints something else than UTF-8.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let shown = shown(command);
    let output = command.output().with_context(|| format!("cannot run {shown}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{shown}: {}: {errors}",
        output.status
    );
    String::from_utf8(output.stdout).with_context(|| format!("{shown}: not UTF-8"))
}

/// The names of all files of the workspace that match a pattern, one a line: those under version control, and new ones.
///
/// # Errors
/// Git cannot tell them.
pub(crate) fn files(root: &Path, pattern: &str) -> Result<String> {
    let list = ["ls-files", "--cached", "--others", "--exclude-standard"];
    let mut git = Command::new("git");
    output(git.current_dir(root).args(list).args(["--", pattern]))
}

/// The program and its arguments, as a person would type them.
fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or_else(|| command.get_program());
    let mut words = vec![name.to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|arg| arg.to_string_lossy().into_owned()));
    words.join(" ")
}
