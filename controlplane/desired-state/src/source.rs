//! Sources of objects. Every source produces the same events; no code behind this module knows
//! which source produced them.
//!
//! A resync is an ordinary sequence of events: `Init`, `InitApply`*, `InitDone` replaces all
//! earlier events of the source about a kind. A consumer must not drop anything before `InitDone`,
//! because absence is not deletion (invariant: absence). `Apply` and `Delete` in
//! between are single changes. A source that remembers its earlier events passes on only the
//! differences of a later list. Objects that the list lacks have `Vanished`, which is believed less
//! than a `Delete`.
//!
//! One `Vanished` names all objects that a list lacks, so the index judges them as one step. A part that holds
//! something back (the index, an agent) asks the source for another list through `Upstream::look_again`.

// Bytes and texts from outside must not end the program.
#![deny(clippy::indexing_slicing)]

mod issue_log;
pub mod kubernetes;
pub mod manifests;
pub mod upstream;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use kplane_model::Issue;
use tokio::sync::mpsc;

use crate::freshness::Versions;
use crate::k8s::{Kind, Object, ObjectId};

/// An object and its human-readable place, such as `shop.yaml, document 2, line 14`; empty when the
/// source has no places.
#[derive(Clone, Debug, PartialEq)]
pub struct Located {
    /// The object.
    pub object: Object,
    /// The place.
    pub location: Arc<str>,
}

/// An event of a source.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A complete list of a kind begins.
    Init(Kind),
    /// One object of the list.
    InitApply(Box<Located>),
    /// The list is complete: objects of the kind that were not named are gone.
    InitDone(Kind),
    /// An object is new or changed.
    Apply(Box<Located>),
    /// An object is gone: its origin named it as deleted.
    Delete(ObjectId),
    /// Objects that one read of the origin did not find any more. They come in one event, so that
    /// the size of the loss can be judged.
    Vanished(Vec<ObjectId>),
    /// Another, later list of a kind is complete, and all its objects have been passed on. Objects
    /// that vanished before and are not back have now been missing twice.
    Looked(Kind),
    /// All current problems of the input that belong to no object; replaces the earlier list. The
    /// problems of an API server are in [`upstream::Upstream`].
    Issues(Vec<Issue>),
    /// Addresses of the source's origin, if it is an API server; replaces the earlier ones.
    ApiServer(BTreeSet<SocketAddr>),
    /// All current reasons why unknown objects may exist, human-readable; replaces the earlier
    /// ones.
    Doubts(Vec<String>),
    /// All changes of a kind up to a version have been passed on.
    Version(Kind, Versions),
    /// Nothing changed, but the source is in touch with its origin (upstream freshness).
    Alive,
}

/// Events that belong together: they become one revision.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// The events, in order.
    pub events: Vec<Event>,
    /// Time at which the source learnt of the first of them.
    pub observed_at: SystemTime,
}

/// Number of batches that a source may be ahead of the index before it waits. Sources hold the
/// latest state themselves, so waiting loses nothing.
pub const QUEUE: usize = 64;

/// A producer of objects. Runs until its consumer goes away.
pub trait Source: Send + 'static {
    /// Produces batches. Returns when `sink` is closed, or with an error from which a restart of
    /// the process would not recover.
    fn run(self, sink: mpsc::Sender<Batch>)
    -> impl Future<Output = Result<(), SourceError>> + Send;
}

/// An error after which a source cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The configured access to the API server does not work.
    #[error(transparent)]
    Access(#[from] crate::kubernetes::AccessError),
    /// The folder or file of manifests cannot be read at all.
    #[error("cannot read manifests at {path}; check the path and its permissions")]
    Unreadable {
        /// The configured path.
        path: String,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// The kernel refuses to watch for changes.
    #[error("cannot watch {path} for changes; check fs.inotify.max_user_watches")]
    Unwatchable {
        /// The configured path.
        path: String,
        /// The kernel's error.
        source: std::io::Error,
    },
}
