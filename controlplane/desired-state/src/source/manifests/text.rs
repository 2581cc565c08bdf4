//! Cuts text into documents, and the text of a List into its items, by lines.
//!
//! Each piece is parsed alone: a broken piece does not affect the others, and an unchanged piece
//! need not be parsed again.

use std::ops::Range;

/// A piece of text and the line of the file on which it begins, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TextPiece<'t> {
    pub(super) text: &'t str,
    pub(super) line: usize,
}

/// Returns the YAML documents of a text, numbered from 1. In YAML, no line inside a document may
/// begin with the markers `---` and `...`, not even inside quotes, so checking lines is enough.
///
/// Text before the first `---` or after `...` is a document only if it is not blank.
pub(super) fn documents(text: &str) -> Vec<TextPiece<'_>> {
    let mut documents = Vec::new();
    let mut begin = 0;
    let mut begin_line = 1;
    let mut marked = false;
    let mut close = |range: Range<usize>, line, marked| {
        let text = &text[range];
        if marked || !is_blank(text) {
            documents.push(TextPiece { text, line });
        }
    };
    for (index, (offset, line)) in lines(text).enumerate() {
        let starts = is_marker(line, "---");
        if !starts && !is_marker(line, "...") {
            continue;
        }
        close(begin..offset, begin_line, marked);
        marked = starts;
        (begin, begin_line) =
            if starts { (offset, index + 1) } else { (offset + line.len(), index + 2) };
    }
    close(begin..text.len(), begin_line, marked);
    documents
}

/// A List that was cut: its items, and the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CutList<'t> {
    /// The document without the items; the field `items` is left without a value.
    pub(super) frame: String,
    /// The items, each a YAML list of one.
    pub(super) items: Vec<TextPiece<'t>>,
}

/// Cuts a block-style document at the items of its top-level field `items`, as `kubectl` prints it;
/// `None` for a document of another shape. In YAML, a line with the indentation of the first `- `
/// can only be the next item.
pub(super) fn cut_list<'t>(document: &TextPiece<'t>) -> Option<CutList<'t>> {
    let text = document.text;
    let mut rest = lines(text).enumerate().peekable();
    rest.find(|(_, (_, line))| line.strip_prefix("items:").is_some_and(is_blank))?;
    while rest.next_if(|(_, (_, line))| is_blank(line)).is_some() {}
    let &(_, (first, line)) = rest.peek()?;
    let indent = indent_of(line);
    let is_item = |line: &str| {
        let after = line.get(indent..).and_then(|l| l.strip_prefix('-'));
        indent_of(line) == indent && after.is_some_and(|l| l.starts_with([' ', '\r', '\n']))
    };
    if !is_item(line) {
        return None;
    }
    let mut begins = Vec::new();
    let mut end = text.len();
    for (index, (offset, line)) in rest {
        if is_item(line) {
            begins.push((offset, index));
        } else if indent_of(line) <= indent && !is_blank(line) {
            end = offset;
            break;
        }
    }
    let ends = begins.iter().skip(1).map(|(offset, _)| *offset).chain([end]);
    let items = begins.iter().zip(ends).map(|(&(begin, index), end)| TextPiece {
        text: &text[begin..end],
        line: document.line + index,
    });
    Some(CutList {
        items: items.collect(),
        frame: [&text[..first], &text[end..]].concat(),
    })
}

/// Returns the lines with their ends, and their offsets.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut offset = 0;
    text.split_inclusive('\n').map(move |line| {
        offset += line.len();
        (offset - line.len(), line)
    })
}

fn is_marker(line: &str, marker: &str) -> bool {
    let rest = line.strip_prefix(marker);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']))
}

fn indent_of(line: &str) -> usize {
    line.len() - line.trim_start_matches(' ').len()
}

/// Returns whether a text has only white space, comments and directives.
pub(super) fn is_blank(text: &str) -> bool {
    text.lines().all(|line| {
        let line = line.trim();
        line.is_empty() || line.starts_with(['#', '%'])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(text: &str) -> Vec<(usize, &str)> {
        documents(text).iter().map(|d| (d.line, d.text)).collect()
    }

    #[test]
    fn documents_are_cut_at_markers() {
        assert_eq!(
            cut("a: 1\n---\nb: 2\n"),
            [(1, "a: 1\n"), (2, "---\nb: 2\n")]
        );
        assert_eq!(cut("# hi\n---\na: 1\n...\n# end\n"), [(2, "---\na: 1\n")]);
        assert_eq!(cut("%YAML 1.2\n---\na: 1"), [(2, "---\na: 1")]);
        assert_eq!(
            cut("--- # one\r\na\r\n---\r\n---\tb\r\n"),
            [(1, "--- # one\r\na\r\n"), (3, "---\r\n"), (4, "---\tb\r\n")]
        );
        assert_eq!(
            cut("a: |\n  x\n ---\n---b\n"),
            [(1, "a: |\n  x\n ---\n---b\n")]
        );
        assert_eq!(cut("a: 1\n...\nb: 2\n"), [(1, "a: 1\n"), (3, "b: 2\n")]);
        assert!(cut("\n  \n# only this\n").is_empty());
    }

    #[test]
    fn lists_are_cut_at_items() {
        let text = "kind: List\nitems:\n# first\n- a: 1\n  b: |\n    - c\n# mid\n- d: 1\n\nx: y\n";
        let document = TextPiece { text, line: 10 };
        let list = cut_list(&document).unwrap();
        assert_eq!(list.frame, "kind: List\nitems:\n# first\nx: y\n");
        let items: Vec<_> = list.items.iter().map(|i| (i.line, i.text)).collect();
        assert_eq!(
            items,
            [(13, "- a: 1\n  b: |\n    - c\n# mid\n"), (17, "- d: 1\n\n")]
        );
    }

    #[test]
    fn indented_lists_are_cut_too() {
        let text = "items:\n  - a: 1\n    b:\n    - 2\n  - c: 1\nkind: List\n";
        let list = cut_list(&TextPiece { text, line: 1 }).unwrap();
        assert_eq!(list.frame, "items:\nkind: List\n");
        assert_eq!(list.items.len(), 2);
    }

    #[test]
    fn other_shapes_are_not_cut() {
        for text in [
            "kind: Service\n",
            "items: []\nkind: List\n",
            "items:\n  a: 1\n",
            "items:\n",
            "spec:\n  items:\n  - a: 1\n",
        ] {
            assert_eq!(cut_list(&TextPiece { text, line: 1 }), None, "{text}");
        }
    }
}
