//! Checks `docs/kube-proxy-compat.md` against the code: every behaviour has its row, and every row
//! with a claim names tests that exist.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cargo::output;

const PAGE: &str = "docs/kube-proxy-compat.md";

/// Sections of kube-proxy's behaviours that the page covers, and the number of behaviours in each.
const SECTIONS: [(char, usize); 8] = [
    ('A', 30),
    ('B', 10),
    ('C', 14),
    ('D', 9),
    ('E', 13),
    ('F', 6),
    ('G', 6),
    ('I', 8),
];

/// The verdicts of a row. The first two are claims.
const VERDICTS: [&str; 5] = ["same", "better", "differs", "planned", "n/a"];

/// One line of a table: `| A1 | what | verdict | tests and remarks |`.
struct Row<'a> {
    id: &'a str,
    verdict: &'a str,
    remarks: &'a str,
}

/// Checks that the page is complete and that its claims have tests.
pub(super) fn check(root: &Path) -> Result<()> {
    let page = std::fs::read_to_string(root.join(PAGE)).with_context(|| format!("read {PAGE}"))?;
    let mut git = Command::new("git");
    git.args(["grep", "--untracked", "-hoE", "fn [a-z0-9_]+", "--", "*.rs"]);
    let functions = output(git.current_dir(root))?;
    let functions = functions.lines().filter_map(|line| line.strip_prefix("fn "));
    let problems = problems(&page, &functions.collect());
    for problem in &problems {
        println!("{PAGE}: {problem}");
    }
    ensure!(problems.is_empty(), "{} problems", problems.len());
    Ok(())
}

fn problems(page: &str, functions: &BTreeSet<&str>) -> Vec<String> {
    let rows: Vec<Row<'_>> = page.lines().filter_map(row).collect();
    let mut problems = Vec::new();
    for id in ids() {
        match rows.iter().filter(|row| row.id == id).count() {
            1 => {}
            0 => problems.push(format!("{id} is missing")),
            n => problems.push(format!("{id} has {n} rows")),
        }
    }
    for row in &rows {
        let (id, verdict) = (row.id, row.verdict);
        if !VERDICTS.contains(&verdict) {
            problems.push(format!("{id}: {verdict:?} is not one of {VERDICTS:?}"));
        }
        let tests: Vec<&str> = tests(row.remarks).collect();
        if VERDICTS[..2].contains(&verdict) && tests.is_empty() {
            problems.push(format!("{id}: {verdict:?}, but no test is named"));
        }
        let unknown = tests.into_iter().filter(|test| !functions.contains(test));
        problems.extend(unknown.map(|test| format!("{id}: there is no test {test}")));
    }
    problems
}

fn ids() -> impl Iterator<Item = String> {
    SECTIONS
        .into_iter()
        .flat_map(|(letter, count)| (1..=count).map(move |number| format!("{letter}{number}")))
}

/// Parses a line of a table whose first cell is an id.
fn row(line: &str) -> Option<Row<'_>> {
    let cells: Vec<&str> = line.strip_prefix('|')?.split('|').map(str::trim).collect();
    let [id, _, verdict, remarks, ..] = cells[..] else {
        return None;
    };
    let letter = id.chars().next()?;
    let known = SECTIONS.iter().any(|(section, _)| *section == letter);
    let number = id.get(1..)?.parse::<usize>().is_ok();
    (known && number).then_some(Row {
        id,
        verdict,
        remarks,
    })
}

/// Returns names in backticks that may be tests: with an underscore, and otherwise only characters
/// of a function's name.
fn tests(remarks: &str) -> impl Iterator<Item = &str> {
    let quoted = remarks.split('`').skip(1).step_by(2);
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
    quoted.filter(move |name| name.contains('_') && name.bytes().all(plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_and_claims_without_tests_are_found() {
        let page = "| id | what | verdict | tests |\n|---|---|---|---|\n\
            | A1 | x | same | `a1_is_tested`, `nf_tables` aside |\n\
            | A2 | x | better | see `README.md` |\n\
            | A3 | x | great | - |\n\
            | A4 | x | n/a | - |\n| A4 | x | n/a | - |\n";
        let found = problems(page, &BTreeSet::from(["a1_is_tested"]));
        for problem in [
            "A1: there is no test nf_tables",
            "A2: \"better\", but no test is named",
            "A4 has 2 rows",
            "B1 is missing",
            "A3: \"great\" is not one of",
        ] {
            assert!(found.iter().any(|p| p.starts_with(problem)), "{problem}");
        }
        assert!(!found.iter().any(|p| p.contains("a1_is_tested")));
    }
}
