//! Detection of pods, which distinguishes them from other clients: `detectLocalMode` and the fields
//! that it uses.

use kplane_model::Cidr;

use super::checker::Checker;
use kplane_dataplane::backend::PodInterface;
use kplane_kube_proxy_config::KubeProxyConfiguration;

/// One way to distinguish pods from other clients, or none.
#[derive(Debug, Default)]
pub(super) struct Detector {
    /// The address ranges of the cluster's pods.
    pub(super) cluster_cidrs: Vec<Cidr>,
    /// Whether to use the node's own pod ranges.
    pub(super) node_cidr: bool,
    /// The interface on which pods' packets arrive.
    pub(super) pod_interface: Option<PodInterface>,
}

/// Reads the mode and the fields that it needs; fields of other modes may have any value.
pub(super) fn detector(config: &KubeProxyConfiguration, check: &mut Checker) -> Detector {
    let mut detector = Detector::default();
    let local = &config.detect_local;
    match &*config.detect_local_mode {
        "" | "ClusterCIDR" => detector.cluster_cidrs = cluster_cidrs(&config.cluster_cidr, check),
        "NodeCIDR" => detector.node_cidr = true,
        "BridgeInterface" => {
            let field = "detectLocal.bridgeInterface";
            detector.pod_interface = interface(field, &local.bridge_interface, false, check);
        }
        "InterfaceNamePrefix" => {
            let field = "detectLocal.interfaceNamePrefix";
            detector.pod_interface = interface(field, &local.interface_name_prefix, true, check);
        }
        other => {
            let reason = "must be ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix";
            check.bad("detectLocalMode", other, reason);
        }
    }
    detector
}

/// Reads any number of ranges. kube-proxy accepts at most one of each family and refuses more, so
/// every file that kube-proxy accepts means the same here.
fn cluster_cidrs(text: &str, check: &mut Checker) -> Vec<Cidr> {
    if text.is_empty() {
        return Vec::new();
    }
    text.split(',').filter_map(|text| check.cidr("clusterCIDR", text)).collect()
}

fn interface(field: &str, text: &str, prefix: bool, check: &mut Checker) -> Option<PodInterface> {
    let interface = PodInterface::new(text, prefix);
    if interface.is_none() {
        let what = if prefix {
            "must be the beginning of an interface's name such as cali"
        } else {
            "must be an interface's name such as cbr0"
        };
        let most = PodInterface::MAX_NAME;
        let reason = format!("{what}: 1 to {most} characters, no white space / : * or quotes");
        check.bad(field, text, &reason);
    }
    interface
}
