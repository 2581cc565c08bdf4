//! The state machine's interface to an API server. HTTP implements it, and a script in tests.

use std::sync::Arc;

use super::resource::Resource;
use crate::k8s::{Object, ObjectId};
use crate::kubernetes::Failure;

/// An object that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unreadable {
    pub(super) namespace: Arc<str>,
    pub(super) name: Arc<str>,
    pub(super) reason: String,
}

/// A request for a page of a consistent list, as new as the server has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PageRequest {
    /// Maximum number of objects; 0 = all.
    pub(super) limit: u32,
    /// The continue token of the previous page.
    pub(super) next: Option<String>,
}

/// A page of a list.
#[derive(Debug, Default)]
pub(super) struct ObjectPage {
    /// Resource version of the whole list, not only of this page.
    pub(super) version: u64,
    pub(super) next: Option<String>,
    /// The newest resource version among the objects of this page.
    pub(super) changed: u64,
    pub(super) objects: Vec<Object>,
    pub(super) unreadable: Vec<Unreadable>,
}

/// One event of a watch.
#[derive(Clone, Debug, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "nearly all are objects, and they are few at a time"
)]
pub(super) enum WatchEvent {
    /// The object is new or changed.
    Put(Object, u64),
    /// The object is gone.
    Gone(ObjectId, u64),
    /// The object exists, but cannot be read.
    Unreadable(Unreadable, u64),
    /// There were no events up to a resource version.
    Bookmark(u64),
}

impl WatchEvent {
    /// Returns the resource version of the event.
    pub(super) fn version(&self) -> u64 {
        match self {
            Self::Put(_, version)
            | Self::Gone(_, version)
            | Self::Unreadable(_, version)
            | Self::Bookmark(version) => *version,
        }
    }
}

/// Access to the API server for one resource.
pub(super) trait Transport: Send {
    /// An open watch.
    type Watch: Watch;

    /// Returns the current resource.
    fn resource(&self) -> &Resource;

    /// Switches to another resource.
    fn set_resource(&mut self, resource: Resource);

    /// Fetches a page.
    fn page(
        &mut self,
        request: &PageRequest,
    ) -> impl Future<Output = Result<ObjectPage, Failure>> + Send;

    /// Opens a watch of what happens after a resource version.
    fn watch(&mut self, version: u64) -> impl Future<Output = Result<Self::Watch, Failure>> + Send;

    /// Reads the credentials again, because they caused the last failure.
    fn renew(&mut self) -> impl Future<Output = ()> + Send;

    /// Returns the server's address, human-readable.
    fn server(&self) -> String;
}

/// An open watch.
pub(super) trait Watch: Send {
    /// Waits for events; returns at least one, or `None` at the end. May be cancelled at any time
    /// without losing anything.
    fn next(&mut self) -> impl Future<Output = Result<Option<Vec<WatchEvent>>, Failure>> + Send;
}
