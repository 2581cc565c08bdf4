//! The results of all checks, and the summary at the end.

use std::time::Duration;

use super::screen::{Screen, Tone, clip, fit, span};

/// Widths of the summary's columns: subject, expected, seen, time.
const WIDTHS: [usize; 3] = [40, 18, 26];

/// All checks so far.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    checks: Vec<Check>,
}

/// The result of one check.
#[derive(Clone, Debug)]
pub(crate) struct Check {
    /// The subject of the check.
    pub(crate) what: String,
    /// The expected outcome.
    pub(crate) expected: String,
    /// The actual outcome.
    pub(crate) seen: String,
    /// The errors; empty when there are none.
    pub(crate) wrong: Vec<String>,
    /// The duration of the check.
    pub(crate) took: Duration,
}

impl Check {
    /// Returns whether the check passed.
    pub(crate) fn passed(&self) -> bool {
        self.wrong.is_empty()
    }
}

impl Ledger {
    /// Adds a check, and prints its errors at once.
    pub(crate) fn add(&mut self, screen: &Screen, check: Check) {
        for line in check.wrong.iter().flat_map(|wrong| wrong.lines()) {
            screen.line(format!("      {}", screen.paint(Tone::Bad, line)));
        }
        self.checks.push(check);
    }

    /// Returns whether there were checks and all passed.
    pub(crate) fn all_passed(&self) -> bool {
        !self.checks.is_empty() && self.passed() == self.checks.len()
    }

    fn passed(&self) -> usize {
        self.checks.iter().filter(|check| check.passed()).count()
    }

    /// Prints the summary. Its last line is both human-readable and machine-readable.
    pub(crate) fn print(&self, screen: &Screen, took: Duration) {
        let [what, expected, seen] = WIDTHS;
        let seen = seen + screen.columns().saturating_sub(100);
        let head = format!(
            "    {} {} {} {:>7}",
            fit("What was checked", what),
            fit("Expected", expected),
            fit("Seen", seen),
            "Time"
        );
        screen.line(screen.paint(Tone::Strong, &head));
        for check in &self.checks {
            let columns = format!(
                "{} {} {}",
                fit(&check.what, what),
                fit(&check.expected, expected),
                fit(&check.seen, seen)
            );
            let time = screen.paint(Tone::Faint, &format!("{:>7}", span(check.took)));
            screen.line(format!("{}{columns} {time}", screen.mark(check.passed())));
            let first_lines = check.wrong.iter().filter_map(|wrong| wrong.lines().next());
            for wrong in first_lines.take(3) {
                let wrong = clip(wrong, screen.columns() - 8);
                screen.line(format!("      {}", screen.paint(Tone::Bad, &wrong)));
            }
        }
        screen.gap();
        let tone = if self.all_passed() {
            Tone::Good
        } else {
            Tone::Bad
        };
        let (passed, all, seconds) = (self.passed(), self.checks.len(), took.as_secs_f64());
        let line = format!("demo: {passed} of {all} checks passed in {seconds:.0} s");
        screen.line(screen.paint(tone, &line));
    }
}
