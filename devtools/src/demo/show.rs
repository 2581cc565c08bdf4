//! The demo's output: plain ASCII, in colours on a terminal; and the results of all checks.

use std::time::{Duration, Instant};

use owo_colors::OwoColorize as _;

/// The results so far, and the current step.
#[derive(Debug, Default)]
pub(crate) struct Show {
    checks: Vec<Check>,
    step: usize,
    steps: usize,
}

#[derive(Debug)]
struct Check {
    what: String,
    expected: String,
    seen: String,
    /// The errors; empty when there are none.
    wrong: Vec<String>,
    took: Duration,
}

impl Show {
    /// Starts before the first of `steps`.
    pub(crate) fn new(steps: usize) -> Self {
        Self {
            steps,
            ..Self::default()
        }
    }

    /// Begins the next step.
    pub(crate) fn heading(&mut self, title: &str) {
        self.step += 1;
        let number = format!("[{}/{}]", self.step, self.steps);
        say!("\n{} {}", number.dimmed(), title.bold());
    }

    /// Records a check that passed unless something went `wrong`, and prints the errors.
    pub(crate) fn check(
        &mut self,
        (what, expected): (&str, &str),
        seen: impl Into<String>,
        wrong: Vec<String>,
        began: Instant,
    ) {
        for line in wrong.iter().flat_map(|wrong| wrong.lines()) {
            say!("      {}", line.red().bold());
        }
        self.checks.push(Check {
            what: what.to_owned(),
            expected: expected.to_owned(),
            seen: seen.into(),
            wrong,
            took: began.elapsed(),
        });
    }

    /// Returns whether there were checks and all passed.
    pub(crate) fn all_passed(&self) -> bool {
        !self.checks.is_empty() && self.checks.iter().all(|check| check.wrong.is_empty())
    }

    /// Prints the summary. Its last line is both human-readable and machine-readable.
    pub(crate) fn print(&self, took: Duration) {
        let row = |what: &str, expected: &str, seen: &str| {
            let [what, expected] = [fit(what, 40), fit(expected, 18)];
            format!("{what} {expected} {}", fit(seen, 26))
        };
        let head = row("What was checked", "Expected", "Seen");
        say!("\n    {}    Time", head.bold());
        for check in &self.checks {
            let columns = row(&check.what, &check.expected, &check.seen);
            let (good, time) = (check.wrong.is_empty(), span(check.took));
            say!("{}{columns} {time:>7}", mark(good));
            let first_lines = check.wrong.iter().filter_map(|wrong| wrong.lines().next());
            for wrong in first_lines.take(3) {
                say!("      {}", fit(wrong, 92).trim_end().red().bold());
            }
        }
        let passed = self.checks.iter().filter(|check| check.wrong.is_empty());
        let (passed, all, took) = (passed.count(), self.checks.len(), took.as_secs_f64());
        let line = format!("demo: {passed} of {all} checks passed in {took:.0} s");
        if self.all_passed() {
            say!("\n{}", line.green());
        } else {
            say!("\n{}", line.red().bold());
        }
    }
}

/// Prints a line, without colours if standard output is no terminal.
macro_rules! say {
    ($($text:tt)*) => {{
        // An error means that the user closed standard output.
        let _ = ::std::io::Write::write_fmt(
            &mut anstream::stdout(),
            format_args!("{}\n", format_args!($($text)*)),
        );
    }};
}
pub(crate) use say;

/// Prints a line of little interest, indented.
macro_rules! aside {
    ($($text:tt)*) => {
        say!("      {}", owo_colors::OwoColorize::dimmed(&format_args!($($text)*)))
    };
}
pub(crate) use aside;

/// Returns a mark of four columns for a good or a bad result.
pub(crate) fn mark(good: bool) -> String {
    if good { "ok  ".green().to_string() } else { "BAD ".red().bold().to_string() }
}

/// Returns a bar of `cells` columns for the largest count, padded to all of them for less.
pub(crate) fn bar(count: usize, most: usize, cells: usize) -> String {
    let filled = "#".repeat(count * cells / most.max(1));
    format!("{filled:<cells$}").cyan().to_string()
}

/// Returns the text, padded with spaces to `columns`, or cut with two dots at its end.
pub(crate) fn fit(text: &str, columns: usize) -> String {
    if text.chars().count() <= columns {
        return format!("{text:<columns$}");
    }
    let cut: String = text.chars().take(columns.saturating_sub(2)).collect();
    cut + ".."
}

/// Returns a count and its noun: `1 pod`, `2 pods`.
pub(crate) fn plural(n: usize, what: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{n} {what}{s}")
}

/// Formats a duration in a suitable unit.
pub(crate) fn span(time: Duration) -> String {
    match time.as_secs_f64() {
        s if s < 0.001 => format!("{:.0} us", s * 1e6),
        s if s < 0.01 => format!("{:.1} ms", s * 1e3),
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s => format!("{s:.1} s"),
    }
}
