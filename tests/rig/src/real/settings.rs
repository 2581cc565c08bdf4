//! The configuration files of a node's programs.

use std::net::IpAddr;
use std::path::Path;

use kplane_model::{Cidr, Family};
use serde_json::{Value, json};

use super::images::PAUSE;
use super::programs::NodePrograms;

/// containerd's socket inside a node.
pub(super) const SOCKET: &str = "/run/containerd/containerd.sock";
/// The folder of the network's configuration inside a node.
pub(super) const CNI_FOLDER: &str = "/etc/cni/net.d";

/// Returns containerd's configuration, in TOML.
pub(super) fn containerd(programs: &NodePrograms) -> String {
    let (runc, cni) = (programs.runc(), programs.cni());
    let plugins = r#"plugins."io.containerd.cri.v1"#;
    format!(
        r#"version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.tracing", "io.containerd.nri.v1.nri"]
[grpc]
address = "{SOCKET}"
[{plugins}.images".pinned_images]
sandbox = "{PAUSE}"
[{plugins}.runtime"]
disable_apparmor = true
# Where the machine's root may not lower the score, runc fails without a reason.
restrict_oom_score_adj = true
tolerate_missing_hugetlb_controller = true
disable_hugetlb_controller = true
[{plugins}.runtime".cni]
bin_dirs = ["{}"]
conf_dir = "{CNI_FOLDER}"
[{plugins}.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[{plugins}.runtime".containerd.runtimes.runc.options]
BinaryName = "{}"
SystemdCgroup = false
"#,
        cni.display(),
        runc.display(),
    )
}

/// Returns the kubelet's configuration.
pub(super) fn kubelet(client_ca: &Path, dns: IpAddr, resolv_conf: &Path) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": client_ca },
        },
        "authorization": { "mode": "Webhook" },
        "clusterDNS": [dns],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": format!("unix://{SOCKET}"),
        "resolvConf": resolv_conf,
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": false,
        "failSwapOn": false,
        // A full disk of this machine is nothing that a test is about.
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%",
        },
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "serializeImagePulls": false,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
    })
}

/// Returns the network's configuration: a routed link for each pod, and ports of the node for pods that want them.
pub(super) fn cni(pod_cidrs: &[Cidr]) -> Value {
    let range = |cidr: &Cidr| json!([{ "subnet": cidr.to_string() }]);
    let route = |cidr: &Cidr| {
        let all = Cidr::everything(Family::of(cidr.first()));
        json!({ "dst": all.to_string() })
    };
    json!({
        "cniVersion": "0.4.0",
        "name": "kplane-tests",
        "plugins": [
            {
                "type": "ptp",
                "mtu": 1500,
                "ipMasq": false,
                "ipam": {
                    "type": "host-local",
                    // Addresses are free again after a reboot.
                    "dataDir": "/run/cni",
                    "ranges": pod_cidrs.iter().map(range).collect::<Vec<_>>(),
                    "routes": pod_cidrs.iter().map(route).collect::<Vec<_>>(),
                },
            },
            { "type": "portmap", "capabilities": { "portMappings": true } },
        ],
    })
}
