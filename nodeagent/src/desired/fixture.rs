//! A miniature control plane, and builders of its objects, for tests.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use bytes::Bytes;
use kplane_model::{
    DesiredKey, DesiredObject, Digest, EndpointAddr, Family, KeyParts, LocalEndpoints, NodeFacts,
    ObjectHash, RangeDigests, ServiceKey, ServicePort, ServiceProgram,
};
use kplane_proto::convert::encode_object;
use kplane_proto::v1 as pb;

use super::{Collector, Update};

pub(crate) const EPOCH: u64 = 0xe1;

/// Number of ranges by which a [`Plane`] compares.
pub(crate) const RANGES: u16 = 16;

pub(crate) fn key_of(name: &str, family: Family) -> ServiceKey {
    ServiceKey::from(KeyParts {
        port_name: "".into(),
        family,
        ..KeyParts::clone(&ServiceKey::sample("shop", name))
    })
}

/// Builds an IPv4 Service with endpoints, such as `svc("web", &["10.0.0.1:8080"])`.
pub(crate) fn svc(name: &str, endpoints: &[&str]) -> DesiredObject {
    service(key_of(name, Family::V4), [10, 96, 0, 1].into(), endpoints)
}

/// Builds an IPv6 Service with endpoints.
pub(crate) fn svc6(name: &str, endpoints: &[&str]) -> DesiredObject {
    service(
        key_of(name, Family::V6),
        "fd00::1".parse().unwrap(),
        endpoints,
    )
}

fn service(key: ServiceKey, cluster_ip: IpAddr, endpoints: &[&str]) -> DesiredObject {
    let endpoints = endpoints.iter().map(|text| addr(text)).collect();
    let port = ServicePort {
        cluster_ip,
        ..ServicePort::sample(key)
    };
    DesiredObject::Service(ServiceProgram::sample(port, endpoints))
}

pub(crate) fn local(name: &str, endpoints: &[&str]) -> DesiredObject {
    let endpoints = endpoints.iter().map(|text| addr(text));
    let key = key_of(name, Family::V4);
    DesiredObject::Local(LocalEndpoints::sample(key, endpoints))
}

pub(crate) fn node(zone: &str) -> DesiredObject {
    DesiredObject::Node(NodeFacts {
        zone: Some(zone.into()),
        addresses: vec![[192, 168, 0, 1].into()],
        eligible: true,
        ..NodeFacts::sample("n1")
    })
}

fn addr(text: &str) -> EndpointAddr {
    text.parse::<std::net::SocketAddr>().unwrap().into()
}

/// Returns an encoded Service that no agent may accept: its endpoint is the node itself.
pub(crate) fn hostile(name: &str) -> Bytes {
    encode_object(&svc(name, &["127.0.0.1:80"]))
}

/// The objects of a control plane, and the changes that no update contains yet.
#[derive(Debug)]
pub(crate) struct Plane {
    pub(crate) epoch: u64,
    pub(crate) revision: u64,
    objects: BTreeMap<DesiredKey, Bytes>,
    dirty: BTreeSet<DesiredKey>,
    pub(crate) changed_at_ms: u64,
    /// The triggers of every update until they are taken away.
    pub(crate) triggers: Vec<pb::Trigger>,
    /// The confidence of every update.
    pub(crate) confidence: pb::Confidence,
    pub(crate) doubt: String,
    /// The word of every update about NetworkPolicies.
    pub(crate) enforcement: pb::Enforcement,
    pub(crate) freshness: Vec<pb::KindVersion>,
}

impl Plane {
    pub(crate) fn new(objects: impl IntoIterator<Item = DesiredObject>) -> Self {
        let mut plane = Self {
            epoch: EPOCH,
            revision: 0,
            objects: BTreeMap::new(),
            dirty: BTreeSet::new(),
            changed_at_ms: 0,
            triggers: Vec::new(),
            confidence: pb::Confidence::Unspecified,
            doubt: String::new(),
            enforcement: pb::Enforcement::On,
            freshness: Vec::new(),
        };
        for object in objects {
            plane.put(&object);
        }
        plane
    }

    pub(crate) fn put(&mut self, object: &DesiredObject) {
        self.put_raw(object.key(), encode_object(object));
    }

    /// Adds any bytes under any name.
    pub(crate) fn put_raw(&mut self, key: DesiredKey, encoded: Bytes) {
        self.objects.insert(key.clone(), encoded);
        self.dirty.insert(key);
        self.revision += 1;
    }

    pub(crate) fn delete(&mut self, key: &DesiredKey) {
        self.objects.remove(key);
        self.dirty.insert(key.clone());
        self.revision += 1;
    }

    pub(crate) fn digest(&self) -> Digest {
        let mut digest = Digest::default();
        for encoded in self.objects.values() {
            digest.add(ObjectHash::of(encoded));
        }
        digest
    }

    pub(crate) fn end(&self) -> pb::UpdateEnd {
        pb::UpdateEnd {
            revision: self.revision,
            digest: self.digest().to_bytes().to_vec(),
            changed_at_ms: self.changed_at_ms,
            triggers: self.triggers.clone(),
            confidence: self.confidence.into(),
            doubt: self.doubt.clone(),
            enforcement: self.enforcement.into(),
            freshness: self.freshness.clone(),
        }
    }

    /// Returns a snapshot in pieces of one object.
    pub(crate) fn snapshot(&mut self) -> Vec<pb::Update> {
        self.dirty.clear();
        let mut pieces: Vec<_> = self
            .objects
            .values()
            .map(|encoded| pb::Update {
                objects: vec![encoded.clone()],
                ..pb::Update::default()
            })
            .collect();
        pieces.push(pb::Update::default());
        pieces[0].snapshot = true;
        pieces.last_mut().unwrap().end = Some(self.end());
        pieces
    }

    /// Returns the changes since the last call.
    pub(crate) fn delta(&mut self) -> Vec<pb::Update> {
        let mut piece = pb::Update::default();
        for key in std::mem::take(&mut self.dirty) {
            match self.objects.get(&key) {
                Some(encoded) => piece.objects.push(encoded.clone()),
                None => piece.deleted.push((&key).into()),
            }
        }
        piece.end = Some(self.end());
        vec![piece]
    }

    /// Returns what replaces the ranges in which an agent with these digests differs; `None` if it asks for a snapshot.
    pub(crate) fn replacement(&mut self, digests: &[u8]) -> Option<Vec<pb::Update>> {
        let mut own = RangeDigests::new(RANGES);
        let mut pieces = Vec::new();
        for (key, encoded) in &self.objects {
            if matches!(key, DesiredKey::Service(_)) {
                own.add(key, ObjectHash::of(encoded));
            }
        }
        let differing = own.differing(digests)?;
        for (key, encoded) in &self.objects {
            if matches!(key, DesiredKey::Service(_)) && !differing.contain(key) {
                continue;
            }
            pieces.push(pb::Update {
                objects: vec![encoded.clone()],
                ..pb::Update::default()
            });
        }
        self.dirty.clear();
        pieces.push(pb::Update::default());
        pieces[0].ranges = differing.to_bytes().into();
        pieces.last_mut().unwrap().end = Some(self.end());
        Some(pieces)
    }

    pub(crate) fn collect(&self, pieces: Vec<pb::Update>) -> Update {
        let mut collector = Collector::new(self.epoch);
        let mut updates = pieces.into_iter().filter_map(|piece| collector.push(piece).unwrap());
        let update = updates.next().unwrap();
        assert!(updates.next().is_none(), "pieces of one update");
        update
    }

    pub(crate) fn snapshot_update(&mut self) -> Update {
        let pieces = self.snapshot();
        self.collect(pieces)
    }

    pub(crate) fn delta_update(&mut self) -> Update {
        let pieces = self.delta();
        self.collect(pieces)
    }
}
