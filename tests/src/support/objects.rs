//! Kubernetes objects for hand-picked tests, as they are written in manifests: dual-stack Services
//! and their EndpointSlices.

use kplane_model::Family;
use kplane_rig::cluster::objects;
use serde_json::{Value, json};

use super::service::{At, PORT, TARGET, node_name, svc};
use super::world::ep;

/// A Service with the ClusterIPs of its number and one TCP port.
pub fn service(number: u16) -> Value {
    let ips = addresses(number, At::ClusterIp);
    let spec = json!({
        "type": "ClusterIP", "clusterIP": ips[0], "clusterIPs": ips,
        "ipFamilies": ["IPv4", "IPv6"],
        "ports": [{"name": "web", "port": PORT, "protocol": "TCP"}],
    });
    objects::service("test", &svc(number).name, spec)
}

/// The same of type LoadBalancer with the node port and load-balancer addresses of its number.
pub fn load_balancer(number: u16) -> Value {
    let mut service = service(number);
    service["spec"]["type"] = json!("LoadBalancer");
    service["spec"]["ports"][0]["nodePort"] = json!(svc(number).node_port());
    let ingress = addresses(number, At::LoadBalancer).map(|ip| json!({"ip": ip}));
    service["status"] = json!({"loadBalancer": {"ingress": ingress}});
    service
}

/// The addresses of a number, IPv4 first.
pub fn addresses(number: u16, at: At) -> [String; 2] {
    Family::ALL.map(|family| svc(number).address(at, family, 1).ip().to_string())
}

/// Slices in both families for a Service: pods of the world by name, each with what else is written
/// of it, such as conditions.
pub fn slices(service: &Value, pods: &[(&str, Value)]) -> Vec<Value> {
    let ports: Vec<Value> = service["spec"]["ports"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|port| json!({"name": port["name"], "protocol": port["protocol"], "port": TARGET}))
        .collect();
    let name = service["metadata"]["name"].as_str().unwrap_or_default();
    let slice = |family: Family| {
        let endpoint = |(pod, more): &(&str, Value)| {
            let mut endpoint = json!({
                "addresses": [ep(pod).address(family).ip().to_string()],
                "nodeName": node_name(ep(pod).node),
            });
            for (field, value) in more.as_object().into_iter().flatten() {
                endpoint[field] = value.clone();
            }
            endpoint
        };
        let kind = family.to_string();
        let slice = format!("{name}-{}", kind.to_lowercase());
        let mut slice = objects::slice("test", &slice, name, pods.iter().map(endpoint));
        slice["addressType"] = json!(kind);
        slice["ports"] = json!(ports);
        slice
    };
    Family::ALL.map(slice).to_vec()
}

/// A Service with these pods, ready.
pub fn with_pods(service: Value, pods: &[&str]) -> Vec<Value> {
    let ready: Vec<_> = pods.iter().map(|pod| (*pod, json!({}))).collect();
    with_endpoints(service, &ready)
}

/// A Service with the slices for these pods.
pub fn with_endpoints(service: Value, pods: &[(&str, Value)]) -> Vec<Value> {
    let slices = slices(&service, pods);
    [vec![service], slices].concat()
}

/// Conditions of an endpoint that drains, and hints for a zone.
pub fn draining_in(zone: &str) -> Value {
    json!({
        "conditions": {"ready": false, "serving": true, "terminating": true},
        "hints": {"forZones": [{"name": zone}]},
    })
}

/// Hints for a zone.
pub fn ready_in(zone: &str) -> Value {
    json!({"hints": {"forZones": [{"name": zone}]}})
}
