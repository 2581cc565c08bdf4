//! Where objects come from. Every source produces the same events; nothing behind this module
//! knows which source it was.
//!
//! Resync is an ordinary event: `Init`, `InitApply`*, `InitDone` replaces everything that the
//! source said of a kind before, and a consumer must not drop anything before `InitDone` (design
//! invariant 3: absence is not deletion). Between those, `Apply` and `Delete` are single changes. A
//! source that knows what it said before tells only the differences of a later list, as such: what the
//! list lacks has `Vanished`, which is believed less than a `Delete`.

pub mod kubernetes;
pub mod manifests;
pub mod upstream;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use kplane_model::Issue;
use tokio::sync::mpsc;

use crate::k8s::{Kind, Object, ObjectId};

/// An object and the place where a person finds it, such as `shop.yaml, document 2, line 14`;
/// empty when the source has no places.
#[derive(Clone, Debug, PartialEq)]
pub struct Located {
    /// The object.
    pub object: Object,
    /// The place.
    pub location: Arc<str>,
}

/// One thing that a source says.
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
    /// An object is gone: its origin said so, by its name.
    Delete(ObjectId),
    /// Objects that a look at the origin found no more; all that one look lacks, so that it can be
    /// judged how much that is.
    Vanished(Vec<ObjectId>),
    /// Another, later look at all of a kind is complete, and everything that it shows has been told:
    /// what vanished before and is not back has vanished twice.
    Looked(Kind),
    /// All problems of the source's own at the moment; replaces the list it gave before.
    Issues(Vec<Issue>),
    /// Where the source's origin listens, if it is an API server; replaces what it said before.
    ApiServer(BTreeSet<SocketAddr>),
    /// All reasons at the moment why objects may be there that were never told, for people; replaces
    /// those before.
    Doubts(Vec<String>),
    /// Nothing changed, but the source is in touch with its origin (upstream freshness).
    Alive,
}

/// Events that belong together: they become one revision.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// The events, in order.
    pub events: Vec<Event>,
    /// When the source learnt of the first of them.
    pub observed_at: SystemTime,
}

/// Batches that a source may be ahead of the index before it waits. Sources hold the latest state
/// themselves, so waiting loses nothing.
pub const QUEUE: usize = 64;

/// A producer of objects. Runs until its consumer goes away.
pub trait Source: Send + 'static {
    /// Produces batches; returns when `sink` is closed, or with an error that a restart of the
    /// process would not heal.
    fn run(self, sink: mpsc::Sender<Batch>)
    -> impl Future<Output = Result<(), SourceError>> + Send;
}

/// A source that cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// There is no way to the API server.
    #[error(transparent)]
    Access(#[from] crate::kubernetes::AccessError),
    /// The folder or file of manifests cannot be read at all.
    #[error("cannot read manifests at {path}; check the path and its permissions")]
    Unreadable {
        /// What was asked for.
        path: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The kernel refuses to watch for changes.
    #[error("cannot watch {path} for changes; raise fs.inotify.max_user_watches?")]
    Unwatchable {
        /// What was asked for.
        path: String,
        /// Why it failed.
        source: std::io::Error,
    },
}
