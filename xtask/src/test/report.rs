//! What a suite's log says, and the table at the end of a run.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::suites::Suite;
use crate::build;

/// Variable with the file in which tests note what they skip: `kplane_rig::privilege` writes a line each.
pub(super) const SKIPPED: &str = "KPLANE_SKIPPED";
/// Lines of a failed suite's log that are printed if no test program wrote it.
const SHOWN: usize = 100;
/// First and last lines that are printed of what a failed test says: its error comes first, and often the logs of
/// programs follow. The file has all.
const SAID: [usize; 2] = [20, 3];
/// The line above what failed in a test program's log, and the beginning of the line below.
const FAILURES: [&str; 2] = ["failures:", "test result: "];
/// The beginning of the line above what a failed test says.
const TEST: &str = "---- ";

/// Numbers of tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) passed: usize,
    pub(super) failed: usize,
    pub(super) skipped: usize,
}

/// How a suite ended.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) name: String,
    pub(super) tally: Tally,
    pub(super) took: Duration,
    /// Processor time, where it is measured.
    pub(super) cpu: Option<Duration>,
    pub(super) log: Option<PathBuf>,
    /// What its tests lack, and how many skip for it.
    pub(super) skips: BTreeMap<String, usize>,
}

impl Outcome {
    /// An outcome of a check that is one test and has no log.
    pub(super) fn of_check(name: &str, is_good: bool, took: Duration) -> Self {
        let tally = Tally {
            passed: usize::from(is_good),
            failed: usize::from(!is_good),
            skipped: 0,
        };
        Self {
            name: name.to_owned(),
            tally,
            took,
            cpu: None,
            log: None,
            skips: BTreeMap::new(),
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.tally.failed > 0
    }

    /// Prints one line, and where the log is if the suite failed.
    pub(super) fn print(&self) {
        println!("{}", self.line());
        if let Some(log) = self.failed_log() {
            println!("    (what it says: {})", log.display());
        }
    }

    fn failed_log(&self) -> Option<&Path> {
        if self.has_failed() { self.log.as_deref() } else { None }
    }

    /// Prints what a failed suite's log says of the tests that failed, and where the whole of it is.
    fn print_failures(&self) {
        let Some(log) = self.failed_log() else {
            return;
        };
        let text = fs::read(log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let is_shown = |line: &&str| !line.starts_with(build::MESSAGE);
        let shown: Vec<&str> = text.lines().filter(is_shown).collect();
        for line in failures(&shown) {
            println!("    {line}");
        }
        println!("    (all of it: {})", log.display());
    }

    fn line(&self) -> String {
        let Tally {
            passed,
            failed,
            skipped,
        } = self.tally;
        let mut tests = format!("{passed} passed");
        if failed > 0 {
            tests += &format!(", {failed} failed");
        }
        if skipped > 0 {
            tests += &format!(", {skipped} skipped");
        }
        let seconds = |time: Duration| format!("{:.1} s", time.as_secs_f64());
        format!(
            "{}  {:<34} {:>9} {:>9}  {tests}",
            if self.has_failed() { "FAIL" } else { "ok  " },
            self.name,
            seconds(self.took),
            self.cpu.map(seconds).unwrap_or_default(),
        )
    }
}

/// Returns the file in which the tests of a suite note what they skip.
pub(super) fn skips(log: &Path) -> PathBuf {
    log.with_extension("skipped")
}

/// Reads how a suite ended.
///
/// # Errors
/// The log cannot be read.
pub(super) fn outcome(
    suite: &Suite,
    status: ExitStatus,
    log: &Path,
    took: Duration,
    cpu: Duration,
) -> Result<Outcome> {
    let text = fs::read(log).with_context(|| log.display().to_string())?;
    let mut noted = BTreeMap::new();
    for line in fs::read_to_string(skips(log)).unwrap_or_default().lines() {
        *noted.entry(line.to_owned()).or_default() += 1;
    }
    Ok(Outcome {
        name: suite.name.clone(),
        tally: tally(
            &String::from_utf8_lossy(&text),
            noted.values().sum(),
            status.success(),
        ),
        took,
        cpu: Some(cpu),
        log: Some(log.to_owned()),
        skips: noted,
    })
}

/// Adds up the closing lines of test programs. A suite without such a line is one test.
fn tally(log: &str, noted: usize, is_good: bool) -> Tally {
    let mut tally = Tally::default();
    for line in log.lines() {
        let Some((_, counts)) = line.split_once("test result: ") else {
            continue;
        };
        let counts = counts.split_once(". ").map_or("", |(_, counts)| counts);
        for count in counts.split("; ") {
            let Some((number, what)) = count.trim().split_once(' ') else {
                continue;
            };
            let number = number.parse().unwrap_or(0);
            match what {
                "passed" => tally.passed += number,
                "failed" => tally.failed += number,
                "ignored" => tally.skipped += number,
                _ => {}
            }
        }
    }
    // A test that skips returns as one that passes.
    let noted = noted.min(tally.passed);
    tally.passed -= noted;
    tally.skipped += noted;
    match (is_good, tally.passed + tally.failed + tally.skipped) {
        (true, 0) => tally.passed = 1,
        (false, _) => tally.failed = tally.failed.max(1),
        (true, _) => {}
    }
    tally
}

/// Returns what a log says of the tests that failed, in short, or its end.
fn failures<'a>(log: &[&'a str]) -> Vec<&'a str> {
    let [first, end] = FAILURES;
    let Some(from) = log.iter().position(|line| *line == first) else {
        return log[log.len().saturating_sub(SHOWN)..].to_vec();
    };
    let said = &log[from..];
    let to = said.iter().position(|line| line.starts_with(end));
    let said = &said[..to.unwrap_or(said.len())];
    let begins = |_: &&str, next: &&str| !next.starts_with(TEST);
    said.chunk_by(begins).flat_map(in_short).collect()
}

/// Leaves out the middle of what a test says.
fn in_short<'a>(said: &[&'a str]) -> Vec<&'a str> {
    let [first, last] = SAID;
    match said.len().checked_sub(first + last) {
        None | Some(0) => said.to_vec(),
        Some(_) => [&said[..first], &["[…]"], &said[said.len() - last..]].concat(),
    }
}

/// Prints the table of all outcomes, what was skipped and why, and the closing line. Returns whether all is well.
pub(super) fn summary(outcomes: &[Outcome], took: Duration, cpu: Duration) -> bool {
    println!();
    if outcomes.len() > 1 {
        println!("      {:<34} {:>9} {:>9}  tests", "suite", "time", "CPU");
        outcomes.iter().for_each(|outcome| println!("{}", outcome.line()));
    }
    for outcome in outcomes.iter().filter(|outcome| outcome.has_failed()) {
        println!("\nfailed: {}", outcome.name);
        outcome.print_failures();
    }
    let mut sum = Tally::default();
    let mut skips = BTreeMap::<&str, usize>::new();
    for outcome in outcomes {
        sum.passed += outcome.tally.passed;
        sum.failed += outcome.tally.failed;
        sum.skipped += outcome.tally.skipped;
        for (why, number) in &outcome.skips {
            *skips.entry(why).or_default() += number;
        }
    }
    for (why, number) in skips {
        println!("skipped {number}: {why}");
    }
    println!(
        "\nin {:.0} s, with {:.0} s of CPU, the build included",
        took.as_secs_f64(),
        cpu.as_secs_f64()
    );
    println!(
        "{} passed, {} failed, {} skipped",
        sum.passed, sum.failed, sum.skipped
    );
    sum.failed == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_added_up() {
        let log = "test a ... ok\ntest result: ok. 7 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out\r\n\
            test result: FAILED. 1 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s\n";
        let counted = tally(log, 2, false);
        let expected = Tally {
            passed: 6,
            failed: 3,
            skipped: 4,
        };
        assert_eq!(counted, expected);
    }

    #[test]
    fn what_failed_is_told_without_the_times_of_tests() {
        let log = [
            "test a ... ok",
            "failures:",
            "---- b ----",
            "test result: FAILED. 1 passed",
            " 12.0 s  a",
        ];
        assert_eq!(failures(&log), &log[1..3]);
        assert_eq!(failures(&log[..1]), &log[..1]);
        let many = [
            &log[1..3],
            &["said"; 99],
            &["---- c ----", "last"],
            &log[3..],
        ]
        .concat();
        let short = failures(&many);
        assert_eq!(short[..3], ["failures:", "---- b ----", "said"]);
        assert_eq!(short[short.len() - 2..], ["---- c ----", "last"]);
        assert_eq!(short.len(), 1 + SAID.iter().sum::<usize>() + 1 + 2);
    }

    #[test]
    fn a_suite_without_closing_line_is_one_test() {
        let [good, bad] = [true, false].map(|is_good| tally("hello", 0, is_good));
        assert_eq!(
            good,
            Tally {
                passed: 1,
                ..Tally::default()
            }
        );
        assert_eq!(
            bad,
            Tally {
                failed: 1,
                ..Tally::default()
            }
        );
        let died = tally(
            "test result: ok. 7 passed; 0 failed; 0 ignored; 0 measured",
            0,
            false,
        );
        assert_eq!((died.passed, died.failed), (7, 1));
    }
}
