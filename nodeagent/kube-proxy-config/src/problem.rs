//! Problems of a configuration, human-readable: one line for each, all at once.

use std::fmt;
use std::path::Path;

/// Most characters of a value that are shown.
const SHOWN_CHARS: usize = 60;

/// Most names of a list that are shown.
const LISTED: usize = 20;

/// One problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The field with its path, such as `nftables.syncPeriod`; a flag such as `--cluster-cidr`;
    /// empty for a combination of flags or a whole file.
    pub place: String,
    /// The value on one line, not too long; empty for none.
    pub value: String,
    /// The problem, and what would be right.
    pub reason: String,
}

impl Problem {
    /// Creates a problem with the value of a field or flag.
    pub fn new(
        place: impl Into<String>,
        value: impl fmt::Display,
        reason: impl Into<String>,
    ) -> Self {
        Self {
            place: place.into(),
            value: shown(&value.to_string()),
            reason: reason.into(),
        }
    }

    /// Creates a problem that does not concern a single value.
    pub fn general(reason: impl Into<String>) -> Self {
        Self {
            place: String::new(),
            value: String::new(),
            reason: reason.into(),
        }
    }

    /// Returns the same problem, with the file in its place.
    pub fn in_file(mut self, file: &Path) -> Self {
        let file = file.display();
        self.place = match &*self.place {
            "" => file.to_string(),
            place => format!("{file}: {place}"),
        };
        self
    }
}

impl fmt::Display for Problem {
    /// Writes a line such as `nftables.syncPeriod: -1s: must be greater than 0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in [&self.place, &self.value] {
            if !part.is_empty() {
                write!(f, "{part}: ")?;
            }
        }
        f.write_str(&self.reason)
    }
}

/// An invalid configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The problems, at least one.
    pub problems: Vec<Problem>,
}

impl From<Problem> for ConfigError {
    fn from(problem: Problem) -> Self {
        let problems = vec![problem];
        Self { problems }
    }
}

impl fmt::Display for ConfigError {
    /// Writes one line for each problem.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            let separator = if index == 0 { "" } else { "\n" };
            write!(f, "{separator}{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

/// Returns a user's text on one line and not too long, in quotes where it would be unclear without.
pub fn shown(text: &str) -> String {
    let cut: String = text.chars().take(SHOWN_CHARS).collect();
    let rest = if cut.len() < text.len() { "..." } else { "" };
    let plain = |c: char| c.is_ascii_graphic() && c != '"';
    if !cut.is_empty() && cut.chars().all(plain) {
        format!("{cut}{rest}")
    } else {
        format!("{cut:?}{rest}")
    }
}

/// Returns names on one line, and the number of further names.
pub fn listed<T: AsRef<str>>(names: &[T]) -> String {
    let shown: Vec<_> = names.iter().take(LISTED).map(AsRef::as_ref).collect();
    match names.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_for_each_problem() {
        let problems = [
            Problem::new("nftables.syncPeriod", "-1s", "must be greater than 0"),
            Problem::general("is empty"),
        ]
        .map(|problem| problem.in_file(Path::new("/etc/proxy.conf")));
        let error = ConfigError {
            problems: problems.into(),
        };
        assert_eq!(
            error.to_string(),
            "/etc/proxy.conf: nftables.syncPeriod: -1s: must be greater than 0\n\
             /etc/proxy.conf: is empty"
        );
    }

    #[test]
    fn text_of_users_stays_on_one_line() {
        assert_eq!(shown("10.0.0.0/8"), "10.0.0.0/8");
        assert_eq!(shown(""), "\"\"");
        assert_eq!(shown("a\nb\u{1b}[31m"), r#""a\nb\u{1b}[31m""#);
        assert_eq!(shown(&"x".repeat(61)), format!("{}...", "x".repeat(60)));
        assert_eq!(listed(&["a", "b"]), "a, b");
        assert!(listed(&["a"; 1000]).ends_with("a and 980 more"));
    }
}
