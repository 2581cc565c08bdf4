//! The names of Services that may have changed, for watches of Services.

use std::collections::BTreeSet;
use std::sync::Arc;

use kplane_model::ServiceName;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::broadcast::{Receiver, Sender};

/// Number of changes that a slow watch may miss before it begins anew.
const CHANGES: usize = 256;

type Names = Arc<BTreeSet<ServiceName>>;

/// The sender of the names.
#[derive(Debug)]
pub struct ChangedServices(Sender<Names>);

impl Default for ChangedServices {
    fn default() -> Self {
        Self(Sender::new(CHANGES))
    }
}

/// A watch has missed changes, or the control plane ends.
pub enum Missed {
    /// The picture must begin anew.
    Some,
    /// There will be no more changes.
    All,
}

impl ChangedServices {
    /// Returns whether any watch wants the names.
    pub(super) fn is_watched(&self) -> bool {
        self.0.receiver_count() > 0
    }

    /// Passes names on. They are readable in the index.
    pub(super) fn tell(&self, names: BTreeSet<ServiceName>) {
        if !names.is_empty() {
            // Nobody may be there any more.
            drop(self.0.send(Arc::new(names)));
        }
    }

    /// Returns the changes from now on.
    pub fn follow(&self) -> Changes {
        Changes(self.0.subscribe())
    }
}

/// Changes that a watch has not read.
pub struct Changes(Receiver<Names>);

impl Changes {
    /// Waits for a change, and returns the names of all that are waiting. Nothing is lost when the future is dropped.
    pub async fn next(&mut self) -> Result<BTreeSet<ServiceName>, Missed> {
        let mut names = match self.0.recv().await {
            Ok(names) => Arc::unwrap_or_clone(names),
            Err(RecvError::Lagged(_)) => return Err(Missed::Some),
            Err(RecvError::Closed) => return Err(Missed::All),
        };
        loop {
            match self.0.try_recv() {
                Ok(more) => names.extend(more.iter().cloned()),
                Err(TryRecvError::Lagged(_)) => return Err(Missed::Some),
                Err(TryRecvError::Empty | TryRecvError::Closed) => return Ok(names),
            }
        }
    }
}
