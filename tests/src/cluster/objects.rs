//! Objects that most tests need, as the API has them.

use kplane_model::Cidr;
use serde_json::{Value, json};
use std::net::IpAddr;

/// Returns a Node with its addresses, ranges of Pods and zone. Create it by
/// [`Cluster::add_node`](super::Cluster::add_node), which also sets the status.
#[must_use]
pub fn node(name: &str, pod_cidrs: &[Cidr], zone: &str) -> Value {
    let cidrs: Vec<String> = pod_cidrs.iter().map(ToString::to_string).collect();
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": name, "labels": {
            "kubernetes.io/hostname": name,
            "topology.kubernetes.io/zone": zone,
        } },
        "spec": { "podCIDR": cidrs.first(), "podCIDRs": cidrs },
    })
}

/// Returns the status of a node that is ready.
#[must_use]
pub fn node_status(ips: &[IpAddr]) -> Value {
    let addresses = ips
        .iter()
        .map(|ip| json!({ "type": "InternalIP", "address": ip }));
    json!({
        "addresses": addresses.collect::<Vec<_>>(),
        "conditions": [{
            "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "",
        }],
    })
}

/// Returns a Deployment of `app: <name>` on one node; there is no scheduler.
#[must_use]
pub fn deployment(namespace: &str, name: &str, replicas: u32, node: &str) -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": name, "namespace": namespace },
        "spec": {
            "replicas": replicas,
            "selector": { "matchLabels": { "app": name } },
            "template": {
                "metadata": { "labels": { "app": name } },
                "spec": {
                    "nodeName": node,
                    "containers": [{ "name": "web", "image": "web", "ports": [{ "containerPort": 8080 }] }],
                },
            },
        },
    })
}

/// Returns a Pod of `app: <app>` on a node.
#[must_use]
pub fn pod(namespace: &str, name: &str, app: &str, node: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "namespace": namespace, "labels": { "app": app } },
        "spec": { "nodeName": node, "containers": [{ "name": "web", "image": "web" }] },
    })
}
