//! Pods of the rig's own image, as JSON.

use serde_json::{Value, json};

use super::images::POD;
use crate::cluster::objects;

/// Returns a Pod with the label `app: <name>`, on a node: an echo server on port 8080 (TCP and UDP) and an HTTP server
/// on port 8081.
pub fn pod(namespace: &str, name: &str, node: &str) -> Value {
    let mut spec = serving();
    spec["nodeSelector"] = json!({ "kubernetes.io/hostname": node });
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "namespace": namespace, "labels": { "app": name } },
        "spec": spec,
    })
}

/// Returns a Deployment of such Pods, which the scheduler spreads over nodes.
pub fn deployment(namespace: &str, name: &str, replicas: u32) -> Value {
    objects::deployment_of(namespace, name, replicas, &serving())
}

/// Returns a Service of the Pods with the label `app: <name>`: port 80 is their echo server, 81 their HTTP server.
pub fn service(namespace: &str, name: &str) -> Value {
    let ports = json!([
        { "name": "echo", "port": 80, "targetPort": 8080 },
        { "name": "http", "port": 81, "targetPort": 8081 },
    ]);
    let spec = json!({ "selector": { "app": name }, "ports": ports });
    objects::service(namespace, name, spec)
}

fn serving() -> Value {
    json!({
        "terminationGracePeriodSeconds": 5,
        "containers": [{
            "name": "pod",
            "image": POD,
            "imagePullPolicy": "Never",
            // Terminating Pods serve for as long as proxies may take to notice.
            "args": ["serve", "-linger", "3s"],
            "ports": [{ "containerPort": 8080 }, { "containerPort": 8081 }],
            "readinessProbe": {
                "httpGet": { "path": "/ready", "port": 8081 }, "periodSeconds": 1,
            },
        }],
    })
}
