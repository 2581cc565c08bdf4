//! Objects that most tests need, as the API has them.

use std::fmt::Display;
use std::net::IpAddr;

use kplane_model::{Cidr, Family};
use serde_json::{Value, json};

/// Returns a Node with its addresses, ranges of Pods and zone. Create it by
/// [`Cluster::add_node`](super::Cluster::add_node), which also sets the status.
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
pub fn node_status(ips: &[IpAddr]) -> Value {
    let addresses = ips.iter().map(|ip| json!({ "type": "InternalIP", "address": ip }));
    json!({
        "addresses": addresses.collect::<Vec<_>>(),
        "conditions": [{
            "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "",
        }],
    })
}

/// Returns a Service with the port `http`, 80 of TCP, unless `spec` has others.
pub fn service(namespace: &str, name: &str, mut spec: Value) -> Value {
    if spec["ports"].is_null() {
        spec["ports"] = json!([{ "name": "http", "port": 80, "protocol": "TCP" }]);
    }
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": name, "namespace": namespace },
        "spec": spec,
    })
}

/// Returns an EndpointSlice of a Service, with the port `http`, 8080 of TCP, for addresses of one family
/// ([`endpoint`]).
pub fn slice(
    namespace: &str,
    name: &str,
    service: &str,
    endpoints: impl IntoIterator<Item = Value>,
) -> Value {
    let endpoints: Vec<Value> = endpoints.into_iter().collect();
    let first = endpoints.first().and_then(|e| e["addresses"][0].as_str());
    let family = first.map_or(Family::V4, |ip| {
        if ip.contains(':') { Family::V6 } else { Family::V4 }
    });
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name, "namespace": namespace,
            "labels": { "kubernetes.io/service-name": service },
        },
        "addressType": family.to_string(),
        "ports": [{ "name": "http", "port": 8080, "protocol": "TCP" }],
        "endpoints": endpoints,
    })
}

/// Returns an endpoint of a [slice](slice()) that is ready, on a node.
pub fn endpoint(ip: impl Display, node: &str) -> Value {
    json!({
        "addresses": [ip.to_string()], "nodeName": node,
        "conditions": { "ready": true, "serving": true, "terminating": false },
    })
}

/// Returns a Deployment of `app: <name>` on one node; there is no scheduler.
pub fn deployment(namespace: &str, name: &str, replicas: u32, node: &str) -> Value {
    let container = json!({ "name": "web", "image": "web", "ports": [{ "containerPort": 8080 }] });
    let pods = json!({ "nodeName": node, "containers": [container] });
    deployment_of(namespace, name, replicas, &pods)
}

/// Returns a Deployment of `app: <name>`, with the `spec` of its Pods.
pub fn deployment_of(namespace: &str, name: &str, replicas: u32, pods: &Value) -> Value {
    let labels = json!({ "app": name });
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": name, "namespace": namespace },
        "spec": {
            "replicas": replicas,
            "selector": { "matchLabels": labels },
            "template": { "metadata": { "labels": labels }, "spec": pods },
        },
    })
}

/// Returns a Pod of `app: <app>` on a node.
pub fn pod(namespace: &str, name: &str, app: &str, node: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "namespace": namespace, "labels": { "app": app } },
        "spec": { "nodeName": node, "containers": [{ "name": "web", "image": "web" }] },
    })
}
