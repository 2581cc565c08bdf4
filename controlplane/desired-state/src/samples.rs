//! Samples for tests, here and in crates that use this one.

#![allow(clippy::unwrap_used, clippy::panic, reason = "for tests")]

use std::time::SystemTime;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::k8s::{Kind, Object};
use crate::source::{Batch, Event, Located};

impl Located {
    /// Returns an object of `x.yaml` from its JSON.
    ///
    /// # Panics
    /// If the JSON is no object of a kind that sources read.
    pub fn sample(object: &Value) -> Self {
        let object = match object["kind"].as_str().unwrap() {
            "Service" => Object::Service(read(object)),
            "EndpointSlice" => Object::EndpointSlice(read(object)),
            "Node" => Object::Node(read(object)),
            "ServiceCIDR" => Object::ServiceCidr(read(object)),
            "NetworkPolicy" => Object::NetworkPolicy(read(object)),
            "ClusterNetworkPolicy" => Object::ClusterNetworkPolicy(read(object)),
            "Namespace" => Object::Namespace(read(object)),
            "Pod" => Object::Pod(read(object)),
            kind => panic!("{kind}"),
        };
        let location = "x.yaml".into();
        Self { object, location }
    }
}

fn read<T: DeserializeOwned>(object: &Value) -> T {
    T::deserialize(object).unwrap()
}

impl Batch {
    /// Returns the complete lists of some kinds, with these objects, observed now.
    pub fn sample(kinds: &[Kind], objects: impl IntoIterator<Item = Located>) -> Self {
        let begun = kinds.iter().copied().map(Event::Init);
        let named = objects.into_iter().map(|object| Event::InitApply(Box::new(object)));
        let done = kinds.iter().copied().map(Event::InitDone);
        Self {
            events: begun.chain(named).chain(done).collect(),
            observed_at: SystemTime::now(),
        }
    }
}
