//! The endpoints of an EndpointSlice.

use std::sync::Arc;

use serde::Deserialize;

use super::texts::{maybe_shared, shared};

/// One endpoint of a slice.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SliceEndpoint {
    /// Addresses; only the first counts (A27).
    pub addresses: Vec<Arc<str>>,
    /// Conditions.
    pub conditions: Option<EndpointConditions>,
    /// The node.
    #[serde(deserialize_with = "maybe_shared")]
    pub node_name: Option<Arc<str>>,
    /// The object that the endpoint is.
    pub target_ref: Option<TargetRef>,
    /// Topology hints.
    pub hints: Option<EndpointHints>,
}

/// The object that an endpoint is, such as a Pod.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(default)]
pub struct TargetRef {
    /// The kind.
    #[serde(deserialize_with = "shared")]
    pub kind: Arc<str>,
    /// The namespace.
    #[serde(deserialize_with = "maybe_shared")]
    pub namespace: Option<Arc<str>>,
    /// The name.
    pub name: Option<Arc<str>>,
}

/// Conditions of an endpoint; A27 defines the meaning of unset ones.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(default)]
pub struct EndpointConditions {
    /// The endpoint may take new connections.
    pub ready: Option<bool>,
    /// The endpoint answers requests.
    pub serving: Option<bool>,
    /// The endpoint is being shut down.
    pub terminating: Option<bool>,
}

/// Topology hints of an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EndpointHints {
    /// Zones that should use the endpoint.
    pub for_zones: Option<Vec<Hint>>,
    /// Nodes that should use the endpoint.
    pub for_nodes: Option<Vec<Hint>>,
}

/// One hint.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
pub struct Hint {
    /// Name of the zone or node.
    #[serde(deserialize_with = "shared")]
    pub name: Arc<str>,
}
