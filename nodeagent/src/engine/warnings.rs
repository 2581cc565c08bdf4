//! Warnings about a configuration that does not fit the desired state.

use kplane_dataplane::plan::NodeSettings;
use kplane_model::{Cidr, Family, NodeFacts};

use crate::desired::Desired;

/// The warnings that are logged once.
#[derive(Debug, Default)]
pub(super) struct Warnings {
    /// The families for which the log already says that the configuration has no range.
    told_range: [bool; 2],
}

impl Warnings {
    /// Warns if the node's pod ranges are not known. kube-proxy waits for them and gives up; here they may
    /// come at any time (I6).
    pub(super) fn detector(settings: &NodeSettings, node: Option<&NodeFacts>) {
        let Some(node) = node else {
            return;
        };
        if settings.node_cidr && node.pod_cidrs.is_empty() {
            tracing::warn!(
                node = %node.name,
                "detectLocalMode is NodeCIDR, and the Node object has no podCIDRs: until it has, the agent cannot \
                 distinguish pods from other clients"
            );
        }
    }

    /// Warns at the first Service of a family of which the configuration has no range. Until then the cluster
    /// counts as one of a single family (I7).
    pub(super) fn ranges(&mut self, settings: &NodeSettings, desired: &Desired) {
        for family in Family::ALL {
            let lacks = |ranges: &[Cidr]| {
                !ranges.is_empty() && ranges.iter().all(|range| range.family() != family)
            };
            let lists = [&settings.cluster_cidrs, &settings.nodeport_addresses];
            let served = desired.counts(family).services > 0;
            if !served || self.told_range[family as usize] || !lists.iter().any(|list| lacks(list))
            {
                continue;
            }
            self.told_range[family as usize] = true;
            tracing::warn!(
                %family,
                "Services have addresses of this family, and clusterCIDR or nodePortAddresses has no range of \
                 it: the agent cannot distinguish its pods from other clients, or serves none of its node ports"
            );
        }
    }
}
