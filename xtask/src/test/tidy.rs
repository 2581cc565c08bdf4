//! Checks of the tree that no other tool makes.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Result, ensure};

use crate::cargo::files;
use crate::weigh;

mod habits;

/// The page that defines the invariants.
const PAGE: &str = "ARCHITECTURE.md";

/// Most lines of a file; a longer file has more than one subject. Files of tests are data and may be longer.
const MAX_LINES: usize = 500;

/// Checks every Rust file that is under version control or would be.
pub(super) fn check(root: &Path) -> Result<()> {
    let listing = files(root, "*.rs")?;
    let page = std::fs::read_to_string(root.join(PAGE))?;
    let invariants = invariants(&page);
    let mut problems = weigh::problems(root)?;
    for file in listing.lines().collect::<BTreeSet<_>>() {
        let path = root.join(file);
        // The file was deleted, and that is not committed yet.
        let Ok(text) = std::fs::read_to_string(&path) else {
            continue;
        };
        problems.extend(problems_of(file, &text));
        if file != habits::FILE {
            let found = habits::found(&text);
            problems.extend(found.into_iter().map(|(n, habit)| format!("{file}:{n}: {habit}")));
        }
        if file != file!() {
            problems.extend(unknown_invariants(file, &text, &invariants));
        }
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
    if lines > MAX_LINES && !weigh::is_of_tests(file) {
        problems.push(format!(
            "{file}: {lines} lines are more than {MAX_LINES}; split it by subject"
        ));
    }
    if !weigh::is_of_tests(file) && !text.trim_start().starts_with("//!") {
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

/// Returns the names of the invariants that the page defines, each as `* **name** - ..`.
fn invariants(page: &str) -> BTreeSet<&str> {
    page.lines()
        .filter_map(|line| line.strip_prefix("* **"))
        .filter_map(|item| item.split_once("** - "))
        .map(|(name, _)| name)
        .collect()
}

/// Finds comments that cite an invariant by a number, or by a name that the page does not define.
fn unknown_invariants(file: &str, text: &str, known: &BTreeSet<&str>) -> Vec<String> {
    let mut problems = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let Some((_, comment)) = line.split_once("//") else {
            continue;
        };
        for cited in comment.split("invariant").skip(1) {
            let is_number = cited.trim_start().starts_with(|c: char| c.is_ascii_digit());
            let name = cited.strip_prefix(": ").unwrap_or_default();
            let is_of_name = |c: &char| c.is_ascii_lowercase() || *c == '-';
            let name: String = name.chars().take_while(is_of_name).collect();
            let is_unknown = !name.is_empty() && !known.contains(&*name);
            if is_number || is_unknown {
                problems.push(format!(
                    "{file}:{}: cite an invariant by its name in {PAGE}: (invariant: absence)",
                    index + 1
                ));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invariants_are_cited_by_names_that_there_are() {
        let page = "## Invariants\n\n* **absence** - Absence ..\n* **no-gap** - A place ..\n";
        let known = invariants(page);
        assert_eq!(known, BTreeSet::from(["absence", "no-gap"]));
        let text = "/// All (invariant: no-gap).\n// invariant 2\n// (invariant: nonsense)\n// **Invariants.** Fine.\n";
        let lines: Vec<bool> = ["a:2:", "a:3:"]
            .iter()
            .zip(unknown_invariants("a", text, &known))
            .map(|(start, problem)| problem.starts_with(start))
            .collect();
        assert_eq!(lines, [true, true]);
    }
}
