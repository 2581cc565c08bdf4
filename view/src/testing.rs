//! Helpers of tests that check text. No feature hides this module: the programs do not use it, and a feature that only tests
//! enable would compile this crate, and those that use it, twice.

use std::collections::HashSet;

use unicode_width::UnicodeWidthStr;

use super::View;
use crate::style::Canvas;

/// Returns a canvas of 80 columns, ASCII.
pub fn canvas() -> Canvas {
    Canvas {
        columns: 80,
        wide: false,
        all: false,
        headers: true,
        unicode: false,
        program: "kpctl",
    }
}

/// Removes colours from text.
pub fn plain(text: &str) -> String {
    anstream::adapter::strip_str(text).to_string()
}

/// Returns a view as a table, and asserts that it fits in 80 columns.
pub fn table(view: &impl View) -> String {
    let text = plain(&view.text(&canvas()));
    assert_fits(&text, 80);
    text
}

/// Returns a view in full.
pub fn wide(view: &impl View) -> String {
    let canvas = Canvas {
        columns: usize::MAX,
        wide: true,
        all: true,
        ..canvas()
    };
    plain(&view.text(&canvas))
}

/// Returns the lines of a view in full that the view does not have at 80 columns.
pub fn only_wide(view: &impl View) -> String {
    let narrow = table(view);
    let known: HashSet<&str> = narrow.lines().collect();
    let full = wide(view);
    full.lines()
        .filter(|line| !known.contains(line))
        .map(|line| format!("{line}\n"))
        .collect()
}

/// Asserts that no line is too long or ends in blanks.
pub fn assert_fits(text: &str, columns: usize) {
    for line in text.lines() {
        assert!(line.width() <= columns, "{} columns: {line}", line.width());
        assert_eq!(line, line.trim_end());
    }
}

/// Returns a view as a table whose lines are not wrapped: with one blank between two words.
pub fn words(view: &impl View) -> String {
    let text = table(view);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Asserts that a text has a part.
pub fn has(text: &str, part: &str) {
    assert!(text.contains(part), "no {part:?}:\n{text}");
}
