//! Parsing of YAML and JSON text into a tree of nodes with line numbers.
//!
//! An object is decoded from the tree once its kind is known, which may come last in a document.
//! Errors can then name the field and the line (see [`super::decode`]).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{Localizer, Location, NonFiniteFloatPolicy, Spanned, UserMessageFormatter};

/// Maximum depth of nesting: Kubernetes objects need about 10, and a debug build takes 32 KiB of
/// stack for each level.
const MAX_DEPTH: usize = 48;
/// Maximum number of aliases (`*name`) of a document that are followed.
const MAX_ALIASES: usize = 10_000;
/// Number of nodes that aliases and merge keys of a document may expand to, for each byte of its
/// text.
const EXPANSION_PER_BYTE: usize = 4;
/// Additional number of such nodes, as room for small documents. A file of many small documents
/// stays cheap as well.
const EXPANSION_SLACK: usize = 1_024;
/// Additional room for text that aliases repeat in a small document, in bytes.
const EXPANSION_SLACK_BYTES: usize = 64 * 1024;
/// A field that the API server writes for its own use. It makes up half of a dump and is never
/// read.
const SKIPPED_FIELD: &str = "managedFields";

/// A value and its line.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct YamlNode {
    /// Line in the parsed text, from 1; 0 when unknown.
    pub(super) line: usize,
    pub(super) value: Value,
}

/// A value as written.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Whole(i64),
    Decimal(f64),
    Text(String),
    List(Vec<YamlNode>),
    Map(BTreeMap<String, YamlNode>),
}

impl YamlNode {
    /// Returns a field of a mapping; `null` counts as absent.
    pub(super) fn get(&self, field: &str) -> Option<&Self> {
        let Value::Map(fields) = &self.value else {
            return None;
        };
        fields.get(field).filter(|node| node.value != Value::Null)
    }

    /// Returns a text field of a mapping.
    pub(super) fn text(&self, field: &str) -> Option<&str> {
        match &self.get(field)?.value {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// The error for text that is not YAML or JSON.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(super) struct SyntaxError {
    /// Line in the text, from 1.
    pub(super) line: usize,
    /// The problem.
    pub(super) message: String,
}

/// Parses one YAML document. The length of the text limits the expansion of aliases, so that a
/// small file can neither become a large tree nor take long.
pub(super) fn parse_yaml(text: &str) -> Result<YamlNode, SyntaxError> {
    let bytes = text.len();
    let expansion = EXPANSION_PER_BYTE * bytes + EXPANSION_SLACK;
    // Without aliases, a node takes at least one byte of the text.
    let nodes = bytes + expansion;
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: MAX_DEPTH,
            max_aliases: MAX_ALIASES,
            max_merge_keys: expansion,
            max_recorded_anchor_events: nodes,
            // A list or mapping has a beginning and an end.
            max_events: 2 * nodes,
            max_nodes: nodes,
            max_total_scalar_bytes: 2 * bytes + EXPANSION_SLACK_BYTES,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: expansion,
        },
        // `yes` and `on` are texts, as in YAML 1.2: a Service may have such a name.
        strict_booleans: true,
        non_finite_float_policy: NonFiniteFloatPolicy::AsString,
        with_snippet: false,
        emit_comments: false,
    };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| SyntaxError {
        line: error.location().map_or(1, |at| line(at).max(1)),
        message: error.render_with_formatter(&UserMessageFormatter.with_localizer(&WithoutPlace)),
    })
}

/// Parses concatenated JSON values; each comes with the line on which it begins. Nodes inside have
/// no lines. After an error nothing more can be read.
pub(super) fn parse_json(text: &str) -> impl Iterator<Item = Result<YamlNode, SyntaxError>> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<YamlNode>();
    let mut line = 1;
    let mut counted = 0;
    std::iter::from_fn(move || {
        let begin = values.byte_offset();
        let begin = begin + leading_white_space(&text[begin..]);
        line += text[counted..begin].matches('\n').count();
        counted = begin;
        Some(match values.next()? {
            Ok(node) => Ok(YamlNode { line, ..node }),
            Err(error) => Err(SyntaxError {
                line: error.line(),
                message: without_json_place(&error),
            }),
        })
    })
}

fn leading_white_space(text: &str) -> usize {
    text.len() - text.trim_start_matches([' ', '\t', '\r', '\n']).len()
}

/// Returns the message of an error without its ` at line 3 column 7`.
fn without_json_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    text.strip_suffix(&place).unwrap_or(&text).to_owned()
}

/// Removes the places from messages: the parser's places are not relative to the file.
struct WithoutPlace;

impl Localizer for WithoutPlace {
    fn attach_location<'a>(&self, base: Cow<'a, str>, _: Location) -> Cow<'a, str> {
        base
    }
}

fn line(location: Location) -> usize {
    usize::try_from(location.line()).unwrap_or(0)
}

// === impl Deserialize for Node ===

#[cfg(test)]
thread_local! {
    /// Number of nodes that were begun, for tests of the cost of a text.
    static NODES: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

impl<'de> Deserialize<'de> for YamlNode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[cfg(test)]
        NODES.set(NODES.get() + 1);
        let spanned = Spanned::<Value>::deserialize(deserializer)?;
        Ok(Self {
            line: line(spanned.referenced),
            value: spanned.value,
        })
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Whole(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        // A number beyond i64 is out of every valid range, and stays so when saturated.
        Ok(Value::Whole(i64::try_from(value).unwrap_or(i64::MAX)))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Decimal(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(node) = access.next_element()? {
            list.push(node);
        }
        Ok(Value::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut fields = BTreeMap::new();
        while let Some(key) = access.next_key::<String>()? {
            if key == SKIPPED_FIELD {
                access.next_value::<IgnoredAny>()?;
                continue;
            }
            let node: YamlNode = access.next_value()?;
            // The YAML parser refuses this on its own, the JSON parser does not.
            if fields.contains_key(&key) {
                return Err(A::Error::custom(format_args!("duplicate key {key:?}")));
            }
            fields.insert(key, node);
        }
        Ok(Value::Map(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yaml_error(text: &str) -> String {
        let error = parse_yaml(text).unwrap_err();
        format!("line {}: {}", error.line, error.message)
    }

    #[test]
    fn nodes_know_their_lines() {
        let tree = parse_yaml("# comment\na:\n- b: 1\n- c: [x,\n    y]\n").unwrap();
        let Value::List(items) = &tree.get("a").unwrap().value else {
            panic!("{tree:?}");
        };
        assert_eq!((tree.line, items[0].line, items[1].line), (2, 3, 4));
    }

    #[test]
    fn texts_stay_texts_and_null_is_absent() {
        let tree = parse_yaml("a: yes\nb: ~\nc: 1.0\nd: '1'\ne: 2026-11-21T03:47:11Z\n").unwrap();
        assert_eq!(tree.text("a"), Some("yes"));
        assert_eq!(tree.get("b"), None);
        assert_eq!(tree.get("c").unwrap().value, Value::Decimal(1.0));
        assert_eq!(tree.text("d"), Some("1"));
        assert_eq!(tree.text("e"), Some("2026-11-21T03:47:11Z"));
    }

    #[test]
    fn yaml_errors_have_a_line_and_a_reason() {
        for (text, expected) in [
            (
                "a: 1\nb: c: d",
                "line 2: mapping values are not allowed in this context",
            ),
            ("a: [1,2", "line 1: unclosed bracket '['"),
            (
                "a: 1\na: 2",
                "line 2: duplicate mapping key: a not allowed here",
            ),
            ("a: 1\nb: *x", "line 2: reference to unknown value"),
        ] {
            assert_eq!(yaml_error(text), expected);
        }
    }

    #[test]
    fn alias_bombs_and_depth_are_stopped() {
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for i in 1..20 {
            let aliases = vec![format!("*a{}", i - 1); 10].join(", ");
            bomb += &format!("a{i}: &a{i} [{aliases}]\n");
        }
        let megabyte = "x".repeat(1 << 20);
        let wide = format!("a: &a {megabyte}\nb: [{}]", vec!["*a"; 9_000].join(","));
        let deep: String = (0..300).map(|i| format!("{}a:\n", " ".repeat(i))).collect();
        for text in [bomb, wide, deep, "[".repeat(100_000)] {
            let error = yaml_error(&text);
            assert!(
                ["too large or too complex", "recursion limit"]
                    .iter()
                    .any(|expected| error.contains(expected)),
                "{error}"
            );
        }
        let deep = "[".repeat(100_000);
        assert!(parse_json(&deep).next().unwrap().is_err());
    }

    #[test]
    fn json_values_may_be_concatenated() {
        let values: Vec<_> =
            parse_json("{\"a\": 1}\n\n {\"a\": 2}{\"a\": 2, \"a\": 3} x").collect();
        let lines = values.iter().map(|v| match v {
            Ok(node) => Ok(node.line),
            Err(error) => Err(format!("line {}: {error}", error.line)),
        });
        assert_eq!(
            lines.collect::<Vec<_>>(),
            [Ok(1), Ok(3), Err("line 3: duplicate key \"a\"".to_owned())]
        );
    }

    #[test]
    fn managed_fields_are_not_kept() {
        let tree = parse_yaml("metadata:\n  managedFields: [{a: b}]\n  name: x\n").unwrap();
        assert_eq!(tree.get("metadata").unwrap().get("managedFields"), None);
    }

    /// Returns nested lists or mappings of aliases; each level has eight times as many as the one
    /// before.
    fn nested(leaf: &str, open: &str, close: &str, depth: usize) -> String {
        (1..depth).fold(format!("a0: &a0 {leaf}\n"), |text, level| {
            let alias = format!("*a{}", level - 1);
            let aliases = vec![alias; 8].join(",");
            format!("{text}a{level}: &a{level} {open}{aliases}{close}\n")
        })
    }

    #[test]
    fn a_bomb_costs_no_more_than_its_text_allows() {
        let lists = nested("[x,x,x,x,x,x,x,x]", "[", "]", 9);
        let merges = nested("{x: 1, y: 2, z: 3}", "{<<: [", "]}", 9);
        let items = "- k: &k [x,x,x,x,x,x,x,x]\n".to_owned() + &"- [*k,*k,*k,*k,*k]\n".repeat(10);
        let texts = format!(
            "a: &a {}\nb: [{}]",
            "x".repeat(1_000),
            ["*a"; 900].join(",")
        );
        for (bomb, line) in [(&lists, 4), (&merges, 1), (&texts, 2)] {
            NODES.set(0);
            let error = parse_yaml(bomb).unwrap_err();
            let work = NODES.get();
            let most = (1 + EXPANSION_PER_BYTE) * bomb.len() + EXPANSION_SLACK;
            assert!(work <= most, "{work} nodes of {} bytes", bomb.len());
            assert!(
                error.message.contains("too large or too complex"),
                "{error}"
            );
            assert_eq!(error.line, line, "{error}");
        }
        assert!(parse_yaml(&items).is_ok(), "aliases that people write");
    }
}
