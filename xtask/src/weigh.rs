//! `cargo xtask weigh`: how many lines of Rust each crate has, and how many it may have. A crate's manifest names its
//! budget, `[package.metadata.kplane] lines = { src = .., tests = .. }`; `cargo xtask test tidy` refuses more. Who
//! raises a number does it in a commit of its own, which says what the lines buy.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail, ensure};

use crate::cargo::{files, output, root};

const HELP: &str = "\
Count the lines of Rust of each crate, and compare them with its budget

Usage: cargo xtask weigh [BASE]

Arguments:
  [BASE]  Also count what this branch has added to a commit and removed, such as origin/main
";

/// How many of the largest modules of a crate are shown.
const LARGEST: usize = 3;

/// A kernel that only tests and the simulation use, of which no program keeps anything.
const SIMULATED: &str = "nodeagent/dataplane/src/backend/nftables/memory";

/// Returns whether only tests use a file.
pub(crate) fn is_of_tests(file: &str) -> bool {
    let mut parts = file.split('/');
    file.starts_with(SIMULATED)
        || parts.any(|part| part.starts_with("tests") || part.ends_with("tests.rs"))
}

/// Lines of the product, and lines that only tests use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Lines {
    src: usize,
    tests: usize,
}

impl Lines {
    /// Counts the lines of a file. Everything after the attribute of a module of tests belongs to the tests.
    fn of(file: &str, text: &str) -> Self {
        let all = text.lines().count();
        if is_of_tests(file) {
            return Self { src: 0, tests: all };
        }
        let lines: Vec<&str> = text.lines().collect();
        let is_start = |pair: &[&str]| pair[0] == "#[cfg(test)]" && pair[1] == "mod tests {";
        let src = lines.windows(2).position(is_start).unwrap_or(all);
        Self {
            src,
            tests: all - src,
        }
    }

    fn add(&mut self, other: Self) {
        self.src += other.src;
        self.tests += other.tests;
    }

    /// Reads the budget from a crate's manifest.
    fn budget(manifest: &str) -> Option<Self> {
        let (_, rest) = manifest.split_once("[package.metadata.kplane]\n")?;
        let numbers = rest.lines().next()?.strip_prefix("lines = { src = ")?;
        let (src, tests) = numbers.strip_suffix(" }")?.split_once(", tests = ")?;
        Some(Self {
            src: src.parse().ok()?,
            tests: tests.parse().ok()?,
        })
    }
}

/// A crate: its folder, what it may have and has, and the lines of its modules.
struct Crate {
    folder: String,
    budget: Lines,
    lines: Lines,
    modules: BTreeMap<String, usize>,
}

impl Crate {
    fn add(&mut self, file: &str, lines: Lines) {
        self.lines.add(lines);
        let inside = file[self.folder.len()..].trim_start_matches("/src/");
        let module = inside
            .split('/')
            .next()
            .unwrap_or_default()
            .trim_end_matches(".rs")
            .trim_start_matches('/');
        *self.modules.entry(module.to_owned()).or_default() += lines.src;
    }

    /// Returns the largest modules with their lines.
    fn largest(&self) -> String {
        let mut modules: Vec<_> = self.modules.iter().filter(|(_, lines)| **lines > 0).collect();
        modules.sort_by_key(|(_, lines)| std::cmp::Reverse(**lines));
        let shown: Vec<String> = modules
            .iter()
            .take(LARGEST)
            .map(|(name, lines)| format!("{name} {lines}"))
            .collect();
        shown.join(", ")
    }

    fn problem(&self) -> Option<String> {
        let Lines { src, tests } = self.lines;
        let is_more = src > self.budget.src || tests > self.budget.tests;
        is_more.then(|| {
            format!(
                "{}/Cargo.toml: {src} lines of source and {tests} of tests are more than the budget of {} and {}; take \
                 something out, or raise the number in a commit that says what it buys",
                self.folder, self.budget.src, self.budget.tests
            )
        })
    }
}

/// Counts all crates, in order of their folders.
fn crates(root: &Path) -> Result<Vec<Crate>> {
    let mut crates = Vec::new();
    for manifest in files(root, "*Cargo.toml")?.lines() {
        let Some((folder, _)) = manifest.rsplit_once('/') else {
            continue;
        };
        let text = std::fs::read_to_string(root.join(manifest)).context(manifest.to_owned())?;
        let Some(budget) = Lines::budget(&text) else {
            bail!(
                "{manifest}: name the budget: [package.metadata.kplane] lines = {{ src = .., tests = .. }}"
            );
        };
        crates.push(Crate {
            folder: folder.to_owned(),
            budget,
            lines: Lines::default(),
            modules: BTreeMap::new(),
        });
    }
    for file in files(root, "*.rs")?.lines() {
        // A deletion that is not committed yet leaves the name.
        let Ok(text) = std::fs::read_to_string(root.join(file)) else {
            continue;
        };
        let holds = |it: &&mut Crate| Path::new(file).starts_with(&it.folder);
        let holder = crates
            .iter_mut()
            .filter(holds)
            .max_by_key(|it| it.folder.len())
            .with_context(|| format!("{file} belongs to no crate"))?;
        holder.add(file, Lines::of(file, &text));
    }
    crates.sort_by(|a, b| a.folder.cmp(&b.folder));
    Ok(crates)
}

/// Returns what is over its budget.
pub(crate) fn problems(root: &Path) -> Result<Vec<String>> {
    Ok(crates(root)?.iter().filter_map(Crate::problem).collect())
}

/// Prints the table.
pub(crate) fn run(args: &[String]) -> Result<ExitCode> {
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let base = match words[..] {
        ["--help" | "-h", ..] => {
            print!("{HELP}");
            return Ok(ExitCode::SUCCESS);
        }
        [] => None,
        [base] if !base.starts_with('-') => Some(base),
        _ => bail!("{}: see `cargo xtask weigh --help`", words.join(" ")),
    };
    let root = root()?;
    let crates = crates(root)?;
    println!(
        "{:<28} {:>8} {:>8} {:>8} {:>8}  LARGEST",
        "CRATE", "SRC", "BUDGET", "TESTS", "BUDGET"
    );
    let (mut lines, mut budget) = (Lines::default(), Lines::default());
    for it in &crates {
        row(&it.folder, it.lines, it.budget, &it.largest());
        lines.add(it.lines);
        budget.add(it.budget);
    }
    row(
        "all",
        lines,
        budget,
        &format!("{} lines", lines.src + lines.tests),
    );
    if let Some(base) = base {
        println!("\n{}", change(root, base)?);
    }
    Ok(ExitCode::SUCCESS)
}

fn row(name: &str, lines: Lines, budget: Lines, largest: &str) {
    println!(
        "{name:<28} {:>8} {:>8} {:>8} {:>8}  {largest}",
        lines.src, budget.src, lines.tests, budget.tests
    );
}

/// Returns how many lines of Rust were added and removed since a commit. A file counts as a whole, as source or as tests.
fn change(root: &Path, base: &str) -> Result<String> {
    ensure!(!base.is_empty(), "name a commit");
    let mut git = Command::new("git");
    git.current_dir(root)
        .args(["diff", "--numstat", "--no-renames", base, "--", "*.rs"]);
    let (mut added, mut removed) = (Lines::default(), Lines::default());
    for line in output(&mut git)?.lines() {
        let mut fields = line.split('\t');
        let mut number = || fields.next().and_then(|it| it.parse().ok()).unwrap_or(0);
        let (more, fewer) = (number(), number());
        let file = fields.next().unwrap_or_default();
        for (sum, count) in [(&mut added, more), (&mut removed, fewer)] {
            if is_of_tests(file) {
                sum.tests += count;
            } else {
                sum.src += count;
            }
        }
    }
    Ok(format!(
        "since {base}: source +{} -{}, tests +{} -{} (inner modules of tests count as source)",
        added.src, removed.src, added.tests, removed.tests
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_weighed_apart() {
        let text = "fn a() {}\n\n#[cfg(test)]\nmod tests {\n}\n";
        assert_eq!(Lines::of("a/src/b.rs", text), Lines { src: 2, tests: 3 });
        for file in ["a/tests/it/b.rs", "a/src/b/tests.rs", "a/src/b_tests.rs"] {
            assert_eq!(Lines::of(file, text), Lines { src: 0, tests: 5 }, "{file}");
        }
        let manifest = "[package]\n\n[package.metadata.kplane]\nlines = { src = 10, tests = 20 }\n";
        assert_eq!(Lines::budget(manifest), Some(Lines { src: 10, tests: 20 }));
        assert_eq!(Lines::budget("[package]\n"), None);
    }
}
