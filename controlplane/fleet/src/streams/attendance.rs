//! Streams about a node: while there is one, the store keeps the node's own objects, deletions
//! included.

use std::sync::Arc;

use kplane_model::NodeName;

use crate::hub::Hub;

/// One stream; ends when the value is dropped.
pub struct Attendance {
    hub: Arc<Hub>,
    node: NodeName,
}

impl Attendance {
    /// Registers a stream.
    pub fn begin(hub: &Arc<Hub>, node: &NodeName) -> Self {
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
