//! Warnings about a configuration that does not fit the desired state.

use kplane_dataplane::plan::{NodePorts, NodeSettings};
use kplane_model::{Family, NodeFacts};

use crate::desired::Desired;

/// The warnings that are logged once.
#[derive(Debug, Default)]
pub(super) struct Warnings {
    /// The families for which the log already says that the configuration has no range.
    told_range: [bool; 2],
    /// The addresses of node ports that the log names, by family, where they are not the node's own by name.
    told_ports: [Option<NodePorts>; 2],
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

    /// Warns about what the settings do not know of the desired state.
    pub(super) fn about(&mut self, settings: &NodeSettings, desired: &Desired) {
        for family in Family::ALL {
            if desired.counts(family).services > 0 {
                self.ranges(family, settings);
                self.node_ports(family, settings, desired.node());
            }
        }
    }

    /// Warns at the first Service of a family of which clusterCIDR has no range. Until then the cluster counts as one
    /// of a single family (I7).
    fn ranges(&mut self, family: Family, settings: &NodeSettings) {
        let ranges = &settings.cluster_cidrs;
        let lacks = !ranges.is_empty() && ranges.iter().all(|range| range.family() != family);
        if lacks && !std::mem::replace(&mut self.told_range[family as usize], true) {
            tracing::warn!(
                %family,
                "Services have addresses of this family, and clusterCIDR has no range of it: the agent cannot \
                 distinguish its pods from other clients"
            );
        }
    }

    /// Warns if the address on which node ports are served is not known, or not any more (A21).
    fn node_ports(&mut self, family: Family, settings: &NodeSettings, node: Option<&NodeFacts>) {
        let unknown = NodeFacts::default();
        let chosen = NodePorts::choose(family, node.unwrap_or(&unknown), settings);
        let told = &mut self.told_ports[family as usize];
        let now = match chosen {
            NodePorts::Configured(_) | NodePorts::Own(_) => None,
            lacking => Some(lacking),
        };
        if *told == now {
            return;
        }
        match &now {
            None => {
                tracing::info!(%family, "node ports are served on the node's own address again");
            }
            Some(NodePorts::Everywhere) => tracing::info!(
                %family,
                "node ports are served on all addresses of the node: the source names no Node, and the configuration \
                 has no nodePortAddresses"
            ),
            Some(NodePorts::LastKnown(ip)) => tracing::warn!(
                %family, %ip,
                "the Node object is gone, or names no address of this family any more: node ports are served on the \
                 last known one"
            ),
            Some(_) => tracing::warn!(
                %family,
                "no node port is served: no address of the node is known. Give the Node object an InternalIP of this \
                 family, or set nodePortAddresses to ranges"
            ),
        }
        *told = now;
    }
}
