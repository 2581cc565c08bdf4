//! Conversion of legacy v1 Endpoints to EndpointSlices, for servers without slices.
//!
//! Each subset becomes a slice per address family. The names of an Endpoints object's slices follow
//! from its own name and the subset's index, so a count of subsets is enough to find removed
//! slices.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use serde::Deserialize;

use crate::k8s::{
    EndpointConditions, EndpointSlice, Kind, Object, ObjectId, ObjectMeta, SERVICE_NAME_LABEL,
    SliceEndpoint, SlicePort, TargetRef,
};

/// A v1 Endpoints object.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct LegacyEndpoints {
    pub(super) metadata: ObjectMeta,
    #[serde(default)]
    pub(super) subsets: Option<Vec<Subset>>,
}

/// Addresses that share ports.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Subset {
    pub(super) addresses: Option<Vec<Address>>,
    pub(super) not_ready_addresses: Option<Vec<Address>>,
    pub(super) ports: Option<Vec<SlicePort>>,
}

/// One address.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Address {
    pub(super) ip: Arc<str>,
    pub(super) node_name: Option<Arc<str>>,
    pub(super) target_ref: Option<TargetRef>,
}

/// The families of a subset, in the order of its slices.
const FAMILIES: [&str; 2] = ["IPv4", "IPv6"];

/// Number of subsets that each Endpoints object had when it was last seen.
#[derive(Debug, Default)]
pub(super) struct Shapes(HashMap<(Arc<str>, Arc<str>), usize>);

impl Shapes {
    /// Returns the slices of an existing Endpoints object, and the slices that it no longer has.
    pub(super) fn put(&mut self, endpoints: &LegacyEndpoints) -> (Vec<Object>, Vec<ObjectId>) {
        let subsets = endpoints.subsets.as_deref().unwrap_or_default();
        let before = self.0.insert(key(endpoints), subsets.len()).unwrap_or(0);
        let slices = subsets
            .iter()
            .enumerate()
            .flat_map(|(index, subset)| {
                FAMILIES.map(|family| slice(endpoints, index, subset, family))
            })
            .map(Object::EndpointSlice);
        let gone = ids(endpoints, subsets.len()..before);
        (slices.collect(), gone)
    }

    /// Returns the slices that a deleted Endpoints object had.
    pub(super) fn gone(&mut self, endpoints: &LegacyEndpoints) -> Vec<ObjectId> {
        let subsets = endpoints.subsets.as_ref().map_or(0, Vec::len);
        let before = self.0.remove(&key(endpoints)).unwrap_or(0);
        ids(endpoints, 0..before.max(subsets))
    }
}

fn key(endpoints: &LegacyEndpoints) -> (Arc<str>, Arc<str>) {
    let metadata = &endpoints.metadata;
    let namespace = metadata.namespace_of(Kind::EndpointSlice);
    (namespace, metadata.name.clone())
}

fn ids(endpoints: &LegacyEndpoints, subsets: std::ops::Range<usize>) -> Vec<ObjectId> {
    let (namespace, name) = key(endpoints);
    subsets
        .flat_map(|index| FAMILIES.map(|family| slice_name(&name, index, family)))
        .map(|name| ObjectId {
            kind: Kind::EndpointSlice,
            namespace: namespace.clone(),
            name,
        })
        .collect()
}

/// Returns a slice's name. It contains `/`, which no slice of a real API server does.
fn slice_name(endpoints: &str, index: usize, family: &str) -> Arc<str> {
    format!("{endpoints}/{index}/{family}").into()
}

fn slice(
    endpoints: &LegacyEndpoints,
    index: usize,
    subset: &Subset,
    family: &str,
) -> EndpointSlice {
    let (namespace, name) = key(endpoints);
    let ours = |address: &&Address| match address.ip.parse() {
        Ok(IpAddr::V4(_)) => family == "IPv4",
        Ok(IpAddr::V6(_)) => family == "IPv6",
        Err(_) => false,
    };
    let with = |addresses: &Option<Vec<Address>>, ready: bool| {
        let addresses = addresses.as_deref().unwrap_or_default().iter();
        addresses
            .filter(ours)
            .map(|address| SliceEndpoint {
                addresses: vec![address.ip.clone()],
                conditions: Some(EndpointConditions {
                    ready: Some(ready),
                    serving: Some(ready),
                    terminating: Some(false),
                }),
                node_name: address.node_name.clone(),
                target_ref: address.target_ref.clone(),
                hints: None,
            })
            .collect::<Vec<_>>()
    };
    let mut all = with(&subset.addresses, true);
    all.extend(with(&subset.not_ready_addresses, false));
    let label = (SERVICE_NAME_LABEL.into(), name.clone());
    EndpointSlice {
        metadata: ObjectMeta {
            name: slice_name(&name, index, family),
            namespace: Some(namespace),
            labels: Some([label].into()),
            annotations: endpoints.metadata.annotations.clone(),
            ..ObjectMeta::default()
        },
        address_type: family.to_owned(),
        endpoints: Some(all),
        ports: subset.ports.clone(),
    }
}

#[cfg(test)]
mod tests;
