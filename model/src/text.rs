//! Texts of others in kplane's own lines.

/// Longest foreign text that is quoted, in characters.
const MAX_QUOTED: usize = 300;

/// Returns whether a character of foreign text is not shown as itself: it controls the terminal, or it reorders or hides what
/// is around it (Unicode's bidirectional and other format characters).
pub fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{61c}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
        )
}

/// Makes foreign text fit for kplane's own lines: without hidden characters, and limited in
/// length.
pub fn one_line(text: &str) -> String {
    let words: Vec<_> = text
        .split(|c: char| c.is_whitespace() || is_hidden(c))
        .filter(|word| !word.is_empty())
        .collect();
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
        assert_eq!(one_line("a\u{1b}[31m\u{202e}b\u{9b}c"), "a [31m b c");
        let long = "ä".repeat(10_000);
        assert_eq!(one_line(&long).chars().count(), MAX_QUOTED + 3);
    }
}
