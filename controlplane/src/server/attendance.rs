//! Streams about a node: while there is one, what the node has of its own is kept, deletions included.

use std::sync::Arc;

use kplane_model::NodeName;

use crate::hub::Hub;

/// One stream; it ends with the value.
pub(super) struct Attendance {
    hub: Arc<Hub>,
    node: NodeName,
}

impl Attendance {
    /// A stream begins.
    pub(super) fn begin(hub: &Arc<Hub>, node: &NodeName) -> Self {
        hub.store.attend(node);
        Self {
            hub: Arc::clone(hub),
            node: node.clone(),
        }
    }
}

impl Drop for Attendance {
    fn drop(&mut self) {
        self.hub.store.leave(&self.node);
    }
}
