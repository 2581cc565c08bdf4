//! When nodes whose userspace proxies avoid an endpoint agree that the endpoint is ill.

/// Number of nodes that agree.
const AGREE: usize = 2;

/// Returns whether so many nodes that avoid an endpoint agree that the endpoint is ill. One node may as well have a
/// problem with its own network. A share of all nodes does not count: a node without clients of the Service has nothing
/// to say about its endpoints.
pub const fn nodes_agree(nodes: usize) -> bool {
    nodes >= AGREE
}
