//! Warnings about a configuration that does not fit the desired state.

use kplane_dataplane::plan::NodeSettings;
use kplane_model::{Family, NodeFacts, Severity};

use crate::desired::Desired;
use crate::host_checks::{Finding, node_ports};

/// The warnings that are logged once.
#[derive(Debug, Default)]
pub(super) struct Warnings {
    /// The families for which the log already says that the configuration has no range.
    reported_range: [bool; 2],
    /// What the log says of the addresses of node ports, by family.
    reported_ports: [Option<Finding>; 2],
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
        if lacks && !std::mem::replace(&mut self.reported_range[family as usize], true) {
            tracing::warn!(
                %family,
                "Services have addresses of this family, and clusterCIDR has no range of it: the agent cannot \
                 distinguish its pods from other clients"
            );
        }
    }

    /// Warns if the address on which node ports are served is not known, or not any more (A21).
    fn node_ports(&mut self, family: Family, settings: &NodeSettings, node: Option<&NodeFacts>) {
        let reported = &mut self.reported_ports[family as usize];
        let now = node_ports::of(family, node, settings);
        if *reported == now {
            return;
        }
        match &now {
            None => {
                tracing::info!(%family, "node ports are served on the node's own address again");
            }
            Some(found) if found.severity == Severity::Info => {
                tracing::info!(%family, "{}", found.text);
            }
            Some(found) => tracing::warn!(%family, fix = found.fix, "{}", found.text),
        }
        *reported = now;
    }
}
