//! `-o jsonpath=TEMPLATE` and `--sort-by`: the part of kubectl's templates that scripts use.
//!
//! A template is text with expressions in braces: a path such as `{.items[*].name}`, a text such as `{"\n"}`, or
//! `{range PATH}` up to `{end}`. Paths are those of RFC 9535, without the `$` in front if the reader likes.

use std::cmp::Ordering;
use std::str::FromStr;

use jsonpath_rust::parser::model::JpQuery;
use jsonpath_rust::parser::parse_json_path;
use jsonpath_rust::query::{QueryRef, js_path_process};
use serde::Serialize;
use serde_json::Value;

/// A path into a JSON document.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Path(JpQuery);

impl FromStr for Path {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rest = text.trim();
        let rest = rest.strip_prefix(['$', '@']).unwrap_or(rest);
        let path = match rest.chars().next() {
            None => "$".to_owned(),
            Some('.') if rest.len() == 1 => "$".to_owned(),
            Some('.' | '[') => format!("${rest}"),
            Some(_) => format!("$.{rest}"),
        };
        let query = parse_json_path(&path)
            .map_err(|_| format!("'{text}' is no path: write it like .items[*].name"))?;
        Ok(Self(query))
    }
}

impl Path {
    /// Returns the values at the path.
    pub(crate) fn values<'a>(&self, of: &'a Value) -> Vec<&'a Value> {
        js_path_process(&self.0, of)
            .unwrap_or_default()
            .into_iter()
            .map(QueryRef::val)
            .collect()
    }

    /// Sorts items by the first value that each has at the path; items without one come last.
    ///
    /// # Errors
    /// No item has the path: it is misspelt.
    pub(crate) fn sort<T: Serialize>(&self, items: &mut Vec<T>) -> Result<(), String> {
        let mut keyed = Vec::with_capacity(items.len());
        let mut fields = Vec::new();
        for item in std::mem::take(items) {
            let value = serde_json::to_value(&item).map_err(|error| error.to_string())?;
            let key = self.values(&value).into_iter().next().cloned();
            if let (true, Some(of)) = (fields.is_empty(), value.as_object()) {
                fields = of.keys().cloned().collect();
            }
            keyed.push((key, item));
        }
        let missing = !keyed.is_empty() && keyed.iter().all(|(key, _)| key.is_none());
        keyed.sort_by(|(a, _), (b, _)| order(a.as_ref(), b.as_ref()));
        *items = keyed.into_iter().map(|(_, item)| item).collect();
        if missing {
            Err(format!(
                "no item has the field of --sort-by; the fields are {}",
                fields.join(", ")
            ))
        } else {
            Ok(())
        }
    }
}

/// Compares values: numbers by size, texts by their numbers and letters, missing ones last.
fn order(a: Option<&Value>, b: Option<&Value>) -> Ordering {
    let rank = |value: Option<&Value>| match value {
        Some(Value::Bool(_)) => 0,
        Some(Value::Number(_)) => 1,
        Some(Value::String(_)) => 2,
        Some(Value::Array(_) | Value::Object(_)) => 3,
        Some(Value::Null) | None => 4,
    };
    let within = match (a, b) {
        (Some(Value::Bool(a)), Some(Value::Bool(b))) => a.cmp(b),
        (Some(Value::Number(a)), Some(Value::Number(b))) => match (a.as_u64(), b.as_u64()) {
            (Some(a), Some(b)) => a.cmp(&b),
            _ => {
                let [a, b] = [a, b].map(|number| number.as_f64().unwrap_or_default());
                a.total_cmp(&b)
            }
        },
        (Some(Value::String(a)), Some(Value::String(b))) => natural(a, b),
        (Some(Value::Array(a)), Some(Value::Array(b))) => order(a.first(), b.first()),
        _ => Ordering::Equal,
    };
    rank(a).cmp(&rank(b)).then(within)
}

/// Compares texts so that `node-9` comes before `node-10`.
fn natural(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a, b);
    loop {
        let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
        let (numbers_a, numbers_b) = (digits(left), digits(right));
        if numbers_a > 0 && numbers_b > 0 {
            let (number_a, rest_a) = left.split_at(numbers_a);
            let (number_b, rest_b) = right.split_at(numbers_b);
            let [short_a, short_b] = [number_a, number_b].map(|n| n.trim_start_matches('0'));
            let of = short_a.len().cmp(&short_b.len()).then(short_a.cmp(short_b));
            if of != Ordering::Equal {
                return of;
            }
            (left, right) = (rest_a, rest_b);
            continue;
        }
        match (left.chars().next(), right.chars().next()) {
            (Some(x), Some(y)) if x == y => {
                (left, right) = (&left[x.len_utf8()..], &right[y.len_utf8()..]);
            }
            // Leading zeros differ at most.
            (None, None) => return a.cmp(b),
            (x, y) => return x.cmp(&y),
        }
    }
}

/// A template of `-o jsonpath=`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Template(Vec<Part>);

#[derive(Clone, Debug, PartialEq)]
enum Part {
    Text(String),
    Values(Path),
    Range(Path, Vec<Part>),
}

impl FromStr for Template {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Err("the template is empty: write jsonpath={.items[*].name}".to_owned());
        }
        if !text.contains('{') {
            return Ok(Self(vec![Part::Values(text.parse()?)]));
        }
        // Ranges that are open, each with what came before it.
        let mut open: Vec<(Path, Vec<Part>)> = Vec::new();
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, inside, after)) = split(rest)? {
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            }
            let inside = inside.trim();
            match inside.split_once(char::is_whitespace) {
                Some(("range", path)) => open.push((path.parse()?, std::mem::take(&mut parts))),
                _ if inside == "end" => {
                    let (path, outer) = open.pop().ok_or("{end} without a {range ..}")?;
                    let within = std::mem::replace(&mut parts, outer);
                    parts.push(Part::Range(path, within));
                }
                _ if inside.starts_with(['"', '\'']) => parts.push(Part::Text(unquote(inside)?)),
                _ => parts.push(Part::Values(inside.parse()?)),
            }
            rest = after;
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        if open.is_empty() {
            Ok(Self(parts))
        } else {
            Err("{range ..} without an {end}".to_owned())
        }
    }
}

/// Returns the text before the first braces, inside them, and behind; `None` without braces.
fn split(text: &str) -> Result<Option<(&str, &str, &str)>, String> {
    let Some((before, inside)) = text.split_once('{') else {
        return Ok(None);
    };
    let (mut quote, mut escaped) = (None, false);
    for (at, c) in inside.char_indices() {
        match (c, quote) {
            _ if escaped => escaped = false,
            ('\\', Some(_)) => escaped = true,
            ('"' | '\'', None) => quote = Some(c),
            (c, Some(begun)) if c == begun => quote = None,
            ('}', None) => return Ok(Some((before, &inside[..at], &inside[at + 1..]))),
            _ => {}
        }
    }
    Err(format!("'{{{inside}' has no '}}' at its end"))
}

/// Returns the text between quotes, with `\n` and `\t` as in kubectl.
fn unquote(text: &str) -> Result<String, String> {
    let quote = text.chars().next().unwrap_or_default();
    let inside = text
        .strip_prefix(quote)
        .and_then(|t| t.strip_suffix(quote))
        .ok_or_else(|| format!("{text} has no {quote} at its end"))?;
    let mut out = String::new();
    let mut chars = inside.chars();
    while let Some(c) = chars.next() {
        out.push(match c {
            '\\' => match chars.next() {
                Some('n') => '\n',
                Some('t') => '\t',
                Some('r') => '\r',
                Some(other) => other,
                None => '\\',
            },
            c => c,
        });
    }
    Ok(out)
}

impl Template {
    /// Returns the filled template, with a newline at its end.
    pub(crate) fn fill(&self, value: &Value) -> String {
        let mut out = String::new();
        fill(&self.0, value, &mut out);
        if !out.is_empty() && !out.ends_with('\n') {
            out.push('\n');
        }
        out
    }
}

/// Fills parts. The values of one path are separated by blanks; texts are without quotes.
fn fill(parts: &[Part], value: &Value, out: &mut String) {
    for part in parts {
        match part {
            Part::Text(text) => out.push_str(text),
            Part::Values(path) => {
                for (n, value) in path.values(value).into_iter().enumerate() {
                    if n > 0 {
                        out.push(' ');
                    }
                    match value {
                        Value::Null => {}
                        Value::String(text) => out.push_str(text),
                        other => out.push_str(&other.to_string()),
                    }
                }
            }
            Part::Range(path, within) => {
                for value in path.values(value) {
                    fill(within, value, out);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn filled(template: &str) -> String {
        let value = json!({
            "kind": "NodeList",
            "items": [
                {"name": "node-10", "state": "InSync", "revisions": {"lag": 0}, "zone": null},
                {"name": "node-9", "state": "Failing", "revisions": {"lag": 7}, "zone": "a}b"},
            ],
        });
        template.parse::<Template>().unwrap().fill(&value)
    }

    #[test]
    fn templates_as_kubectl_knows_them() {
        for (template, expected) in [
            ("{.items[*].name}", "node-10 node-9\n"),
            (".items[*].name", "node-10 node-9\n"),
            ("items[0].name", "node-10\n"),
            ("{$.items[1].revisions}", "{\"lag\":7}\n"),
            (
                "{range .items[*]}{.name}{\"\\t\"}{.revisions.lag}{\"\\n\"}{end}",
                "node-10\t0\nnode-9\t7\n",
            ),
            (
                "{.items[?(@.state==\"Failing\")].name} fails",
                "node-9 fails\n",
            ),
            ("{.items[?(@.zone=='a}b')].name}", "node-9\n"),
            ("{.items[1]['name','state']}", "node-9 Failing\n"),
            ("{.items[0].zone}", ""),
            ("{.nothing}", ""),
        ] {
            assert_eq!(filled(template), expected, "{template}");
        }
        for wrong in [
            "",
            "{.items[}",
            "{.items",
            "{end}",
            "{range .items[*]}{.name}",
            "{\"a}",
        ] {
            assert!(wrong.parse::<Template>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn items_are_sorted_by_numbers_and_names() {
        let sorted = |path: &str| {
            let mut items = vec![
                json!({"name": "node-10", "n": 2}),
                json!({"name": "node-9", "n": 10}),
                json!({"name": "a"}),
            ];
            let done = path.parse::<Path>().unwrap().sort(&mut items);
            let names: Vec<String> = items
                .iter()
                .map(|item| item["name"].as_str().unwrap())
                .map(str::to_owned)
                .collect();
            done.map(|()| names)
        };
        assert_eq!(sorted(".name").unwrap(), ["a", "node-9", "node-10"]);
        assert_eq!(sorted("n").unwrap(), ["node-10", "node-9", "a"]);
        assert!(sorted(".nam").unwrap_err().ends_with("are n, name"));
        let mut none = Vec::<Value>::new();
        assert_eq!(".x".parse::<Path>().unwrap().sort(&mut none), Ok(()));
    }
}
