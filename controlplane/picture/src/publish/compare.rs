//! Comparisons of what is published for two nodes. On request only.

use std::collections::BTreeMap;

use bytes::Bytes;
use kplane_model::{
    DesiredKey, DesiredObject, LocalEndpoints, ServiceKey, ServiceName, ServiceProgram,
};
use kplane_proto::convert::decode_object;

use super::Store;
use super::state::State;

/// A ServicePort on two nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// On the left node, and on the right one.
    pub programs: [ServiceProgram; 2],
    /// Endpoints on the node.
    pub local: [Option<LocalEndpoints>; 2],
    /// The program is different for single nodes, not only for zones.
    pub by_node: bool,
}

/// ServicePorts that differ, and the number of those that do not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// Those that differ.
    pub differ: BTreeMap<ServiceKey, Pair>,
    /// Number of those that are equal.
    pub equal: usize,
}

/// Encoded programs and local endpoints of both sides.
struct Raw {
    programs: [Bytes; 2],
    local: [Option<Bytes>; 2],
    by_node: bool,
}

impl Raw {
    /// Returns the objects. `None` is a bug: the store encoded them.
    fn decode(self) -> Option<Pair> {
        let object = |bytes: Bytes| decode_object(bytes).ok().flatten();
        let program = |bytes| match object(bytes) {
            Some(DesiredObject::Service(program)) => Some(program),
            _ => None,
        };
        let local = |bytes: Option<Bytes>| match object(bytes?) {
            Some(DesiredObject::Local(local)) => Some(local),
            _ => None,
        };
        let [left, right] = self.programs.map(program);
        Some(Pair {
            programs: [left?, right?],
            local: self.local.map(local),
            by_node: self.by_node,
        })
    }
}

impl Store {
    /// Compares what two nodes must hold. Endpoints on the nodes themselves count where a traffic policy is Local.
    pub fn compare_nodes(&self, left: &str, right: &str) -> Compared {
        let (raw, all) = {
            let state = self.read();
            let all = state.shared.keys().filter_map(DesiredKey::service).count();
            (state.differing([left, right]), all)
        };
        let differ: BTreeMap<_, _> = raw
            .into_iter()
            .filter_map(|(key, raw)| Some((key, raw.decode()?)))
            .filter(|(_, pair)| {
                let uses_local = |program: &ServiceProgram| program.port.uses_local_endpoints();
                let mut programs = pair.programs.iter();
                pair.programs[0] != pair.programs[1] || programs.any(uses_local)
            })
            .collect();
        Compared {
            equal: all.saturating_sub(differ.len()),
            differ,
        }
    }
}

impl Store {
    /// Returns the Services that changed after a revision in a way that concerns a node, each with the revision of its
    /// last change, newest first.
    pub fn pending(&self, node: &str, after: u64, most: usize) -> Vec<(ServiceName, u64)> {
        let state = self.read();
        let view = state.views.get(node);
        let zone = view.and_then(|view| view.zone.as_deref());
        let concerns = |key: &DesiredKey| {
            let variant = state.shared.get(key).map(|s| s.resolve(node, zone));
            variant.is_none_or(|blob| blob.revision > after)
        };
        let shared = state.log.between(after, state.revision);
        let shared = shared.filter(|(_, key)| concerns(key));
        let shared =
            shared.filter_map(|(revision, key)| Some((key.service()?.service.clone(), revision)));
        let own = view.into_iter();
        let own = own.flat_map(|view| view.log.between(after, state.revision));
        let own = own.filter_map(|(revision, key)| match key {
            DesiredKey::Local(key) | DesiredKey::Service(key) => {
                Some((key.service.clone(), revision))
            }
            DesiredKey::Node | DesiredKey::Policy(_) => None,
        });
        shared.take(most).chain(own.take(most)).collect()
    }
}

impl State {
    /// Returns the ServicePorts whose program or local endpoints differ between two nodes.
    fn differing(&self, nodes: [&str; 2]) -> Vec<(ServiceKey, Raw)> {
        let views = nodes.map(|node| self.views.get(node));
        let zones = views.map(|view| view.and_then(|view| view.zone.as_deref()));
        let mut differing = Vec::new();
        let ports = self.shared.iter();
        for (key, shared) in ports.filter_map(|(key, shared)| Some((key.service()?, shared))) {
            let left = shared.resolve(nodes[0], zones[0]);
            let right = shared.resolve(nodes[1], zones[1]);
            let local_key = DesiredKey::Local(key.clone());
            let local = views.map(|view| view.and_then(|view| view.objects.get(&local_key)));
            let hashes = local.map(|blob| blob.map(|blob| blob.hash));
            if left.hash == right.hash && hashes[0] == hashes[1] {
                continue;
            }
            let raw = Raw {
                programs: [left.bytes.clone(), right.bytes.clone()],
                local: local.map(|blob| blob.map(|blob| blob.bytes.clone())),
                by_node: nodes.iter().any(|node| shared.by_node.contains_key(*node)),
            };
            differing.push((key.clone(), raw));
        }
        differing
    }
}
