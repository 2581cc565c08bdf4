//! Checks of the tree that no other tool makes.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::cargo::output;

/// Most lines of a file; a longer file has more than one subject. Files of tests are data and may
/// be longer.
const MAX_LINES: usize = 500;

/// Checks every Rust file that is under version control or would be.
pub(super) fn check(root: &Path) -> Result<()> {
    let listing = output(
        Command::new("git")
            .args([
                "ls-files",
                "--cached",
                "--others",
                "--exclude-standard",
                "--",
                "*.rs",
            ])
            .current_dir(root),
    )?;
    let mut problems = Vec::new();
    for file in listing.lines().collect::<BTreeSet<_>>() {
        let path = root.join(file);
        // The file was deleted, and that is not committed yet.
        let Ok(text) = std::fs::read_to_string(&path) else {
            continue;
        };
        problems.extend(problems_of(file, &text));
    }
    for problem in &problems {
        println!("{problem}");
    }
    ensure!(problems.is_empty(), "{} problems", problems.len());
    Ok(())
}

fn problems_of(file: &str, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let lines = text.lines().count();
    if lines > MAX_LINES && !file.contains("tests") {
        problems.push(format!(
            "{file}: {lines} lines are more than {MAX_LINES}; split it by subject"
        ));
    }
    if !file.contains("tests") && !text.trim_start().starts_with("//!") {
        problems.push(format!(
            "{file}: begin with a module comment: purpose, owner, invariants"
        ));
    }
    let unfinished = ["TO", "DO"].concat();
    for (n, line) in text.lines().enumerate() {
        if line.contains(&unfinished) && !line.contains("issue") {
            problems.push(format!("{file}:{}: {unfinished} without an issue", n + 1));
        }
    }
    problems
}
