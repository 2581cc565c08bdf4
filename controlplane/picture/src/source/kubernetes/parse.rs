//! Parsing of an API server's JSON into slim objects: other fields are never copied.
//!
//! An object that cannot be read is reported by name; the others of the same answer are served.

use std::sync::Arc;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::endpoints::LegacyEndpoints;
use super::resource::Resource;
use super::transport::Unreadable;
use kplane_model::one_line;

use crate::k8s::Object;
use crate::kubernetes::Failure;

/// Annotation of the bookmark that ends the first part of a streaming list.
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

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

/// One page of a list.
#[derive(Debug)]
pub(super) struct RawPage {
    pub(super) version: u64,
    pub(super) next: Option<String>,
    /// The newest version among the items.
    pub(super) changed: u64,
    pub(super) items: Vec<Result<Read, Unreadable>>,
}

/// One line of a watch.
#[derive(Debug)]
pub(super) enum Line {
    Put(u64, Result<Read, Unreadable>),
    Gone(u64, Result<Read, Unreadable>),
    Bookmark { version: u64, initial_end: bool },
    Error(Failure),
}

#[derive(Deserialize)]
struct ListPage<'a> {
    metadata: ListMeta,
    #[serde(borrow, default)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMeta {
    resource_version: String,
    #[serde(rename = "continue", default)]
    next: Option<String>,
}

#[derive(Deserialize)]
struct WatchLine<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
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

#[derive(Deserialize)]
struct Bookmark {
    metadata: BookmarkMeta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BookmarkMeta {
    resource_version: String,
    #[serde(default)]
    annotations: Option<std::collections::BTreeMap<String, String>>,
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
pub(super) fn page(resource: &Resource, body: &[u8]) -> Result<RawPage, Failure> {
    let page: ListPage<'_> = serde_json::from_slice(body).map_err(malformed)?;
    let items = page.items.unwrap_or_default();
    let version_of = |raw: &&RawValue| {
        let peek: Peek = serde_json::from_str(raw.get()).ok()?;
        version(&peek.metadata.resource_version).ok()
    };
    Ok(RawPage {
        version: version(&page.metadata.resource_version)?,
        changed: items.iter().filter_map(version_of).max().unwrap_or(0),
        next: page.metadata.next.filter(|next| !next.is_empty()),
        items: items.into_iter().map(|raw| object(resource, raw)).collect(),
    })
}

/// Parses a line of a watch; `None` for unknown types of events.
///
/// # Errors
/// [`Failure::Malformed`].
pub(super) fn line(resource: &Resource, text: &[u8]) -> Result<Option<Line>, Failure> {
    let line: WatchLine<'_> = serde_json::from_slice(text).map_err(malformed)?;
    let read = || -> Result<_, Failure> {
        let peek: Peek = serde_json::from_str(line.object.get()).map_err(malformed)?;
        let version = version(&peek.metadata.resource_version)?;
        Ok((version, object(resource, line.object)))
    };
    Ok(Some(match line.kind {
        "ADDED" | "MODIFIED" => {
            let (version, object) = read()?;
            Line::Put(version, object)
        }
        "DELETED" => {
            let (version, object) = read()?;
            Line::Gone(version, object)
        }
        "BOOKMARK" => {
            let mark: Bookmark = serde_json::from_str(line.object.get()).map_err(malformed)?;
            let annotations = mark.metadata.annotations.unwrap_or_default();
            let initial_end = annotations.get(INITIAL_EVENTS_END);
            Line::Bookmark {
                version: version(&mark.metadata.resource_version)?,
                initial_end: initial_end.is_some_and(|value| value == "true"),
            }
        }
        "ERROR" => {
            let status: Status = serde_json::from_str(line.object.get()).unwrap_or_default();
            Line::Error(Failure::of_status(status.code, &status.message, None))
        }
        _ => return Ok(None),
    }))
}

fn object(resource: &Resource, raw: &RawValue) -> Result<Read, Unreadable> {
    fn read<T: DeserializeOwned>(
        raw: &RawValue,
        wrap: impl FnOnce(T) -> Read,
    ) -> Result<Read, serde_json::Error> {
        serde_json::from_str(raw.get()).map(wrap)
    }
    let read = match resource {
        Resource::Services => read(raw, |o| Read::Object(Object::Service(o))),
        Resource::Slices => read(raw, |o| Read::Object(Object::EndpointSlice(o))),
        Resource::Nodes(_) => read(raw, |o| Read::Object(Object::Node(o))),
        Resource::ServiceCidrs => read(raw, |o| Read::Object(Object::ServiceCidr(o))),
        Resource::NetworkPolicies => read(raw, |o| Read::Object(Object::NetworkPolicy(o))),
        Resource::ClusterPolicies { .. } => {
            read(raw, |o| Read::Object(Object::ClusterNetworkPolicy(o)))
        }
        Resource::Namespaces => read(raw, |o| Read::Object(Object::Namespace(o))),
        Resource::Pods => read(raw, |o| Read::Object(Object::Pod(o))),
        Resource::Endpoints => read(raw, Read::Endpoints),
    };
    read.map_err(|error| {
        let peek: Option<Peek> = serde_json::from_str(raw.get()).ok();
        let metadata = peek.map(|peek| peek.metadata).unwrap_or_default();
        Unreadable {
            namespace: metadata.namespace,
            name: metadata.name,
            reason: one_line(&error.to_string()),
        }
    })
}

/// Parses a resource version; they are numbers, and comparable (KEP-5504).
fn version(text: &str) -> Result<u64, Failure> {
    let parsed = text.parse();
    parsed.map_err(|_| Failure::Malformed(format!("resourceVersion {:?}", one_line(text))))
}

#[expect(clippy::needless_pass_by_value, reason = "handed to map_err")]
fn malformed(error: serde_json::Error) -> Failure {
    Failure::Malformed(one_line(&error.to_string()))
}

#[cfg(test)]
mod tests;
