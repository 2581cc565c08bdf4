//! Streams about a node: while there is one, the store keeps the node's own objects, deletions
//! included.

use std::sync::Arc;

use kplane_desired_state::publish::Store;
use kplane_model::NodeName;

/// One stream; ends when the value is dropped.
pub struct Attendance {
    store: Arc<Store>,
    node: NodeName,
}

impl Attendance {
    /// Registers a stream.
    pub fn begin(store: &Arc<Store>, node: &NodeName) -> Self {
        store.attend(node);
        Self {
            store: Arc::clone(store),
            node: node.clone(),
        }
    }
}

impl Drop for Attendance {
    fn drop(&mut self) {
        self.store.leave(&self.node);
    }
}
