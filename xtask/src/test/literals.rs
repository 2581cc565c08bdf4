//! String literals of Rust code, found without a parser, for checks of their words.

/// Returns the string literals of Rust code with their lines. Continued lines are joined, escapes and
/// placeholders become blanks.
pub(super) fn literals(code: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(first) = code[at..].chars().next() {
        let rest = &code[at..];
        let in_word =
            code[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_');
        let raw = if in_word { None } else { raw_quote(rest) };
        at += if rest.starts_with("//") {
            through(rest, "\n")
        } else if rest.starts_with("/*") {
            through(rest, "*/")
        } else if first == '\'' {
            character(rest)
        } else if first != '"' && raw.is_none() {
            first.len_utf8()
        } else {
            let (begin, end) = raw.unwrap_or((1, "\"".to_owned()));
            let content = &rest[begin..];
            let (content, text) = if first == '"' {
                let content = &content[..quoted(content)];
                (content, plain(content))
            } else {
                let content = content.split(&*end).next().unwrap_or_default();
                (content, content.to_owned())
            };
            let line = code[..at].matches('\n').count() + 1;
            found.push((line, without_placeholders(&text)));
            begin + content.len() + end.len()
        };
    }
    found
}

/// Returns the length of the prefix of a raw string such as `br#"`, and its end.
fn raw_quote(rest: &str) -> Option<(usize, String)> {
    let prefixed = rest.strip_prefix(['b', 'c']).unwrap_or(rest);
    let marks = prefixed.strip_prefix('r')?;
    let hashes = marks.len() - marks.trim_start_matches('#').len();
    marks[hashes..].starts_with('"').then(|| {
        let begin = rest.len() - marks.len() + hashes + 1;
        (begin, format!("\"{}", "#".repeat(hashes)))
    })
}

/// Returns the number of bytes up to and with `end`; all bytes if it does not occur.
fn through(text: &str, end: &str) -> usize {
    text.find(end).map_or(text.len(), |at| at + end.len())
}

/// Returns the length of a character literal, or of the quote that begins a lifetime.
fn character(rest: &str) -> usize {
    let mut chars = rest.chars().skip(1);
    match (chars.next(), chars.next()) {
        (Some('\\'), Some(escaped)) => {
            let begin = 2 + escaped.len_utf8();
            begin + through(&rest[begin..], "'")
        }
        (Some(only), Some('\'')) => 2 + only.len_utf8(),
        _ => 1,
    }
}

/// Returns the length of a string's content, up to its closing quote.
fn quoted(content: &str) -> usize {
    let mut escaped = false;
    for (at, c) in content.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at,
            _ => {}
        }
    }
    content.len()
}

/// Returns the words of a literal: without its line continuations and escapes.
fn plain(content: &str) -> String {
    let mut text = String::new();
    let mut chars = content.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '\\' {
            text.push(c);
        } else if chars.next() == Some('\n') {
            while chars.next_if(|c| c.is_whitespace()).is_some() {}
        } else {
            text.push(' ');
        }
    }
    text
}

fn without_placeholders(text: &str) -> String {
    let mut parts = text.split('{');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |words, part| {
        words + " " + part.split_once('}').map_or(part, |(_, after)| after)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(code: &str) -> Vec<String> {
        literals(code).into_iter().map(|(_, text)| text).collect()
    }

    #[test]
    fn literals_are_found_with_their_lines() {
        let code = "let a = \"one \\\n    two\"; // \"no\"\n/* \"no\" */ let b = r#\"th\"ree\"#;\n";
        let found = literals(code);
        assert_eq!(found[0], (1, "one two".to_owned()));
        assert_eq!(found[1], (3, "th\"ree".to_owned()));
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn quotes_elsewhere_begin_no_literal() {
        assert_eq!(texts("'\"' '\\'' fn f<'a>(x: &'a str) \"x\""), ["x"]);
        assert_eq!(texts("for r in \"a\\\"b\" {}"), ["a b"]);
        assert_eq!(texts("b'\\\\' br\"y\""), ["y"]);
    }

    #[test]
    fn escapes_and_placeholders_are_not_words() {
        assert_eq!(texts("\"a\\nb {told:?} c\""), ["a b   c"]);
    }
}
