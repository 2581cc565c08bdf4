//! Reads a [`KubeProxyConfiguration`] from text (I2), strictly at first. Fields that are unknown or
//! repeated are then ignored, and named in a warning. A value of the wrong type is an error.

use std::borrow::Cow;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde_json::{Map, Value};
use serde_path_to_error::Segment;
use serde_saphyr::{
    DuplicateKeyPolicy, Localizer, Location, NonFiniteFloatPolicy, UserMessageFormatter,
};

use crate::problem::{Problem, listed, shown};
use crate::types::{API_VERSION, KIND, KubeProxyConfiguration};

/// Longest file that is read, in bytes: the size of a ConfigMap.
const MAX_FILE: u64 = 1 << 20;
/// Most levels of nesting: the configuration itself needs 5.
const MAX_DEPTH: usize = 32;
/// Most values in a file.
const MAX_NODES: usize = 100_000;
/// Most bytes of all texts after aliases are resolved.
const MAX_TEXT: usize = 4 << 20;
/// Most values of the wrong type that are reported.
const MAX_NAMED: usize = 20;
/// Most characters of the parser's message, which may quote the text.
const MAX_MESSAGE: usize = 200;

/// The content of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// The configuration, with defaults for absent fields.
    pub config: KubeProxyConfiguration,
    /// The file names `primary` among the node port addresses, which is also their default in most modes.
    pub names_primary: bool,
    /// The reason why the file is not strictly valid.
    pub warning: Option<String>,
    /// The values of the wrong type, for which `config` has defaults.
    pub problems: Vec<Problem>,
}

/// Returns the text of a file. Refuses a pipe or device, which might never end.
///
/// # Errors
/// One problem that says what to do.
pub fn text_of(path: &Path) -> Result<String, Problem> {
    let unreadable = |error: io::Error| Problem::general(format!("cannot be read: {error}"));
    let mut options = std::fs::OpenOptions::new();
    // Opening a pipe must not wait for a writer.
    let nonblock = nix::fcntl::OFlag::O_NONBLOCK.bits();
    let file = options.read(true).custom_flags(nonblock).open(path).map_err(unreadable)?;
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(Problem::general("is not a regular file"));
    }
    let mut bytes = Vec::new();
    let read = file.take(MAX_FILE + 1).read_to_end(&mut bytes);
    if read.map_err(unreadable)? as u64 > MAX_FILE {
        return Err(Problem::general(format!(
            "is larger than {MAX_FILE} bytes, too large for a configuration file"
        )));
    }
    String::from_utf8(bytes).map_err(|_| Problem::general("is not UTF-8 text"))
}

/// Reads YAML or JSON.
///
/// # Errors
/// Text that is not YAML, or not a configuration.
pub fn document(text: &str) -> Result<Document, Vec<Problem>> {
    let mut lax = Vec::new();
    let (value, has_more) = match parse(text, DuplicateKeyPolicy::Error) {
        Ok(parsed) => parsed,
        // As kube-proxy does, the last of several equal keys counts. If parsing still fails, the
        // text is broken.
        Err(strict) => match parse(text, DuplicateKeyPolicy::LastWins) {
            Ok(parsed) => {
                lax.push(format!("{strict}: the last one counts"));
                parsed
            }
            Err(error) => return Err(vec![Problem::general(error)]),
        },
    };
    if has_more {
        lax.push("of several YAML documents, the first one counts".to_owned());
    }
    let mut value = match value {
        Value::Object(_) => value,
        Value::Null => return Err(vec![Problem::general("is empty")]),
        _ => return Err(vec![Problem::general("must be a mapping of fields")]),
    };
    remove_nulls(&mut value);
    let wrong = identity(&value);
    if !wrong.is_empty() {
        return Err(wrong);
    }
    let (mut config, mut problems) = typed(value.clone());
    if let Ok(known) = serde_json::to_value(&config) {
        let mut walk = Walk::default();
        walk.compare(&value, &known);
        problems.append(&mut walk.misshapen);
        lax.extend(summary(&walk.unknown));
    }
    let names_primary = config.node_port_addresses.iter().any(|it| it == "primary");
    config.fill_defaults();
    Ok(Document {
        config,
        names_primary,
        warning: (!lax.is_empty()).then(|| lax.join("; ")),
        problems,
    })
}

/// Returns the first document, as kube-proxy takes it, and whether something follows.
fn parse(text: &str, duplicate_keys: DuplicateKeyPolicy) -> Result<(Value, bool), String> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: MAX_DEPTH,
            max_events: 2 * MAX_NODES,
            max_nodes: MAX_NODES,
            max_total_scalar_bytes: MAX_TEXT,
        },
        duplicate_keys: duplicate_keys,
        // `yes` and `on` are truth values, as in the YAML of Kubernetes.
        strict_booleans: false,
        non_finite_float_policy: NonFiniteFloatPolicy::AsString,
        with_snippet: false,
        emit_comments: false,
    };
    let mut bytes = text.as_bytes();
    let mut documents = serde_saphyr::read_with_options::<_, Value>(&mut bytes, options);
    let first = documents.next().unwrap_or(Ok(Value::Null)).map_err(|error| {
        let line = error.location().map_or(1, |at| at.line());
        let formatter = UserMessageFormatter.with_localizer(&WithoutPlace);
        let message = error.render_with_formatter(&formatter);
        let printable = |c: char| if c.is_control() { ' ' } else { c };
        let message: String = message.chars().take(MAX_MESSAGE).map(printable).collect();
        format!("line {line}: {message}")
    })?;
    let has_more = documents.next().is_some_and(|next| !matches!(next, Ok(Value::Null)));
    Ok((first, has_more))
}

/// Formats messages without positions, because the position is printed in front.
struct WithoutPlace;

impl Localizer for WithoutPlace {
    fn attach_location<'a>(&self, base: Cow<'a, str>, _: Location) -> Cow<'a, str> {
        base
    }
}

/// Removes `null` values, which mean the same as absent ones in Kubernetes.
fn remove_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(remove_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(remove_nulls),
        _ => {}
    }
}

/// Checks that a file names its version and kind.
fn identity(value: &Value) -> Vec<Problem> {
    let expected = [("apiVersion", API_VERSION), ("kind", KIND)];
    expected
        .iter()
        .filter(|(field, expected)| value.get(field).is_none_or(|is| is != expected))
        .map(|(field, expected)| match value.get(field) {
            Some(Value::String(is)) => Problem::new(*field, is, format!("must be {expected}")),
            Some(is) => Problem::new(*field, is, format!("must be {expected}")),
            None => Problem {
                place: (*field).to_owned(),
                value: String::new(),
                reason: format!("is missing: must be {expected}"),
            },
        })
        .collect()
}

/// Reads the fields. Each value of a wrong type is recorded and removed, so that the next one is
/// found.
fn typed(mut value: Value) -> (KubeProxyConfiguration, Vec<Problem>) {
    let mut problems = Vec::new();
    loop {
        let error = match serde_path_to_error::deserialize(&value) {
            Ok(config) => return (config, problems),
            Err(error) => error,
        };
        let path: Vec<_> = error.path().iter().cloned().collect();
        let reason = format!("must be {}", expected(&error.inner().to_string()));
        let found = take(&mut value, &path);
        problems.push(Problem {
            place: place(&path),
            value: found.as_ref().map_or_else(String::new, shape),
            reason,
        });
        if problems.len() == MAX_NAMED || found.is_none() {
            return (KubeProxyConfiguration::default(), problems);
        }
    }
}

/// Returns a path in printed form, such as `nodePortAddresses[1]`.
fn place(path: &[Segment]) -> String {
    let mut place = String::new();
    for part in path {
        match part {
            Segment::Map { key } if place.is_empty() => place.push_str(&shown(key)),
            Segment::Map { key } => place.push_str(&format!(".{}", shown(key))),
            Segment::Seq { index } => place.push_str(&format!("[{index}]")),
            Segment::Enum { .. } | Segment::Unknown => {}
        }
    }
    place
}

/// Removes a value from a tree. If the value is inside a list, the whole list is removed, so that
/// no other item gets its index. Returns the value alone.
fn take(value: &mut Value, path: &[Segment]) -> Option<Value> {
    let keys: Vec<_> = path
        .iter()
        .map_while(|part| match part {
            Segment::Map { key } => Some(key),
            _ => None,
        })
        .collect();
    let (last, parents) = keys.split_last()?;
    let parent = parents.iter().try_fold(value, |value, key| value.get_mut(key.as_str()))?;
    let taken = parent.as_object_mut()?.remove(last.as_str())?;
    path.iter().skip(keys.len()).try_fold(taken, |value, part| match (value, part) {
        (Value::Array(mut items), Segment::Seq { index }) => {
            (*index < items.len()).then(|| items.swap_remove(*index))
        }
        (Value::Object(mut fields), Segment::Map { key }) => fields.remove(key),
        _ => None,
    })
}

/// Returns the type that serde expected, in YAML's terms.
fn expected(message: &str) -> &str {
    let expected = message.split_once("expected ").map_or(message, |(_, e)| e);
    match expected {
        "a boolean" => "true or false",
        "a string" => "text (in quotes)",
        "a sequence" => "a list",
        "a map" => "a mapping",
        "i32" => "a whole number from -2147483648 to 2147483647",
        "u32" => "a whole number from 0 to 4294967295",
        "f64" => "a number",
        _ if expected.starts_with("struct ") => "a mapping",
        _ => expected,
    }
}

/// Describes a value in an error; lists and mappings by their type only.
fn shape(value: &Value) -> String {
    match value {
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "a mapping".to_owned(),
        // Quotes distinguish the text "5" from the number 5.
        Value::String(text) => match shown(text) {
            quoted if quoted.starts_with('"') => quoted,
            plain => format!("{plain:?}"),
        },
        other => other.to_string(),
    }
}

/// A walk through a file and, in parallel, its decoded form, which has all fields that exist.
#[derive(Debug, Default)]
struct Walk {
    path: String,
    unknown: Vec<String>,
    /// Lists in the place of mappings: serde takes them for mappings without names.
    misshapen: Vec<Problem>,
}

impl Walk {
    fn compare(&mut self, said: &Value, known: &Value) {
        let length = self.path.len();
        match (said, known) {
            (Value::Object(said), Value::Object(known)) => {
                for (field, value) in said {
                    let dot = if length == 0 { "" } else { "." };
                    self.path.push_str(&format!("{dot}{}", shown(field)));
                    match known.get(field) {
                        Some(inner) => self.compare(value, inner),
                        None => {
                            let hint = similar(field, known);
                            self.unknown.push(format!("{}{hint}", self.path));
                        }
                    }
                    self.path.truncate(length);
                }
            }
            (Value::Array(said), Value::Array(known)) => {
                for (index, (value, inner)) in said.iter().zip(known).enumerate() {
                    self.path.push_str(&format!("[{index}]"));
                    self.compare(value, inner);
                    self.path.truncate(length);
                }
            }
            (Value::Array(_), Value::Object(_)) => {
                self.misshapen.push(Problem {
                    place: self.path.clone(),
                    value: String::new(),
                    reason: "must be a mapping, not a list".to_owned(),
                });
            }
            _ => {}
        }
    }
}

/// Returns the field that was probably meant.
fn similar(field: &str, known: &Map<String, Value>) -> String {
    let meant = known.keys().find(|name| name.eq_ignore_ascii_case(field));
    meant.map_or_else(String::new, |name| format!(" (did you mean {name}?)"))
}

fn summary(unknown: &[String]) -> Option<String> {
    let fields = if unknown.len() == 1 { "field" } else { "fields" };
    let names = listed(unknown);
    (!unknown.is_empty()).then(|| format!("unknown {fields} ignored: {names}"))
}

#[cfg(test)]
mod tests;
