//! `cargo xtask book`: the documents as a book to read offline, built by mdBook.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Result, ensure};

use crate::cargo::root;
use crate::tool::Tool;

const HELP: &str = "\
Build the book of docs/ into target/book

Usage: cargo xtask book
";

/// Builds the book. Only the search index is of its features here: nothing watches or serves files.
const MDBOOK: Tool = Tool {
    name: "mdbook",
    version: "0.5.4",
    options: &["--no-default-features", "--features", "search"],
    takes: "three minutes",
};

pub(crate) fn run(args: &[String]) -> Result<ExitCode> {
    match args {
        [] => {
            install()?;
            build(root()?)?;
            println!("target/book/index.html is written");
        }
        _ => print!("{HELP}"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Installs mdBook, once.
pub(crate) fn install() -> Result<()> {
    MDBOOK.install()
}

/// Builds the book. A warning of mdBook fails it.
pub(crate) fn build(root: &Path) -> Result<()> {
    let mut command = Command::new(MDBOOK.program()?);
    command.args(["build", "docs"]).current_dir(root);
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success() && !said.contains("WARN"),
        "mdbook build docs: {said}"
    );
    Ok(())
}
