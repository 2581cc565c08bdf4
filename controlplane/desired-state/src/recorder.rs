//! The flight recorder: a bounded record of what changed, and of what the control plane noticed.
//!
//! The owner of the index adds a change after streams have it, so no node waits for the record. Reading it
//! costs something only when an operator asks. When nodes had a change is not recorded here: the fleet knows when each
//! node reached which revision (`controlplane/agents/src/fleet/progress.rs`).

mod changes;
mod noticed;
#[cfg(test)]
mod tests;

pub use changes::{Change, Found};
pub use noticed::{Notice, NoticeKind};
use parking_lot::Mutex;

use std::time::SystemTime;

use kplane_model::ServiceName;

use crate::index::Causes;
use crate::publish::ServiceChange;

use self::changes::Changes;
use self::noticed::Notices;

/// The record.
#[derive(Debug, Default)]
pub struct Recorder {
    changes: Mutex<Changes>,
    notices: Mutex<Notices>,
}

/// The size of the record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Number of changes.
    pub changes: usize,
    /// Number of events.
    pub notices: usize,
    /// Memory of both, in bytes; an estimate from above.
    pub bytes: usize,
}

impl Recorder {
    /// Records one publication: the ServicePorts that changed, and the causes.
    pub fn changed(&self, touched: &[ServiceChange], causes: &Causes, observed_at: SystemTime) {
        self.changes.lock().add(touched, causes, observed_at, SystemTime::now());
    }

    /// Returns the latest changes of a Service, newest first.
    pub fn of(&self, service: &ServiceName, limit: usize) -> Found {
        self.changes.lock().of(service, limit)
    }

    /// Records that the control plane noticed something.
    pub fn notice(&self, kind: NoticeKind, object: String, text: String) {
        self.notices.lock().add(kind, object, text, SystemTime::now());
    }

    /// Returns the newest events after a number, oldest first, and the time from which on the record is complete.
    pub fn noticed(&self, after: u64, limit: usize) -> (Vec<Notice>, u64) {
        self.notices.lock().after(after, limit)
    }

    /// Returns the size of the record.
    pub fn size(&self) -> Size {
        let (changes, of_changes) = self.changes.lock().size();
        let (notices, of_notices) = self.notices.lock().size();
        Size {
            changes,
            notices,
            bytes: of_changes + of_notices,
        }
    }
}
