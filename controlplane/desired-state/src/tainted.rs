//! The Nodes that have the start-up taint: what the source says of them.

use std::collections::BTreeSet;

use kplane_model::NodeName;
use tokio::sync::watch;

use crate::k8s::{Kind, Node, Object, ObjectId};
use crate::source::Event;

/// The taint's key; its effect is `NoSchedule`.
pub const TAINT: &str = "kplane.io/not-ready";

/// The Nodes that have the taint, as the source names them.
#[derive(Debug, Default)]
pub struct Tainted(watch::Sender<BTreeSet<NodeName>>);

impl Tainted {
    /// Follows what a source says of Nodes.
    pub fn follow(&self, events: &[Event]) {
        for event in events {
            match event {
                Event::InitApply(located) | Event::Apply(located) => {
                    if let Object::Node(node) = &located.object {
                        self.set(&node.metadata.name, has_taint(node));
                    }
                }
                Event::Delete(id) => self.forget(id),
                Event::Vanished(ids) => ids.iter().for_each(|id| self.forget(id)),
                _ => {}
            }
        }
    }

    /// Returns a receiver of the Nodes that have the taint.
    pub fn changes(&self) -> watch::Receiver<BTreeSet<NodeName>> {
        self.0.subscribe()
    }

    fn forget(&self, id: &ObjectId) {
        if id.kind == Kind::Node {
            self.set(&id.name, false);
        }
    }

    fn set(&self, name: &NodeName, tainted: bool) {
        self.0.send_if_modified(|nodes| {
            if tainted { nodes.insert(name.clone()) } else { nodes.remove(name) }
        });
    }
}

fn has_taint(node: &Node) -> bool {
    node.spec.taints.iter().flatten().any(|taint| taint.key == TAINT)
}
