//! What the state machine asks of an API server, and what it hears. HTTP behind it, or a script.

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

impl Unreadable {
    pub(super) fn is(&self, id: &ObjectId) -> bool {
        (&self.namespace, &self.name) == (&id.namespace, &id.name)
    }
}

/// A page of a consistent list: as new as the server has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PageRequest {
    /// At most so many objects; 0 = all.
    pub(super) limit: u32,
    /// The page after another one.
    pub(super) next: Option<String>,
}

/// The answer.
#[derive(Debug, Default)]
pub(super) struct Page {
    /// The state that the whole list, not only this page, shows.
    pub(super) version: u64,
    pub(super) next: Option<String>,
    pub(super) objects: Vec<Object>,
    pub(super) unreadable: Vec<Unreadable>,
}

/// Where a watch begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WatchFrom {
    /// With a complete list, as new as the server has it: a streaming list.
    Everything,
    /// After a state that is known.
    Version(u64),
}

/// What a watch says.
#[derive(Clone, Debug, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "nearly all are objects, and they are few at a time"
)]
pub(super) enum Said {
    /// New or changed.
    Put(Object, u64),
    /// Gone.
    Gone(ObjectId, u64),
    /// There, but nobody can read it.
    Unreadable(Unreadable, u64),
    /// Nothing happened up to a state.
    Bookmark {
        /// The state.
        version: u64,
        /// The list that a streaming list begins with is complete.
        initial_end: bool,
    },
}

/// A way to the API server for one resource.
pub(super) trait Transport: Send {
    /// An open watch.
    type Watch: Watch;

    /// What is asked for.
    fn resource(&self) -> &Resource;

    /// Asks for something else from now on.
    fn set_resource(&mut self, resource: Resource);

    /// Fetches a page.
    fn page(&mut self, request: &PageRequest)
    -> impl Future<Output = Result<Page, Failure>> + Send;

    /// Opens a watch.
    fn watch(
        &mut self,
        from: WatchFrom,
    ) -> impl Future<Output = Result<Self::Watch, Failure>> + Send;

    /// The last failure had to do with who we are: read that again.
    fn renew(&mut self) -> impl Future<Output = ()> + Send;

    /// The address of the server, for people.
    fn server(&self) -> String;
}

/// An open watch.
pub(super) trait Watch: Send {
    /// What is there to hear, at least one thing; `None` at its end. May be cancelled at any time
    /// without losing anything.
    fn next(&mut self) -> impl Future<Output = Result<Option<Vec<Said>>, Failure>> + Send;
}
