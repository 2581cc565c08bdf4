//! Texts of others in kplane's own lines.

/// Longest foreign text that is quoted, in characters.
const MAX_QUOTED: usize = 300;

/// Makes foreign text fit for kplane's own lines: without control characters, and limited in
/// length.
#[must_use]
pub fn one_line(text: &str) -> String {
    let words = text.split(|c: char| c.is_whitespace() || c.is_control());
    let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
    let line = words.join(" ");
    match line.char_indices().nth(MAX_QUOTED) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_is_bounded() {
        assert_eq!(one_line("  a\n\tb\u{0}c  "), "a b c");
        let long = "ä".repeat(10_000);
        assert_eq!(one_line(&long).chars().count(), MAX_QUOTED + 3);
    }
}
