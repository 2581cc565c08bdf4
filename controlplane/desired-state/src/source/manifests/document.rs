//! Parsing of a file's text into objects and problems, each with its place.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use super::object::{
    Defaults, ParsedEntry, ParsedItem, interpret, interpret_item, list_of, syntax_problem,
};
use super::text::{CutList, TextPiece, cut_list, documents, is_blank};
use super::tree::{YamlNode, parse_json, parse_yaml};

#[cfg(test)]
mod tests;

/// A place in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FilePosition {
    /// Number of the document, from 1.
    pub(super) document: usize,
    /// Number of the item of the outermost List, from 1.
    pub(super) item: Option<usize>,
    /// Line in the file, from 1; 0 when unknown.
    pub(super) line: usize,
}

impl fmt::Display for FilePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "document {}", self.document)?;
        if let Some(item) = self.item {
            write!(f, ", item {item}")?;
        }
        match self.line {
            0 => Ok(()),
            line => write!(f, ", line {line}"),
        }
    }
}

/// The parsed content of a file.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// All objects and problems, in order.
    pub(super) found: Vec<(FilePosition, ParsedItem)>,
    /// All documents are blank.
    pub(super) blank: bool,
    /// Results by piece of text, so that unchanged pieces need not be parsed again.
    pub(super) memo: Memo,
}

/// Results of the last read, by piece of text. A keyed hash of the text identifies a piece, so no
/// author of files can create collisions.
#[derive(Clone, Debug, Default)]
pub(super) struct Memo {
    hasher: RandomState,
    pieces: HashMap<u64, Arc<[ParsedEntry]>>,
}

/// Parses the text of a file: JSON where it must be or can be, else YAML.
pub(super) fn read(text: &str, must_be_json: bool, before: &Memo) -> Contents {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let looks_like_json =
        || text.trim_start().starts_with('{') && matches!(parse_json(text).next(), Some(Ok(_)));
    if must_be_json || looks_like_json() {
        return read_json(text);
    }
    let mut reader = DocumentReader {
        before,
        contents: Contents {
            blank: true,
            memo: Memo {
                hasher: before.hasher.clone(),
                pieces: HashMap::new(),
            },
            ..Contents::default()
        },
    };
    for (index, document) in documents(text).iter().enumerate() {
        reader.document(index + 1, document);
    }
    reader.contents
}

fn read_json(text: &str) -> Contents {
    let mut contents = Contents {
        blank: text.trim().is_empty(),
        ..Contents::default()
    };
    for (index, value) in parse_json(text).enumerate() {
        let (line, entries) = match value {
            Ok(node) => (node.line, interpret(&node)),
            Err(error) => (1, vec![syntax_problem("JSON", &error)]),
        };
        for entry in entries {
            contents.add(index + 1, line, entry.item, &entry);
        }
    }
    contents
}

impl Contents {
    fn add(&mut self, document: usize, line: usize, item: Option<usize>, entry: &ParsedEntry) {
        let place = FilePosition {
            document,
            item,
            line: match entry.line {
                // Items of a JSON List have no lines, and the List's line would mislead.
                0 if item.is_some() => 0,
                relative => line + relative.saturating_sub(1),
            },
        };
        self.found.push((place, entry.found.clone()));
    }
}

// === impl Reader ===

struct DocumentReader<'a> {
    before: &'a Memo,
    contents: Contents,
}

impl DocumentReader<'_> {
    fn document(&mut self, number: usize, document: &TextPiece<'_>) {
        let text = document.text;
        self.contents.blank &= is_blank(text.strip_prefix("---").unwrap_or(text));
        if let Some(list) = cut_list(document)
            && self.list(number, document, &list)
        {
            return;
        }
        for entry in &*self.piece(document.text, Defaults::default(), |node, _| {
            interpret(node)
        }) {
            self.contents.add(number, document.line, entry.item, entry);
        }
    }

    /// Reads a List item by item. Returns false when the document has to be read as a whole: it is
    /// no List, or an item has an alias to another item.
    fn list(&mut self, number: usize, document: &TextPiece<'_>, list: &CutList<'_>) -> bool {
        let Ok(frame) = parse_yaml(&list.frame) else {
            return false;
        };
        let Some(defaults) = frame.text("kind").and_then(|kind| list_of(kind, &frame)) else {
            return false;
        };
        let mut pieces = Vec::with_capacity(list.items.len());
        for item in &list.items {
            let entries = self.piece(item.text, defaults, interpret_item);
            let broken = entries.iter().any(ParsedEntry::is_syntax_problem);
            if broken && item.text.contains('*') && parse_yaml(document.text).is_ok() {
                return false;
            }
            pieces.push((item.line, entries));
        }
        for (index, (line, entries)) in pieces.iter().enumerate() {
            for entry in &**entries {
                self.contents.add(number, *line, Some(index + 1), entry);
            }
        }
        true
    }

    fn piece<'n>(
        &mut self,
        text: &str,
        defaults: Defaults<'n>,
        interpret: impl Fn(&YamlNode, Defaults<'n>) -> Vec<ParsedEntry>,
    ) -> Arc<[ParsedEntry]> {
        let key = self.before.hasher.hash_one((text, defaults));
        let entries =
            self.before.pieces.get(&key).cloned().unwrap_or_else(|| match parse_yaml(text) {
                Ok(node) => interpret(&node, defaults).into(),
                Err(error) => [syntax_problem("YAML", &error)].into(),
            });
        self.contents.memo.pieces.insert(key, entries.clone());
        entries
    }
}
