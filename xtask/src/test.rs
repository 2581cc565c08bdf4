//! `cargo xtask test`: everything that must hold before a change lands. CI runs exactly this, with `--all`.
//!
//! First the checks of the tree, which take seconds. Then one build of the product and its tests ([`crate::build`]), which is
//! also the lints' run. Then the suites ([`suites`]), beside each other ([`schedule`]): they execute what the build made.
//! In the end a table ([`report`]).

mod apart;
mod claims;
mod compat;
mod e2e;
mod incremental;
mod ladder;
mod links;
mod literals;
mod report;
mod schedule;
mod suites;
mod tidy;
mod tools;
mod types;
mod wording;

use std::fs::File;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};

pub(crate) use self::e2e::with_images;

use self::report::Outcome;
use self::suites::{Lane, Suite};
use crate::build::{self, Built};
use crate::cargo::{self, BENCH, programs, root};
use crate::faults;

const HELP: &str = "\
Check everything that must hold before a change lands

Usage: cargo xtask test [NAME]     what needs nothing but Rust, a Linux kernel, and root or user namespaces
       cargo xtask test --all      also what needs Go, a virtual machine, Chromium or a whole cluster, and every
                                   test on every backend: CI runs exactly this
       cargo xtask test --list     the names, with their lanes
       cargo xtask test e2e [OPTIONS]

Arguments:
  [NAME]  Run only the checks and suites whose name contains this, such as `format`, `netns` or `vm`. `--all NAME` runs
          them in full. `tools` installs what --all needs
  e2e     Run Kubernetes' own end-to-end tests, which are in no lane; `e2e --help` lists the options

The log of each suite is in target/test-logs.
";

/// The name of the compiler's and clippy's warnings among the outcomes, and that of units that were compiled twice.
const LINTS: &str = "lints";
const ONCE: &str = "nothing compiled twice";
/// The name that only installs what the suites of `--all` need.
const TOOLS: &str = "tools";

/// A check of the files, by this program.
type Check = (&'static str, fn(&Path) -> Result<()>);

/// Cheap and often failing first.
const CHECKS: [Check; 10] = [
    ("format", |_| {
        cargo::run(&["fmt", "--all", "--check"])?;
        cargo::run(&["fmt", "--manifest-path", BENCH, "--check"])
    }),
    ("workspaces", apart::check),
    ("tidy", tidy::check),
    ("names of types", types::check),
    ("wording", wording::check),
    ("compatibility page", compat::check),
    ("measured figures", claims::check),
    ("links", links::check),
    ("ladder of crates", ladder::check),
    ("deliberate faults", faults::fit),
];

/// What to run.
#[derive(Debug)]
struct Wanted {
    lane: Lane,
    /// A part of the names to run; empty for all of the lane.
    name: String,
}

/// Runs checks and suites, and fails if one of them has failed.
pub(crate) fn run(args: &[String]) -> Result<ExitCode> {
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let wanted = match words[..] {
        ["--help" | "-h", ..] => {
            print!("{HELP}");
            return Ok(ExitCode::SUCCESS);
        }
        ["e2e", ..] => return e2e::run(args.get(1..).unwrap_or_default()),
        ["--list"] => {
            list();
            return Ok(ExitCode::SUCCESS);
        }
        [] => Wanted::new(Lane::Quick, ""),
        ["--all"] => Wanted::new(Lane::All, ""),
        [name] if !name.starts_with('-') => Wanted::new(Lane::Quick, name),
        ["--all", name] if !name.starts_with('-') => Wanted::new(Lane::All, name),
        _ => anyhow::bail!("{}: see `cargo xtask test --help`", words.join(" ")),
    };
    let began = Instant::now();
    let _lock = lock()?;
    let outcomes = wanted.run()?;
    let cpu = schedule::cpu_time_of_all()?;
    Ok(if report::summary(&outcomes, began.elapsed(), cpu) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

impl Wanted {
    fn new(lane: Lane, name: &str) -> Self {
        Self {
            lane,
            name: name.to_owned(),
        }
    }

    fn has(&self, name: &str) -> bool {
        name.contains(&self.name)
    }

    /// Returns all outcomes. Nothing is built if a check has failed.
    fn run(&self) -> Result<Vec<Outcome>> {
        let root = root()?;
        let mut outcomes = Vec::new();
        for (name, check) in CHECKS.into_iter().filter(|(name, _)| self.has(name)) {
            let began = Instant::now();
            let done = check(root);
            if let Err(error) = &done {
                println!("{name}: {error:#}");
            }
            note(
                &mut outcomes,
                Outcome::of_check(name, done.is_ok(), began.elapsed()),
            );
        }
        let is_check = !self.name.is_empty() && !outcomes.is_empty();
        if is_check || outcomes.iter().any(Outcome::has_failed) {
            return Ok(outcomes);
        }
        let began = Instant::now();
        println!("building: {}", self.takes());
        incremental::prune()?;
        let mut built = build::build()?;
        let lints = Outcome::of_check(LINTS, built.warnings == 0, began.elapsed());
        note(&mut outcomes, lints);
        println!(
            "      cargo has compiled {} units of kplane's own crates: {} lines; there are {} test programs",
            built.units,
            built.lines,
            built.tests.len()
        );
        if self.name != LINTS {
            self.suites(&mut built, &mut outcomes)?;
        }
        Ok(outcomes)
    }

    fn takes(&self) -> &'static str {
        let is_first = !programs("dev").is_ok_and(|folder| folder.join("kplane-dev").exists());
        if is_first {
            "the first time this takes eight minutes on two cores"
        } else {
            "what has changed"
        }
    }

    /// Runs the suites on what is built.
    fn suites(&self, built: &mut Built, outcomes: &mut Vec<Outcome>) -> Result<()> {
        let folder = programs("dev")?;
        let of_lane = |lane| -> Result<Vec<Suite>> {
            let mut suites = suites::suites(lane, &built.tests)?;
            suites.retain(|suite| self.has(&suite.name));
            Ok(suites)
        };
        let mut lane = self.lane;
        let mut suites = of_lane(lane)?;
        if suites.is_empty() {
            lane = Lane::All;
            suites = of_lane(lane)?;
        }
        ensure!(
            !suites.is_empty() || self.name == TOOLS,
            "nothing has the name {:?}; see `cargo xtask test --list`",
            self.name
        );
        if lane == Lane::All {
            tools::install(&folder).context("cannot install what the tests need")?;
        }
        let by_cargo: Vec<String> = suites
            .iter()
            .filter(|suite| suite.is_by_cargo())
            .map(|suite| suite.name.clone())
            .collect();
        let logs = root()?.join("target/test-logs");
        outcomes.extend(schedule::run(suites, &folder, &logs, Outcome::print)?);
        let mut compiled = Ok(());
        for outcome in outcomes.iter() {
            if by_cargo.contains(&outcome.name)
                && let Some(log) = outcome.log.as_ref()
            {
                compiled = compiled.and(built.further(log));
            }
        }
        if let Err(error) = &compiled {
            println!("{error:#}");
        }
        let once = Outcome::of_check(ONCE, compiled.is_ok(), std::time::Duration::ZERO);
        note(outcomes, once);
        Ok(())
    }
}

/// Prints an outcome, and keeps it for the table at the end.
fn note(outcomes: &mut Vec<Outcome>, outcome: Outcome) {
    outcome.print();
    outcomes.push(outcome);
}

/// Prints the names of all checks and suites.
fn list() {
    let checks = CHECKS
        .into_iter()
        .map(|(name, _)| (name, None))
        .chain([(LINTS, None), (ONCE, None)]);
    for (name, lane) in checks.chain(suites::names()) {
        let lane = match lane {
            None => "",
            Some(Lane::Quick) => "a part of it without --all",
            Some(Lane::All) => "with --all",
        };
        println!("{name:<40} {lane}");
    }
    println!("A test program that is not in this list is a suite of its own: `model`, `cli it`.");
}

/// Keeps two runs in one checkout from building and testing at the same time.
fn lock() -> Result<File> {
    let folder = root()?.join("target");
    std::fs::create_dir_all(&folder)?;
    let lock = File::create(folder.join("test.lock")).context("cannot create target/test.lock")?;
    if lock.try_lock().is_err() {
        println!("another `cargo xtask test` runs in this checkout: waiting for its end");
        lock.lock().context("cannot lock target/test.lock")?;
    }
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_select_checks_and_suites() {
        let wanted = Wanted::new(Lane::All, "vm");
        assert!(wanted.has("vm faults") && !wanted.has("netns"));
        assert!(Wanted::new(Lane::Quick, "").has("anything"));
    }
}
