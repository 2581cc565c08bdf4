//! Pods of the rig's own image, as JSON.

use serde_json::{Value, json};

use super::images::POD;

/// Returns a Pod with the label `app: <name>`, on a node: an echo server on port 8080 (TCP and UDP) and an HTTP server
/// on port 8081.
#[must_use]
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
#[must_use]
pub fn deployment(namespace: &str, name: &str, replicas: u32) -> Value {
    let labels = json!({ "app": name });
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": name, "namespace": namespace },
        "spec": {
            "replicas": replicas,
            "selector": { "matchLabels": labels },
            "template": { "metadata": { "labels": labels }, "spec": serving() },
        },
    })
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
