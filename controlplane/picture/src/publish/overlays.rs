//! The order in which objects of single nodes changed, over all nodes: for watches of more than one node.
//!
//! Each view has such a log of its own, and a view goes when nothing mentions its node any more. A watch of all nodes
//! can neither read thousands of logs for each change, nor learn from them what a node had that is gone. The log here
//! exists only while there is such a watch.

use std::collections::VecDeque;

use kplane_model::{DesiredKey, NodeName};

use super::log::Log;

/// Maximum number of deletions that are remembered. A watch that has missed more begins again.
const REMEMBERED: usize = 16_384;

/// An object of a node: its local endpoints, its configuration, or a program in place of the shared one.
type OverlayKey = (NodeName, DesiredKey);

/// The log.
#[derive(Debug, Default)]
pub(super) struct Overlays {
    /// Number of watches that read the log.
    pub(super) watches: usize,
    /// Number of changes so far: the positions in the log.
    pub(super) changes: u64,
    pub(super) log: Log<OverlayKey>,
    /// The latest deletions with their positions, oldest first.
    pub(super) gone: VecDeque<(u64, OverlayKey)>,
    /// Newest position of a deletion that may be forgotten.
    pub(super) horizon: u64,
}

impl Overlays {
    /// Records that an object of a node changed: the node has it, or has it no more.
    pub(super) fn note(&mut self, node: &NodeName, key: &DesiredKey, has: bool) {
        if self.watches == 0 {
            return;
        }
        self.changes += 1;
        let key = (node.clone(), key.clone());
        self.log.note(key.clone(), self.changes);
        if !has {
            self.gone.push_back((self.changes, key));
        }
        if self.gone.len() > REMEMBERED {
            self.forget_one();
        }
    }

    /// Forgets the oldest deletion.
    fn forget_one(&mut self) {
        let Some((position, key)) = self.gone.pop_front() else {
            return;
        };
        self.horizon = position;
        // Otherwise, the node got the object again.
        if self.log.revision_of(&key) == Some(position) {
            self.log.forget(&key);
        }
    }
}
