//! Flags of preStop hooks.

use std::time::Duration;

use kplane_dataplane::plan::NodeSettings;

use super::value::interval;
use crate::prestop;

/// Flags of preStop hooks.
#[derive(Debug, clap::Args)]
pub(super) struct PreStopFlags {
    /// Port at which kubelet asks for preStop hooks of the node's Pods (`httpGet` with path /gone), such as 7468: the agent
    /// answers when no kernel leads new connections to the Pod any more. The agent listens there on loopback addresses,
    /// and rules lead the node's own connections to its Pods at this port there, so no Pod may serve there. Pods are in
    /// the Node's podCIDRs, in clusterCIDR, or endpoints; 0 = no hooks.
    #[arg(long = "pre-stop-port", value_name = "PORT", default_value_t = 0)]
    port: u16,

    /// Longest time that a preStop hook waits, unless its path has another one (/gone?within=25s; 5m at most).
    #[arg(long = "pre-stop-within", value_name = "DURATION", default_value = "10s", value_parser = interval)]
    within: Duration,
}

impl PreStopFlags {
    /// Returns the settings of preStop hooks, if there are any.
    pub(super) fn settings(&self, node: &NodeSettings) -> Option<prestop::HookSettings> {
        (self.port > 0).then(|| prestop::HookSettings {
            port: self.port,
            within: self.within.min(prestop::LONGEST),
            ranges: node.cluster_cidrs.clone(),
        })
    }
}
