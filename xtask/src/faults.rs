//! `cargo xtask simulate --faults`: which tests find deliberate faults of the product.
//!
//! A copy of the product has all faults at once. Each is behind a condition, `kplane_model::fault(NUMBER)`, and a variable
//! of the environment chooses the one that a test program has. So one build does for all.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};

use crate::build::{TestProgram, compile};
use crate::cargo::{cargo, files, root, status};

/// The folder of faults. A line before the diff says why no test finds the fault.
const FAULTS: &str = "nodeagent/tests/simulation/faults";
/// The folder of the faulty copy, and its target folder. The copy is not part of the workspace.
const COPY: &str = "target/faults/tree";
const TARGET: &str = "target/faults/target";
/// The folder in which the copy is made anew.
const NEW: &str = "target/faults/new";
/// The page with what was found, and its beginning.
const PAGE: &str = "docs/seeded-faults.md";
const HEAD: &str = "\
# Seeded faults

`cargo xtask simulate --faults --thorough` writes this page. Each fault of `nodeagent/tests/simulation/faults/` is a small
change that a plausible mistake would make, and tests should fail with it. They run in the order of their cost: 1,000 seeds
of the simulation, unit tests, and then integration tests. The page names the first test that fails.
";

/// The crates with faults, and those whose tests find them.
const CRATES: [&str; 9] = [
    "kplane-model",
    "kplane-policy",
    "kplane-desired-state",
    "kplane-agents",
    "kplane-status-api",
    "kp-controlplane",
    "kplane-dataplane",
    "kplane-userproxy",
    "kp-nodeagent",
];

/// The variable that chooses a fault, and the function of the copy that reads it.
const CHOICE: &str = "KPLANE_FAULT";
const FUNCTION: &str = r#"
/// Returns whether this process has a fault.
pub fn fault(number: u32) -> bool {
    static CHOSEN: std::sync::OnceLock<Option<u32>> = std::sync::OnceLock::new();
    let chosen = || std::env::var("KPLANE_FAULT").ok()?.parse().ok();
    *CHOSEN.get_or_init(chosen) == Some(number)
}
"#;

/// Seeds that are played with each fault.
const SEEDS: [&str; 3] = ["--brief", "--seeds", "1000"];
/// Seconds after which a test program with a fault has found it, because it waits for something that does not come.
const PATIENCE: &str = "600";

/// What to do about a fault whose place in the product has changed.
const MISFIT: &str = "the fault does not fit the product any more; write it anew";

/// A deliberate fault.
struct Fault {
    number: u32,
    name: String,
    /// The file that has it.
    file: String,
    /// The reason why no test finds it; may be empty.
    note: String,
    patch: PathBuf,
}

impl Fault {
    /// Reads a patch `NUMBER-NAME.patch`, whose lines ask for this number and no other.
    fn read(patch: PathBuf) -> Result<Self> {
        let text = fs::read_to_string(&patch)?;
        let stem = patch.file_stem().unwrap_or_default().to_string_lossy();
        let (number, name) = stem.split_once('-').context("has no number")?;
        let asked = |at: &str| {
            at.split(')')
                .next()
                .is_some_and(|asked| asked == number.trim_start_matches('0'))
        };
        let mut calls = text.split("::fault(").skip(1).peekable();
        ensure!(
            calls.peek().is_some() && calls.all(asked),
            "{stem} asks for another fault"
        );
        let line =
            |start| text.lines().find_map(|line| line.strip_prefix(start)).unwrap_or_default();
        Ok(Self {
            number: number.parse()?,
            name: name.replace('-', " "),
            file: line("+++ b/").to_owned(),
            note: line("Missed: ").to_owned(),
            patch,
        })
    }
}

/// Returns all faults by their numbers, of which no two are the same.
fn all(root: &Path) -> Result<Vec<Fault>> {
    let mut all: Vec<Fault> = fs::read_dir(root.join(FAULTS))?
        .map(|entry| Fault::read(entry?.path()))
        .collect::<Result<_>>()?;
    all.sort_by_key(|fault| fault.number);
    let twice = all.windows(2).find(|two| two[0].number == two[1].number);
    ensure!(
        twice.is_none(),
        "two faults have the number {}",
        twice.map_or(0, |two| two[0].number)
    );
    Ok(all)
}

/// Checks that each deliberate fault fits the product as it is.
pub(crate) fn fit(root: &Path) -> Result<()> {
    for fault in all(root)? {
        let mut git = Command::new("git");
        git.current_dir(root).args(["apply", "-C1", "--check"]);
        status(git.arg(&fault.patch)).context(MISFIT)?;
    }
    Ok(())
}

/// Runs tests with each fault whose name contains `name`, and expects that they fail. `thorough`: also integration tests.
/// With all faults, what was found is written to [`PAGE`].
pub(crate) fn find(name: &str, thorough: bool) -> Result<()> {
    let root = root()?;
    let mut faults = all(root)?;
    let programs = build(root, &faults)?;
    if let Some((suite, how)) = try_all(&programs, None, thorough)? {
        anyhow::bail!("without a fault, {suite} finds {how}");
    }
    faults.retain(|fault| fault.patch.to_string_lossy().contains(name));
    ensure!(!faults.is_empty(), "no fault has the name {name:?}");
    let (mut rows, mut missed) = (String::new(), 0);
    for fault in &faults {
        let began = Instant::now();
        let found = try_all(&programs, Some(fault), thorough)?;
        let (suite, how) =
            found.as_ref().map_or(("**none**", &*fault.note), |(suite, how)| (suite, how));
        missed += u32::from(found.is_none());
        println!(
            "{:3} {}: {suite}: {how} ({} s)",
            fault.number,
            fault.name,
            began.elapsed().as_secs()
        );
        writeln!(
            rows,
            "| {} | {} | `{}` | {suite} | {how} |",
            fault.number, fault.name, fault.file
        )?;
    }
    let count = faults.len();
    if name.is_empty() {
        let page = format!(
            "{HEAD}\nOf {count} faults, {missed} are missed.\n\n| | the product .. | in | found by | how |\n|---|---|---|---|---|\n{rows}"
        );
        fs::write(root.join(PAGE), page)?;
    }
    println!("{missed} of {count} faults are missed");
    Ok(())
}

/// Makes the copy with all faults, and builds it. A file that is as in the last copy stays, so that little is built anew.
fn build(root: &Path, faults: &[Fault]) -> Result<Vec<TestProgram>> {
    let (new, copy) = (root.join(NEW), root.join(COPY));
    if new.exists() {
        fs::remove_dir_all(&new)?;
    }
    let files = files(root, "*")?;
    update(files.lines(), root, &new)?;
    let model = new.join("model/src/lib.rs");
    fs::write(&model, fs::read_to_string(&model)? + FUNCTION)?;
    for fault in faults {
        let mut git = Command::new("git");
        git.current_dir(root).args(["apply", "-C1"]).arg(format!("--directory={NEW}"));
        status(git.arg(&fault.patch)).context(MISFIT)?;
    }
    update(files.lines(), &new, &copy)?;
    let mut command = cargo()?;
    command.current_dir(copy).env("CARGO_TARGET_DIR", root.join(TARGET));
    command
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .args(["test", "--lib", "--bins", "--tests"]);
    Ok(compile(command.args(CRATES.map(|name| format!("--package={name}"))))?.tests)
}

/// Copies files that differ.
fn update<'a>(files: impl Iterator<Item = &'a str>, from: &Path, to: &Path) -> Result<()> {
    for file in files.filter(|file| from.join(file).is_file()) {
        let (content, to) = (fs::read(from.join(file))?, to.join(file));
        if fs::read(&to).is_ok_and(|before| before == content) {
            continue;
        }
        fs::create_dir_all(to.parent().unwrap_or(&to))?;
        fs::write(&to, content).with_context(|| format!("cannot write {file}"))?;
    }
    Ok(())
}

/// Runs test programs with a fault, or without one, until one fails: the simulation, unit tests with those of the fault's
/// crate first, and integration tests. Returns which one, and how.
fn try_all(
    programs: &[TestProgram],
    fault: Option<&Fault>,
    thorough: bool,
) -> Result<Option<(String, String)>> {
    let copy = root()?.join(COPY);
    let mut chosen: Vec<(usize, bool, &TestProgram)> = programs
        .iter()
        .map(|program| {
            let kind = match &*program.target {
                "simulation" => 0,
                "it" | "kernel" => 2,
                _ => 1,
            };
            let folder = program.folder.strip_prefix(&copy).unwrap_or(&program.folder);
            (
                kind,
                fault.is_some_and(|fault| !Path::new(&fault.file).starts_with(folder)),
                program,
            )
        })
        .filter(|(kind, ..)| thorough || *kind < 2)
        .collect();
    chosen.sort_by_key(|(kind, is_other, _)| (*kind, *is_other));
    for (kind, _, program) in chosen {
        let mut command = Command::new("timeout");
        command.arg(PATIENCE).arg(&program.executable).current_dir(&program.folder);
        command
            .env("CARGO_MANIFEST_DIR", &program.folder)
            .env("KPLANE_PROGRAMS", root()?.join(TARGET).join("debug"));
        if kind == 0 {
            command.args(SEEDS);
        }
        if let Some(fault) = fault {
            command.env(CHOICE, fault.number.to_string());
        }
        let ran = command.output()?;
        if ran.status.success() {
            continue;
        }
        let said = String::from_utf8_lossy(&ran.stdout);
        let failed = |line: &str| {
            Some(format!(
                "`{}`",
                line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?
            ))
        };
        let how = said.lines().find_map(|line| {
            if line.starts_with("seed ") { Some(line.to_owned()) } else { failed(line) }
        });
        let suite = ["simulation", "unit tests", "integration tests"][kind];
        let suite = if kind == 0 {
            suite.to_owned()
        } else {
            format!("{suite} of {}", program.package)
        };
        return Ok(Some((suite, how.unwrap_or_else(|| ran.status.to_string()))));
    }
    Ok(None)
}
