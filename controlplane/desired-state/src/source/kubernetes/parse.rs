//! Parsing of an API server's JSON and protobuf into slim objects: other fields are never copied.
//!
//! An object that cannot be read is reported by name; the others of the same answer are served.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::endpoints::LegacyEndpoints;
use super::protobuf::{self, Message};
use super::resource::Resource;
use super::transport::Unreadable;
use kplane_model::one_line;

use crate::k8s::Object;
use crate::kubernetes::Failure;

/// The content of an answer for one object.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "nearly all are objects, and they are few at a time"
)]
pub(super) enum Read {
    Object(Object),
    Endpoints(LegacyEndpoints),
}

impl Read {
    /// Returns the object's version; 0 = unknown.
    fn version(&self) -> u64 {
        let metadata = match self {
            Self::Object(object) => object.metadata(),
            Self::Endpoints(endpoints) => &endpoints.metadata,
        };
        metadata.resource_version.number()
    }
}

/// One page of a list.
#[derive(Debug)]
pub(super) struct RawPage {
    pub(super) version: u64,
    pub(super) next: Option<String>,
    /// The newest version among the items.
    pub(super) changed: u64,
    pub(super) items: Vec<Result<Read, Unreadable>>,
}

/// One event of a watch.
#[derive(Debug)]
pub(super) enum RawEvent {
    Put(u64, Result<Read, Unreadable>),
    Gone(u64, Result<Read, Unreadable>),
    Bookmark(u64),
    Error(Failure),
}

/// The encoding of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Json,
    Protobuf,
}

/// An object that was not read yet.
#[derive(Clone, Copy)]
enum Unread<'a> {
    Json(&'a str),
    Protobuf(&'static Message, &'a [u8]),
}

impl<'a> Unread<'a> {
    fn of_json(value: &'a RawValue) -> Self {
        Self::Json(value.get())
    }

    fn read<T: Deserialize<'a>>(self) -> Result<T, String> {
        match self {
            Self::Json(text) => serde_json::from_str(text).map_err(|error| error.to_string()),
            Self::Protobuf(message, bytes) => {
                protobuf::read(message, bytes).map_err(|error| error.to_string())
            }
        }
    }
}

#[derive(Deserialize)]
struct ListPage<T> {
    metadata: ListMeta,
    items: Option<Vec<T>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMeta {
    resource_version: String,
    #[serde(rename = "continue", default)]
    next: Option<String>,
}

#[derive(Deserialize)]
struct JsonEvent<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct ProtobufEvent<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: RawExtension<'a>,
}

#[derive(Deserialize)]
struct RawExtension<'a> {
    raw: &'a [u8],
}

/// The fields that every object has.
#[derive(Deserialize)]
struct Peek {
    metadata: PeekMeta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[derive(Default)]
struct PeekMeta {
    name: Arc<str>,
    namespace: Arc<str>,
    resource_version: String,
}

/// `metav1.Status`.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Status {
    pub(super) message: String,
    pub(super) code: u16,
}

/// Parses a page of a list.
///
/// # Errors
/// [`Failure::Malformed`].
pub(super) fn page(
    resource: &Resource,
    encoding: Encoding,
    body: &[u8],
) -> Result<RawPage, Failure> {
    match encoding {
        Encoding::Json => {
            let page = serde_json::from_slice(body).map_err(malformed)?;
            objects(resource, page, Unread::of_json)
        }
        Encoding::Protobuf => {
            let message = message(resource)?;
            let list = protobuf::unwrap(body).map_err(malformed)?;
            let page = protobuf::read(&protobuf::LIST, list).map_err(malformed)?;
            objects(resource, page, |bytes| Unread::Protobuf(message, bytes))
        }
    }
}

fn objects<'a, T>(
    resource: &Resource,
    page: ListPage<T>,
    raw: impl Fn(T) -> Unread<'a>,
) -> Result<RawPage, Failure> {
    let mut changed = 0;
    let items = page
        .items
        .into_iter()
        .flatten()
        .map(raw)
        .map(|raw| {
            let object = object(resource, raw);
            changed = changed.max(version_of(raw, &object).unwrap_or(0));
            object
        })
        .collect();
    Ok(RawPage {
        version: version(&page.metadata.resource_version)?,
        changed,
        next: page.metadata.next.filter(|next| !next.is_empty()),
        items,
    })
}

/// Parses an event of a watch: a line of JSON, or a frame of protobuf. `None` for unknown types of events.
///
/// # Errors
/// [`Failure::Malformed`].
pub(super) fn event(
    resource: &Resource,
    encoding: Encoding,
    bytes: &[u8],
) -> Result<Option<RawEvent>, Failure> {
    match encoding {
        Encoding::Json => {
            let event: JsonEvent<'_> = serde_json::from_slice(bytes).map_err(malformed)?;
            line(resource, event.kind, Unread::of_json(event.object))
        }
        Encoding::Protobuf => {
            let event: ProtobufEvent<'_> =
                protobuf::read(&protobuf::WATCH_EVENT, bytes).map_err(malformed)?;
            let object = protobuf::unwrap(event.object.raw).map_err(malformed)?;
            let message = match event.kind {
                "ERROR" => &protobuf::STATUS,
                _ => message(resource)?,
            };
            line(resource, event.kind, Unread::Protobuf(message, object))
        }
    }
}

fn line(resource: &Resource, kind: &str, raw: Unread<'_>) -> Result<Option<RawEvent>, Failure> {
    let read = || -> Result<_, Failure> {
        let object = object(resource, raw);
        Ok((version_of(raw, &object)?, object))
    };
    Ok(Some(match kind {
        "ADDED" | "MODIFIED" => {
            let (version, object) = read()?;
            RawEvent::Put(version, object)
        }
        "DELETED" => {
            let (version, object) = read()?;
            RawEvent::Gone(version, object)
        }
        "BOOKMARK" => RawEvent::Bookmark(peeked_version(raw)?),
        "ERROR" => {
            let status: Status = raw.read().unwrap_or_default();
            RawEvent::Error(Failure::of_status(status.code, &status.message, None))
        }
        _ => return Ok(None),
    }))
}

/// Parses the explanation of an error; an empty one where it cannot be read.
pub(super) fn status(encoding: Encoding, body: &[u8]) -> Status {
    let read = match encoding {
        Encoding::Json => serde_json::from_slice(body).ok(),
        Encoding::Protobuf => protobuf::unwrap(body)
            .and_then(|status| protobuf::read(&protobuf::STATUS, status))
            .ok(),
    };
    read.unwrap_or_default()
}

/// Returns what is known of a resource's protobuf. kplane asks for it only where it is known.
fn message(resource: &Resource) -> Result<&'static Message, Failure> {
    let unexpected = || malformed("protobuf, which was not asked for");
    resource.message().ok_or_else(unexpected)
}

fn object(resource: &Resource, raw: Unread<'_>) -> Result<Read, Unreadable> {
    let read = match resource {
        Resource::Services => raw.read().map(|o| Read::Object(Object::Service(o))),
        Resource::Slices => raw.read().map(|o| Read::Object(Object::EndpointSlice(o))),
        Resource::Nodes(_) => raw.read().map(|o| Read::Object(Object::Node(o))),
        Resource::ServiceCidrs => raw.read().map(|o| Read::Object(Object::ServiceCidr(o))),
        Resource::NetworkPolicies => raw.read().map(|o| Read::Object(Object::NetworkPolicy(o))),
        Resource::ClusterPolicies { .. } => {
            let policy = raw.read();
            policy.map(|o| Read::Object(Object::ClusterNetworkPolicy(o)))
        }
        Resource::Namespaces => raw.read().map(|o| Read::Object(Object::Namespace(o))),
        Resource::Pods => raw.read().map(|o| Read::Object(Object::Pod(o))),
        Resource::Endpoints => raw.read().map(Read::Endpoints),
    };
    read.map_err(|reason| {
        let peek: Option<Peek> = raw.read().ok();
        let metadata = peek.map(|peek| peek.metadata).unwrap_or_default();
        Unreadable {
            namespace: metadata.namespace,
            name: metadata.name,
            reason: one_line(&reason),
        }
    })
}

/// Returns the version of an object. Only one that could not be read, or says none, is read again for it.
fn version_of(raw: Unread<'_>, object: &Result<Read, Unreadable>) -> Result<u64, Failure> {
    match object.as_ref().map_or(0, Read::version) {
        0 => peeked_version(raw),
        version => Ok(version),
    }
}

fn peeked_version(raw: Unread<'_>) -> Result<u64, Failure> {
    let peek: Peek = raw.read().map_err(malformed)?;
    version(&peek.metadata.resource_version)
}

/// Parses a resource version; they are numbers, and comparable (KEP-5504).
fn version(text: &str) -> Result<u64, Failure> {
    let parsed = text.parse();
    parsed.map_err(|_| Failure::Malformed(format!("resourceVersion {:?}", one_line(text))))
}

#[expect(clippy::needless_pass_by_value, reason = "handed to map_err")]
fn malformed(error: impl ToString) -> Failure {
    Failure::Malformed(one_line(&error.to_string()))
}

#[cfg(test)]
mod tests;
