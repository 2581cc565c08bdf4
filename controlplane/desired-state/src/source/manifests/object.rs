//! Conversion of a tree of nodes to objects and problems: selects the kinds that kplane reads, and
//! opens Lists.

use std::sync::Arc;

use kplane_model::{ObjectRef, Severity};

use super::decode::{DecodeError, decode};
use super::tree::{SyntaxError, Value, YamlNode};
use crate::k8s::{Kind, Object, ObjectId};

/// An object or a problem.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ParsedItem {
    Object(ObjectId, Arc<Object>),
    Problem(Problem),
}

/// A part of the input that is not served as written.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Problem {
    pub(super) severity: Severity,
    pub(super) object: ObjectRef,
    pub(super) reason: String,
    pub(super) keeps: Keeps,
}

/// The objects of the file that a problem may be about, which must not be deleted.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Keeps {
    /// No objects: the document is understood, and kplane does not read its kind.
    Nothing,
    /// This object.
    Object(ObjectId),
    /// All objects of the file.
    All,
}

/// A result of parsing a piece of text; lines count from the piece's first.
#[derive(Clone, Debug)]
pub(super) struct ParsedEntry {
    pub(super) item: Option<usize>,
    pub(super) line: usize,
    pub(super) found: ParsedItem,
}

/// Interprets the one item of a piece that was cut out of a List.
pub(super) fn interpret_item(node: &YamlNode, defaults: Defaults<'_>) -> Vec<ParsedEntry> {
    let mut entries = Vec::new();
    match &node.value {
        Value::List(items) => {
            for item in items {
                interpret_into(item, None, defaults, &mut entries);
            }
        }
        _ => interpret_into(node, None, defaults, &mut entries),
    }
    entries
}

pub(super) fn interpret(node: &YamlNode) -> Vec<ParsedEntry> {
    let mut entries = Vec::new();
    interpret_into(node, None, Defaults::default(), &mut entries);
    entries
}

/// Default fields of the items of a typed list such as `ServiceList`.
#[derive(Clone, Copy, Debug, Default, Hash)]
pub(super) struct Defaults<'n> {
    kind: Option<Kind>,
    api_version: Option<&'n str>,
}

/// Returns the defaults of a list's items if a kind is a list that may hold kinds that kplane
/// reads.
pub(super) fn list_of<'n>(kind: &str, node: &'n YamlNode) -> Option<Defaults<'n>> {
    let of = kind.strip_suffix("List")?;
    if of.is_empty() {
        return Some(Defaults::default());
    }
    Some(Defaults {
        kind: Some(Kind::WITH_POLICIES.into_iter().find(|kind| kind.as_str() == of)?),
        api_version: node.text("apiVersion"),
    })
}

fn interpret_into(
    node: &YamlNode,
    item: Option<usize>,
    defaults: Defaults<'_>,
    entries: &mut Vec<ParsedEntry>,
) {
    if node.value == Value::Null {
        return;
    }
    let kind = node.text("kind").or(defaults.kind.map(Kind::as_str));
    let Some(lists) = kind.and_then(|kind| list_of(kind, node)) else {
        let (line, found) = match object(node, kind, defaults) {
            Ok((id, object)) => (node.line, ParsedItem::Object(id, Arc::new(object))),
            Err(refusal) => (refusal.line, ParsedItem::Problem(refusal.problem)),
        };
        entries.push(ParsedEntry { item, line, found });
        return;
    };
    match node.get("items").map(|items| &items.value) {
        None => {}
        Some(Value::List(items)) => {
            for (index, inner) in items.iter().enumerate() {
                interpret_into(inner, item.or(Some(index + 1)), lists, entries);
            }
        }
        Some(_) => entries.push(ParsedEntry {
            item,
            line: node.line,
            found: ParsedItem::Problem(Problem {
                severity: Severity::Error,
                object: named(kind.unwrap_or_default(), None),
                reason: "items must be a list; correct it".to_owned(),
                keeps: Keeps::All,
            }),
        }),
    }
}

/// The reason why a document is not an object that kplane reads.
struct Refusal {
    line: usize,
    problem: Problem,
}

impl Refusal {
    fn new(line: usize, object: ObjectRef, reason: String, keeps: Keeps) -> Box<Self> {
        let severity = match keeps {
            Keeps::Nothing => Severity::Warning,
            Keeps::Object(_) | Keeps::All => Severity::Error,
        };
        Box::new(Self {
            line,
            problem: Problem {
                severity,
                object,
                reason,
                keeps,
            },
        })
    }
}

fn object(
    node: &YamlNode,
    kind: Option<&str>,
    defaults: Defaults<'_>,
) -> Result<(ObjectId, Object), Box<Refusal>> {
    let refuse = |object, reason, keeps| Refusal::new(node.line, object, reason, keeps);
    let Some(written) = kind else {
        let reason = "has no kind; a document is an object with apiVersion, kind and metadata";
        return Err(refuse(named("", None), reason.to_owned(), Keeps::All));
    };
    let metadata = node.get("metadata");
    let api_version = node.text("apiVersion").or(defaults.api_version);
    let kind = Kind::WITH_POLICIES.into_iter().find(|kind| kind.as_str() == written);
    let kind =
        kind.filter(|kind| api_version.is_none_or(|v| group(v) == group(kind.api_version())));
    let Some(kind) = kind else {
        let reason = "is ignored; kplane reads Services, EndpointSlices, Nodes, ServiceCIDRs, NetworkPolicies, \
                      ClusterNetworkPolicies, Namespaces and Pods";
        return Err(refuse(
            named(written, metadata),
            reason.to_owned(),
            Keeps::Nothing,
        ));
    };
    let id = identity(kind, metadata);
    let object = || ObjectRef {
        kind: written.to_owned(),
        namespace: id.as_ref().map_or_else(String::new, |id| id.namespace.to_string()),
        name: id.as_ref().map_or_else(String::new, |id| id.name.to_string()),
    };
    let keeps = || id.clone().map_or(Keeps::All, Keeps::Object);
    if !api_version.is_some_and(|version| kind.reads(version)) {
        let reason = match api_version {
            None => format!("has no apiVersion; write {}", kind.api_version()),
            Some(other) => format!(
                "has the unsupported apiVersion {other:?}; use {}",
                kind.api_version()
            ),
        };
        return Err(refuse(object(), reason, keeps()));
    }
    match decode_as(kind, node) {
        Err(error) => {
            let reason = format!("{error}; {}", error.cure());
            Err(Refusal::new(error.line, object(), reason, keeps()))
        }
        Ok(decoded) if id.is_none() => {
            let (name, namespace) = (&decoded.metadata().name, &decoded.metadata().namespace);
            let reason = format!(
                "metadata has the name {name:?} and the namespace {:?}; use lower-case letters, \
                 digits, - and .",
                namespace.as_deref().unwrap_or_default()
            );
            Err(refuse(object(), reason, Keeps::All))
        }
        Ok(decoded) => Ok((decoded.id(), decoded)),
    }
}

fn decode_as(kind: Kind, node: &YamlNode) -> Result<Object, DecodeError> {
    Ok(match kind {
        Kind::Service => Object::Service(decode(node)?),
        Kind::EndpointSlice => Object::EndpointSlice(decode(node)?),
        Kind::Node => Object::Node(decode(node)?),
        Kind::ServiceCidr => Object::ServiceCidr(decode(node)?),
        Kind::NetworkPolicy => Object::NetworkPolicy(decode(node)?),
        Kind::Namespace => Object::Namespace(decode(node)?),
        Kind::Pod => Object::Pod(decode(node)?),
        Kind::ClusterNetworkPolicy => Object::ClusterNetworkPolicy(decode(node)?),
    })
}

/// Returns the group of an `apiVersion`: a `Service` of another group is another kind.
fn group(api_version: &str) -> &str {
    api_version.rsplit_once('/').map_or("", |(group, _)| group)
}

/// Returns the identity of an object, even if the object cannot be decoded; `None` without a valid
/// name.
fn identity(kind: Kind, metadata: Option<&YamlNode>) -> Option<ObjectId> {
    let name = metadata?.text("name").filter(|name| is_name(name))?;
    let namespace =
        metadata?.text("namespace").filter(|text| !text.is_empty()).unwrap_or("default");
    Some(ObjectId {
        kind,
        namespace: if !kind.is_namespaced() {
            "".into()
        } else if is_name(namespace) {
            namespace.into()
        } else {
            return None;
        },
        name: name.into(),
    })
}

/// Returns whether a name is a DNS name as the API server requires it. Names are displayed, so
/// nothing else may pass.
fn is_name(name: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    (1..=253).contains(&name.len()) && name.bytes().all(allowed)
}

/// Returns a reference to an object that was not decoded.
fn named(kind: &str, metadata: Option<&YamlNode>) -> ObjectRef {
    let text = |field| metadata.and_then(|m| m.text(field)).filter(|t| is_name(t));
    let printable = kind.len() <= 63 && kind.bytes().all(|b| b.is_ascii_alphanumeric());
    ObjectRef {
        kind: if printable { kind.to_owned() } else { "object of an unknown kind".to_owned() },
        namespace: text("namespace").unwrap_or_default().to_owned(),
        name: text("name").unwrap_or_default().to_owned(),
    }
}

pub(super) fn syntax_problem(language: &str, error: &SyntaxError) -> ParsedEntry {
    ParsedEntry {
        item: None,
        line: error.line,
        found: ParsedItem::Problem(Problem {
            severity: Severity::Error,
            object: named("", None),
            reason: format!("is not valid {language}: {error}"),
            keeps: Keeps::All,
        }),
    }
}

impl ParsedEntry {
    pub(super) fn is_syntax_problem(&self) -> bool {
        matches!(&self.found, ParsedItem::Problem(problem) if problem.object.kind.is_empty())
    }
}
