//! The configurations of nodes: of those with a Node object, and of those without one.

use std::sync::Arc;

use bytes::Bytes;
use kplane_model::{
    Cidr, DesiredKey, DesiredObject, Digest, NodeFacts, NodeName, ObjectHash, ZoneName,
};

use super::blob::encode;
use super::state::{State, view_of};

impl State {
    pub(super) fn set_nodes(&mut self, nodes: Vec<NodeFacts>, service_cidrs: Option<&[Cidr]>) {
        let changed = !nodes.is_empty();
        for node in nodes {
            self.set_node(node);
        }
        if changed {
            self.note_nodes();
        }
        if let Some(cidrs) = service_cidrs {
            self.set_service_cidrs(cidrs);
        }
    }

    fn set_node(&mut self, mut node: NodeFacts) {
        node.service_cidrs.clone_from(&self.service_cidrs);
        node.other_nodes = self.has_nodes && !node.known;
        let (name, zone) = (node.name.clone(), node.zone.clone());
        let object = encode(&DesiredObject::Node(node.clone()));
        let view = view_of(&mut self.views, &name, self.freed_at);
        let before = view.facts.replace(Arc::new(node));
        let known = view.facts.as_ref().is_some_and(|facts| facts.known);
        view.orphaned = !known && (view.orphaned || before.is_some_and(|facts| facts.known));
        if view.put(DesiredKey::Node, object, self.revision + 1) {
            self.revision += 1;
        }
        if view.zone != zone {
            self.move_node(&name, zone);
        }
        self.free_if_vacant(&name);
    }

    fn set_service_cidrs(&mut self, cidrs: &[Cidr]) {
        if self.service_cidrs != cidrs {
            cidrs.clone_into(&mut self.service_cidrs);
            self.renew_strangers();
            self.renew_nodes(|_| true);
        }
    }

    /// Notes whether there is a Node object, which nodes without one learn. Called after a change of Nodes.
    fn note_nodes(&mut self) {
        let mut facts = self.views.values().filter_map(|view| view.facts.as_ref());
        let has_nodes = facts.any(|facts| facts.known);
        if self.has_nodes != has_nodes {
            self.has_nodes = has_nodes;
            self.renew_strangers();
            self.renew_nodes(|facts| !facts.known);
        }
    }

    fn renew_strangers(&mut self) {
        self.revision += 1;
        self.strangers_revision = self.revision;
    }

    /// Computes the configurations of these nodes anew.
    fn renew_nodes(&mut self, which: impl Fn(&NodeFacts) -> bool) {
        let facts = self.views.values().filter_map(|view| view.facts.clone());
        let facts = facts.filter(|facts| which(facts));
        for node in facts.collect::<Vec<_>>() {
            self.set_node(NodeFacts::clone(&node));
        }
    }

    /// Computes the configuration of an unknown node on request. Names that agents send therefore
    /// cost the store nothing and take no revision. Such a node does not count as being drained.
    pub(super) fn stranger(&self, name: &str) -> (Bytes, ObjectHash) {
        encode(&DesiredObject::Node(NodeFacts {
            name: name.into(),
            eligible: true,
            service_cidrs: self.service_cidrs.clone(),
            other_nodes: self.has_nodes,
            ..NodeFacts::default()
        }))
    }

    /// Moves a node to another zone: the node must check everything again that depends on zones.
    fn move_node(&mut self, name: &NodeName, zone: Option<ZoneName>) {
        let view = view_of(&mut self.views, name, self.freed_at);
        view.zone = zone;
        view.variants_digest = Digest::default();
        for key in &self.varied {
            let Some(shared) = self.shared.get(key) else {
                continue;
            };
            if let Some(blob) = shared.by_node.get(name) {
                let otherwise = shared.resolve_zone(view.zone.as_deref());
                view.variants_digest.add(blob.hash);
                view.variants_digest.remove(otherwise.hash);
            }
            self.revision += 1;
            view.log.note(key.clone(), self.revision);
        }
    }
}
