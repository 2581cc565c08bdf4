//! Objects after encoding: once per variant, whatever the number of agents.

use std::collections::BTreeMap;

use bytes::Bytes;
use kplane_model::select::others;
use kplane_model::{
    DesiredObject, LocalEndpoints, NodeName, ObjectHash, PolicyObject, ServiceProgram, ZoneName,
};
use kplane_proto::convert::encode_object;

use super::Published;

/// A [`Published`] after encoding, which happens outside of the lock.
#[derive(Clone, Debug)]
pub(super) struct Encoded {
    pub(super) default: (Bytes, ObjectHash),
    pub(super) by_zone: BTreeMap<ZoneName, (Bytes, ObjectHash)>,
    pub(super) by_node: BTreeMap<NodeName, (Bytes, ObjectHash)>,
    /// Local endpoints, sorted by node.
    pub(super) local: Vec<(NodeName, (Bytes, ObjectHash))>,
}

impl Encoded {
    /// Encodes a part of NetworkPolicies: there is one variant, for all nodes.
    pub(super) fn part(object: PolicyObject) -> Self {
        Self {
            default: encode(&DesiredObject::Policy(object)),
            by_zone: BTreeMap::new(),
            by_node: BTreeMap::new(),
            local: Vec::new(),
        }
    }

    pub(super) fn new(published: &Published) -> Self {
        let variants = &published.variants;
        let program = |endpoints: &Vec<_>, siblings| {
            encode(&DesiredObject::Service(ServiceProgram {
                port: published.port.clone(),
                endpoints: endpoints.clone(),
                has_any: variants.has_any,
                serving_others: variants.serving_others(endpoints, siblings),
                dead: others(&published.dead, endpoints, siblings),
            }))
        };
        let programs = |by: &BTreeMap<NodeName, Vec<_>>| {
            by.iter()
                .map(|(name, endpoints)| (name.clone(), program(endpoints, by.len())))
                .collect()
        };
        let local = published.local.iter().map(|(node, endpoints)| {
            let local = LocalEndpoints {
                key: published.port.key.clone(),
                endpoints: endpoints.clone(),
            };
            (node.clone(), encode(&DesiredObject::Local(local)))
        });
        Self {
            default: program(&variants.default, 1),
            by_zone: programs(&variants.by_zone),
            by_node: programs(&variants.by_node),
            local: local.collect(),
        }
    }
}

pub(super) fn encode(object: &DesiredObject) -> (Bytes, ObjectHash) {
    let bytes = encode_object(object);
    let hash = ObjectHash::of(&bytes);
    (bytes, hash)
}
