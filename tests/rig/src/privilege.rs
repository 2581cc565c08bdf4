//! The privileges and tools that a test needs: if missing, the test fails in CI and is skipped
//! elsewhere.

use std::env;
use std::fmt;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::process::Command;

use anyhow::{Context as _, Error, Result, bail};

use crate::netns::NetNs;

/// Variables that turn a skip into a failure, if set to anything but `0`, `false` or nothing.
const STRICT_VARS: [&str; 2] = ["CI", "REQUIRE_NETNS"];
/// Variable with a file to which each skip adds a line: libtest does not show what a test prints that passes.
const SKIPPED: &str = "KPLANE_SKIPPED";

/// Returns whether network namespaces can be created; use as `if !require_netns()? { return Ok(())
/// }`.
///
/// # Errors
/// They cannot, and [`CI` or `REQUIRE_NETNS`](is_strict) is set.
pub fn require_netns() -> Result<bool> {
    Ok(available(NetNs::new("probe"))?.is_some())
}

/// Returns whether a program is on the `PATH`; use like [`require_netns`].
///
/// # Errors
/// It is not, and [`CI` or `REQUIRE_NETNS`](is_strict) is set.
pub fn require_tool(name: &str) -> Result<bool> {
    Ok(available(tool(name))?.is_some())
}

fn tool(name: &str) -> Result<()> {
    is_on_path(name)
        .then_some(())
        .with_context(|| format!("{name} is not on the PATH"))
}

/// Returns whether a command ends well, which shows that `what` is installed; use like [`require_netns`].
///
/// # Errors
/// It does not, and [`CI` or `REQUIRE_NETNS`](is_strict) is set.
pub fn require_command(command: &mut Command, what: &str) -> Result<bool> {
    let output = command.output();
    let ends_well = output.is_ok_and(|output| output.status.success());
    let found = ends_well.then_some(());
    Ok(available(found.with_context(|| format!("{what} cannot be used")))?.is_some())
}

/// Returns whether a program is on the `PATH`.
pub fn is_on_path(name: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|folder| folder.join(name).is_file())
}

/// Returns whether missing privileges and tools are failures here.
pub fn is_strict() -> bool {
    STRICT_VARS.into_iter().any(is_set)
}

/// Returns whether an environment variable is set to anything but `0`, `false` or nothing.
pub fn is_set(var: &str) -> bool {
    env::var(var).is_ok_and(|value| !matches!(value.as_str(), "" | "0" | "false"))
}

/// Returns the value, or `None` and a printed line where it is missing and may be.
///
/// # Errors
/// It is missing, and [`CI` or `REQUIRE_NETNS`](is_strict) is set.
pub fn available<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_strict() => bail!("required here, but: {error:#}"),
        Err(error) => {
            skip(&format!("{error:#}"));
            Ok(None)
        }
    }
}

/// The error of a test that cannot run here: [`harness`](crate::harness) counts the test as passed.
#[derive(Debug)]
pub(crate) struct Skipped;

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("skipped")
    }
}

/// Returns the value for a test of [`harness`](crate::harness), which ends here where the value is missing and may be.
///
/// # Errors
/// The value is missing.
pub fn needed<T>(result: Result<T>) -> Result<T> {
    available(result)?.context(Skipped)
}

/// Ends a test of [`harness`](crate::harness) here unless these programs are on the `PATH`.
///
/// # Errors
/// A program is missing.
pub fn need_tools(names: &[&str]) -> Result<()> {
    names.iter().try_for_each(|name| needed(tool(name)))
}

/// Returns the error that ends a test of [`harness`](crate::harness), and says why the test is [skipped](skip).
pub fn skipped(why: &str) -> Error {
    skip(why);
    Error::msg(Skipped)
}

/// Says that a test or a suite is skipped, and why: in its output, and in the file that `KPLANE_SKIPPED` names.
pub fn skip(why: &str) {
    println!("skipped: {why}");
    let Some(file) = env::var_os(SKIPPED) else {
        return;
    };
    let file = OpenOptions::new().create(true).append(true).open(file);
    let first = why.lines().next().unwrap_or_default();
    // One write, so that lines of several threads do not mix.
    let noted = file.and_then(|mut file| file.write_all(format!("{first}\n").as_bytes()));
    if let Err(error) = noted {
        println!("cannot note it: {error}");
    }
}
