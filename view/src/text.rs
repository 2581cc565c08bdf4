//! Pieces of text: cleaned, measured, elided, wrapped.

use kplane_model::is_hidden;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::style::{Canvas, Tone};

/// Width of the keys of `fields`, with the gap behind them.
const KEY_COLUMNS: usize = 16;

/// Text with a tone. It never has control characters, whatever its origin: names and reasons come
/// from untrusted sources and must not control the reader's terminal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// The text, one line.
    pub text: String,
    pub(crate) tone: Tone,
}

impl Span {
    /// Creates text in a tone.
    pub fn new(text: impl AsRef<str>, tone: Tone) -> Self {
        Self {
            text: clean(text.as_ref()),
            tone,
        }
    }

    /// Creates text in a plain tone; `-` for an empty text.
    pub fn plain(text: impl AsRef<str>) -> Self {
        match text.as_ref() {
            "" => Self::none(),
            text => Self::new(text, Tone::Plain),
        }
    }

    /// Creates the mark for a missing value.
    pub fn none() -> Self {
        Self::new("-", Tone::Faint)
    }

    /// Returns the number of columns that the text takes.
    pub fn width(&self) -> usize {
        self.text.width()
    }
}

/// Replaces white space by a blank, and hidden characters by `?`.
fn clean(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '\n' | '\r' | '\t' => ' ',
            c if is_hidden(c) => '?',
            c => c,
        })
        .collect()
}

/// Writes the hidden characters of a text for programs as JSON's escapes. JSON stays the same value; in other formats the
/// escape is what a reader sees.
pub fn visible(text: String) -> String {
    let is_hidden = |c: char| c != '\n' && c != '\t' && is_hidden(c);
    if !text.contains(is_hidden) {
        return text;
    }
    text.chars()
        .map(
            |c| {
                if is_hidden(c) { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() }
            },
        )
        .collect()
}

/// Cuts the middle out of text that is wider than `columns`, because names differ at both ends.
pub fn elide(text: &str, columns: usize, ellipsis: &str) -> String {
    if text.width() <= columns {
        return text.to_owned();
    }
    let room = columns.saturating_sub(ellipsis.width());
    let tail_room = room * 2 / 5;
    let head = take(text.chars(), room - tail_room);
    let tail: String = take(text.chars().rev(), tail_room).chars().rev().collect();
    format!("{head}{ellipsis}{tail}")
}

/// Takes as many characters as fit.
fn take(chars: impl Iterator<Item = char>, columns: usize) -> String {
    let mut used = 0;
    chars
        .take_while(|c| {
            used += c.width().unwrap_or(0);
            used <= columns
        })
        .collect()
}

/// Breaks text at blanks into lines of at most `columns`; words that are longer are broken too.
/// Lines after the first leave room for `hanging` columns in front.
pub fn wrap(text: &str, columns: usize, hanging: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        let mut rest = word;
        while !rest.is_empty() {
            let limit = columns.saturating_sub(if lines.len() > 1 { hanging } else { 0 }).max(1);
            let Some(line) = lines.last_mut() else { break };
            let gap = usize::from(!line.is_empty());
            if line.width() + gap + rest.width() <= limit {
                line.push_str(&" ".repeat(gap));
                line.push_str(rest);
                break;
            }
            if line.is_empty() {
                let head = take(rest.chars(), limit);
                let cut = head.len().max(rest.chars().next().map_or(1, char::len_utf8));
                line.push_str(&rest[..cut]);
                rest = &rest[cut..];
            }
            lines.push(String::new());
        }
    }
    lines.retain(|line| !line.is_empty());
    lines
}

/// Returns a paragraph: indented by `indent`, and by two more from its second line on.
pub fn paragraph(span: &Span, canvas: &Canvas, indent: usize) -> String {
    wrap(&span.text, canvas.columns.saturating_sub(indent), 2)
        .iter()
        .enumerate()
        .map(|(i, line)| {
            let margin = " ".repeat(if i == 0 { indent } else { indent + 2 });
            format!("{margin}{}\n", span.tone.paint(line))
        })
        .collect()
}

/// Returns a key and its values, separated by commas; an empty text when there are no values.
pub fn field(key: &str, values: &[Span], canvas: &Canvas) -> String {
    let Some(last) = values.len().checked_sub(1) else {
        return String::new();
    };
    let room = canvas.columns.saturating_sub(KEY_COLUMNS);
    let mut out = Tone::Strong.paint(key);
    out.push_str(&" ".repeat(KEY_COLUMNS.saturating_sub(key.width())));
    let mut used = 0;
    for (i, value) in values.iter().enumerate() {
        let comma = if i < last { "," } else { "" };
        let text = elide(&value.text, room.saturating_sub(1), canvas.ellipsis());
        let width = text.width() + comma.len();
        if used > 0 && used + 1 + width > room {
            out.push('\n');
            out.push_str(&" ".repeat(KEY_COLUMNS));
            used = 0;
        } else if used > 0 {
            out.push(' ');
            used += 1;
        }
        out.push_str(&value.tone.paint(&text));
        out.push_str(comma);
        used += width;
    }
    out.push('\n');
    out
}

/// Returns a key and a sentence, wrapped; an empty key continues the field above.
pub fn long_field(key: &str, value: &Span, canvas: &Canvas) -> String {
    let lines = wrap(&value.text, canvas.columns.saturating_sub(KEY_COLUMNS), 0);
    lines
        .iter()
        .enumerate()
        .map(|(i, line)| {
            let key = if i == 0 { key } else { "" };
            let gap = " ".repeat(KEY_COLUMNS.saturating_sub(key.width()));
            let key = match key {
                "" => String::new(),
                key => Tone::Strong.paint(key),
            };
            format!("{key}{gap}{}\n", value.tone.paint(line))
        })
        .collect()
}

/// Returns a count and its noun: `1 node`, `2 nodes`.
pub fn plural(count: usize, noun: &str) -> String {
    let s = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{s}")
}

/// Returns a number with commas between its thousands: `12,345`.
pub fn grouped(number: u64) -> String {
    match number {
        0..1_000 => number.to_string(),
        _ => format!("{},{:03}", grouped(number / 1_000), number % 1_000),
    }
}

/// Returns a count for a narrow column: exact up to five digits, then `120k`, `1.2M`.
pub fn short_count(count: u64) -> String {
    match count {
        0..100_000 => count.to_string(),
        100_000..1_000_000 => format!("{}k", count / 1_000),
        1_000_000..10_000_000 => {
            format!("{}.{}M", count / 1_000_000, count / 100_000 % 10)
        }
        _ => format!("{}M", count / 1_000_000),
    }
}

/// Returns a text such as `No Services in namespace shop.`
pub fn none_text(what: &str, namespace: Option<&str>) -> String {
    match namespace {
        Some(namespace) => format!("No {what} in namespace {}.\n", Span::plain(namespace).text),
        None => format!("No {what}.\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elided_text_keeps_both_ends_and_fits() {
        let name = "ip-10-0-12-34.eu-west-1.compute.internal";
        assert_eq!(elide(name, 24, ".."), "ip-10-0-12-34...internal");
        assert_eq!(elide(name, 24, "…").width(), 24);
        assert_eq!(elide(name, 40, ".."), name);
        for columns in 0..45 {
            assert!(elide(name, columns, "..").width() <= columns.max(2));
            assert!(elide("数据库主节点数据库", columns, "..").width() <= columns.max(2));
        }
    }

    #[test]
    fn wrapped_lines_fit_and_lose_nothing() {
        let text = "commit of 12 operations rejected at 0123456789012345678901234567890123456789";
        for columns in 1..90 {
            let lines = wrap(text, columns, 2);
            let (first, others) = lines.split_first().unwrap();
            assert!(first.width() <= columns);
            let room = columns.saturating_sub(2).max(1);
            assert!(others.iter().all(|line| line.width() <= room));
            assert_eq!(lines.concat().replace(' ', ""), text.replace(' ', ""));
        }
        assert_eq!(wrap("", 10, 2), Vec::<String>::new());
        assert_eq!(wrap("一二", 1, 0), ["一", "二"], "wider than the room");
    }

    #[test]
    fn foreign_text_cannot_drive_the_terminal() {
        let span = Span::plain("a\u{1b}[2Jb\nc\u{202e}d\u{9b}e");
        assert_eq!(span.text, "a?[2Jb c?d?e");
    }

    #[test]
    fn large_numbers_are_grouped() {
        let numbers = [0, 999, 1_000, 1_002_034].map(grouped);
        assert_eq!(numbers, ["0", "999", "1,000", "1,002,034"]);
    }

    #[test]
    fn counts_stay_short() {
        let counts = [7, 99_999, 120_999, 1_250_000, 12_000_000].map(short_count);
        assert_eq!(counts, ["7", "99999", "120k", "1.2M", "12M"]);
    }
}
