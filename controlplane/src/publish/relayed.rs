//! What another control plane published, for a relay: objects stay as that one encoded them, so that digests are equal.

use std::collections::BTreeMap;
use std::time::SystemTime;

use bytes::Bytes;
use kplane_model::{Cidr, DesiredKey, NodeFacts, NodeName, ObjectHash, ServiceKey, ZoneName};

use super::blob::Encoded;
use super::state::{Blob, State};
use super::{Store, Trigger};

/// An encoded object, with its hash.
pub type Raw = (Bytes, ObjectHash);

/// The part of a ServicePort that nodes share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The program of nodes without a narrower one.
    pub default: Raw,
    /// The programs of zones.
    pub by_zone: BTreeMap<ZoneName, Raw>,
    /// Number of endpoints in the default program.
    pub endpoints: usize,
    /// Some endpoint is usable somewhere.
    pub has_any: bool,
}

/// A change of one ServicePort.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortChange {
    /// The new shared part; `None` = as before.
    pub program: Option<Program>,
    /// Nothing stays of what was published before.
    pub whole: bool,
    /// Programs of single nodes; `None` = gone.
    pub programs: BTreeMap<NodeName, Option<Raw>>,
    /// Local endpoints; `None` = gone.
    pub locals: BTreeMap<NodeName, Option<Raw>>,
}

/// A change that another control plane published.
#[derive(Clone, Debug)]
pub struct Relayed {
    /// ServicePorts that changed, or are gone (`None`).
    pub ports: BTreeMap<ServiceKey, Option<PortChange>>,
    /// Nodes that changed, or are gone (`known` is false then).
    pub nodes: Vec<NodeFacts>,
    /// The cluster's ServiceCIDRs, if they changed.
    pub service_cidrs: Option<Vec<Cidr>>,
    /// Time at which the first of the changes was observed, by the control plane that reads the objects.
    pub observed_at: SystemTime,
    /// Triggers of the endpoint changes among them.
    pub triggers: Vec<Trigger>,
}

/// All published objects of one ServicePort, encoded.
#[derive(Clone, Debug)]
pub struct Layers {
    /// The program of nodes without a narrower one.
    pub default: Bytes,
    /// The programs of zones.
    pub by_zone: Vec<(ZoneName, Bytes)>,
    /// The programs of single nodes.
    pub by_node: Vec<(NodeName, Bytes)>,
    /// The local endpoints of nodes.
    pub local: Vec<(NodeName, Bytes)>,
}

impl PortChange {
    /// Adds a later change.
    pub fn merge(&mut self, later: Self) {
        if later.whole {
            *self = later;
            return;
        }
        self.program = later.program.or(self.program.take());
        self.programs.extend(later.programs);
        self.locals.extend(later.locals);
    }
}

impl Store {
    /// Returns all published objects of a ServicePort.
    #[must_use]
    pub fn layers(&self, key: &ServiceKey) -> Option<Layers> {
        let state = self.read();
        let shared = state.shared.get(key)?;
        let bytes = |by: &BTreeMap<NodeName, Blob>| {
            let by = by.iter();
            by.map(|(name, blob)| (name.clone(), blob.bytes.clone()))
                .collect()
        };
        Some(Layers {
            default: shared.default.bytes.clone(),
            by_zone: bytes(&shared.by_zone),
            by_node: bytes(&shared.by_node),
            local: state
                .locals(key)
                .map(|(node, blob)| (node.clone(), blob.bytes.clone()))
                .collect(),
        })
    }
}

impl State {
    /// Publishes a change of a ServicePort. A change without a shared part is nothing for a port that is not published.
    pub(super) fn relay(&mut self, key: &ServiceKey, change: PortChange) {
        let before = match change.whole {
            true => None,
            false => self.encoded(key),
        };
        let (mut by_node, mut local) = (BTreeMap::new(), BTreeMap::new());
        let mut shared = None;
        if let Some(before) = before {
            shared = Some((before.default, before.by_zone));
            by_node = before.by_node;
            local.extend(before.local);
        }
        let program = change.program;
        let program = program.map(|program| (program.default, program.by_zone));
        let Some((default, by_zone)) = program.or(shared) else {
            return;
        };
        apply(&mut by_node, change.programs);
        apply(&mut local, change.locals);
        let encoded = Encoded {
            default,
            by_zone,
            by_node,
            local: local.into_iter().collect(),
        };
        self.upsert(key, encoded);
    }

    /// Returns what is published of a ServicePort.
    pub(super) fn encoded(&self, key: &ServiceKey) -> Option<Encoded> {
        let shared = self.shared.get(key)?;
        let raw = |blob: &Blob| (blob.bytes.clone(), blob.hash);
        let raws = |by: &BTreeMap<NodeName, Blob>| {
            let by = by.iter();
            by.map(|(name, blob)| (name.clone(), raw(blob))).collect()
        };
        let locals = self.locals(key);
        Some(Encoded {
            default: raw(&shared.default),
            by_zone: raws(&shared.by_zone),
            by_node: raws(&shared.by_node),
            local: locals
                .map(|(node, blob)| (node.clone(), raw(blob)))
                .collect(),
        })
    }

    /// Returns the local endpoints of a ServicePort, by node.
    fn locals(&self, key: &ServiceKey) -> impl Iterator<Item = (&NodeName, &Blob)> {
        let nodes = self.shared.get(key).into_iter();
        let nodes = nodes.flat_map(|shared| &shared.local_nodes);
        let key = DesiredKey::Local(key.clone());
        nodes.filter_map(move |node| Some((node, self.views.get(node)?.objects.get(&key)?)))
    }
}

fn apply(objects: &mut BTreeMap<NodeName, Raw>, changes: BTreeMap<NodeName, Option<Raw>>) {
    for (node, change) in changes {
        match change {
            Some(object) => drop(objects.insert(node, object)),
            None => drop(objects.remove(&node)),
        }
    }
}
