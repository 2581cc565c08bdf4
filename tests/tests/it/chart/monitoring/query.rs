//! The names in an expression of PromQL: as much of the language as names need.

use anyhow::Result;

/// A series that an expression selects.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Selector {
    pub(super) name: String,
    /// Labels, and the values that they are compared with. Values of a regular expression are its alternatives.
    pub(super) matchers: Vec<(String, Vec<String>)>,
}

/// The names in an expression.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Names {
    pub(super) selectors: Vec<Selector>,
    /// Labels in `by (..)`, which the result has.
    pub(super) grouped: Vec<String>,
    /// Labels in `on (..)` and the like.
    pub(super) joined: Vec<String>,
}

/// Words that take a list of labels.
const GROUPING: [&str; 6] = [
    "by",
    "ignoring",
    "group_left",
    "group_right",
    "on",
    "without",
];
/// Words between expressions.
const OPERATORS: [&str; 8] = [
    "and", "atan2", "bool", "offset", "or", "unless", "inf", "nan",
];

/// Returns the names in an expression.
pub(super) fn names(expr: &str) -> Names {
    let mut names = Names::default();
    let mut rest = expr;
    while let Some(first) = rest.chars().next() {
        if first.is_ascii_digit() || first == '$' {
            // A number, a duration, or a variable of Grafana.
            rest = &rest[first.len_utf8()..];
            rest = rest.trim_start_matches(|c: char| is_part(c) || c == '.');
        } else if is_part(first) {
            let word = rest.split(|c| !is_part(c)).next().unwrap_or_default();
            rest = rest[word.len()..].trim_start();
            if GROUPING.contains(&word) && rest.starts_with('(') {
                let (labels, behind) = rest[1..].split_once(')').unwrap_or_default();
                let labels = labels.split(',').map(|label| label.trim().to_owned());
                let into = match word {
                    "by" => &mut names.grouped,
                    _ => &mut names.joined,
                };
                into.extend(labels.filter(|label| !label.is_empty()));
                rest = behind;
            } else if !rest.starts_with('(') && !is_aggregation(rest) && !OPERATORS.contains(&word)
            {
                let (matchers, behind) = matchers(rest);
                let name = word.to_owned();
                names.selectors.push(Selector { name, matchers });
                rest = behind;
            }
        } else {
            rest = &rest[first.len_utf8()..];
        }
    }
    names
}

/// Returns whether the word before a text is an aggregation: `sum by (..)`.
fn is_aggregation(behind: &str) -> bool {
    behind
        .split(|c| !is_part(c))
        .next()
        .is_some_and(|word| word == "by" || word == "without")
}

fn is_part(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == ':'
}

/// Reads the matchers behind a name, if there are any. Also returns the text behind them.
fn matchers(text: &str) -> (Vec<(String, Vec<String>)>, &str) {
    let mut found = Vec::new();
    let Some(mut rest) = text.strip_prefix('{') else {
        return (found, text);
    };
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(behind) = rest.strip_prefix('}') {
            return (found, behind);
        }
        let Some((label, behind)) = rest.split_once('"') else {
            return (found, rest);
        };
        let (value, behind) = behind.split_once('"').unwrap_or_default();
        let label = label.trim_end_matches(['=', '~', '!', ' ']);
        let values = value.split('|').map(str::to_owned).collect();
        found.push((label.to_owned(), values));
        rest = behind;
    }
}

pub(in crate::chart) fn names_are_told_from_functions_labels_and_numbers() -> Result<()> {
    let names = names(
        "histogram_quantile(0.99, sum by (le, job) (rate(a_bucket{x=~\"b|c\", y!=\"d e\"}[10m]))) > 1e3\n\
         and on (instance) f:g unless time() - h{i=\"$k\"} offset 5m",
    );
    let text = |values: &[&str]| values.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(names.grouped, ["le", "job"]);
    assert_eq!(names.joined, ["instance"]);
    let found: Vec<_> = names.selectors.iter().map(|s| &*s.name).collect();
    assert_eq!(found, ["a_bucket", "f:g", "h"]);
    assert_eq!(
        names.selectors[0].matchers,
        [
            ("x".to_owned(), text(&["b", "c"])),
            ("y".to_owned(), text(&["d e"]))
        ]
    );
    assert_eq!(
        names.selectors[2].matchers,
        [("i".to_owned(), text(&["$k"]))]
    );
    Ok(())
}
