//! Shares of the elements that a node may have, and the policies that are left out beyond them.
//!
//! A price is worked out by arithmetic before any element is made. Each namespace has a share of the node. The largest
//! policies of a namespace that is beyond its share allow nothing, so that nobody else pays for them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kplane_model::{PodName, PolicyName};

/// Most elements that policies of a node may need.
#[derive(Clone, Copy, Debug)]
pub(super) struct ElementLimits {
    /// What ClusterNetworkPolicies decide for one Pod.
    pub(super) pod: u64,
    /// What NetworkPolicies of one namespace allow the Pods of the node.
    pub(super) namespace: u64,
    /// The sum over all Pods, and that over all namespaces.
    pub(super) node: u64,
}

impl Default for ElementLimits {
    fn default() -> Self {
        Self {
            pod: 100_000,
            namespace: 100_000,
            node: 2_000_000,
        }
    }
}

/// Returns the policies that are beyond the share of their namespace, each with the share: the largest ones first, until the
/// rest fits. A namespace that needs little gets that; the others share the rest of the node equally.
pub(super) fn beyond(
    prices: &BTreeMap<PolicyName, u64>,
    limits: ElementLimits,
) -> BTreeMap<PolicyName, u64> {
    let mut namespaces: BTreeMap<&str, NamespaceDemand<'_>> = BTreeMap::new();
    for (name, price) in prices {
        let demand = namespaces.entry(&name.namespace).or_default();
        demand.sum += u128::from(*price);
        demand.policies.push((*price, name));
    }
    let share = share(namespaces.values().map(|demand| demand.sum), limits);
    let mut beyond = BTreeMap::new();
    for mut demand in namespaces.into_values() {
        demand.policies.sort_unstable();
        while demand.sum > u128::from(share)
            && let Some((price, largest)) = demand.policies.pop()
        {
            demand.sum -= u128::from(price);
            beyond.insert(largest.clone(), share);
        }
    }
    beyond
}

/// The elements that the policies of a namespace need.
#[derive(Default)]
struct NamespaceDemand<'a> {
    sum: u128,
    policies: Vec<(u64, &'a PolicyName)>,
}

/// Returns the most that a namespace may have.
fn share(sums: impl Iterator<Item = u128>, limits: ElementLimits) -> u64 {
    let most = u128::from(limits.namespace);
    let mut sums: Vec<u64> = sums
        .map(|sum| u64::try_from(sum.min(most)).unwrap_or(limits.namespace))
        .collect();
    sums.sort_unstable();
    let (mut left, mut count) = (limits.node, sums.len() as u64);
    for sum in sums {
        let equal = left / count;
        if sum > equal {
            return equal;
        }
        left -= sum;
        count -= 1;
    }
    limits.namespace
}

/// Pairs of policies and Pods, with what each policy needs.
#[derive(Debug, Default)]
pub(super) struct Grants {
    /// Pairs that are not among the elements.
    pub(super) missing: BTreeMap<PolicyName, BTreeSet<PodName>>,
    /// Number of prefixes that the blocks of each rule of a policy need.
    pub(super) ranges: HashMap<PolicyName, Vec<u64>>,
    /// Number of elements that each policy needs for all of its Pods.
    pub(super) prices: BTreeMap<PolicyName, u64>,
    /// Policies whose price may have changed.
    pub(super) repriced: BTreeSet<PolicyName>,
    /// Policies that allow nothing, with the share of their namespace.
    pub(super) beyond: BTreeMap<PolicyName, u64>,
    /// Policies that allow nothing, since the process died at them.
    pub(super) aside: BTreeSet<PolicyName>,
}

impl Grants {
    pub(super) fn has(&self, pod: &PodName, policy: &PolicyName) -> bool {
        let missing = self.missing.get(policy);
        !missing.is_some_and(|pods| pods.contains(pod))
    }

    /// Returns how many elements a policy needs.
    pub(super) fn price(&self, policy: &PolicyName) -> u64 {
        self.prices.get(policy).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left_out(prices: &[(&str, u64)], namespace: u64, node: u64) -> Vec<String> {
        let prices = prices.iter().map(|(name, price)| {
            let (namespace, name) = name.split_once('/').unwrap();
            (PolicyName::new(namespace, name), *price)
        });
        let limits = ElementLimits {
            pod: 0,
            namespace,
            node,
        };
        let beyond = beyond(&prices.collect(), limits);
        beyond.iter().map(|(name, share)| format!("{name} {share}")).collect()
    }

    #[test]
    fn the_largest_policies_of_a_namespace_beyond_its_share_are_left_out() {
        let prices = [("a/large", 60), ("a/small", 41), ("b/x", 100)];
        assert_eq!(left_out(&prices, 100, 1_000), ["a/large 100"]);
        let whole = [("a/x", 50), ("a/y", 50)];
        assert_eq!(left_out(&whole, 100, 1_000), [""; 0]);
        let endless = [("a/x", u64::MAX), ("a/y", u64::MAX), ("a/z", 1)];
        assert_eq!(left_out(&endless, 100, 1_000), ["a/x 100", "a/y 100"]);
    }

    /// Of two namespaces that want everything and one that wants little, the latter has what it wants.
    #[test]
    fn a_node_is_shared_among_namespaces() {
        let prices = [
            ("a/x", 100),
            ("b/x", 100),
            ("c/x", 10),
            ("kube-system/dns", 1),
        ];
        assert_eq!(left_out(&prices, 100, 111), ["a/x 50", "b/x 50"]);
        assert_eq!(left_out(&prices, 100, 211), [""; 0]);
    }
}
