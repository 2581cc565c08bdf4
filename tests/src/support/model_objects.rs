//! A generated case as Kubernetes objects: a Service and its EndpointSlices.

use std::collections::BTreeMap;

use kplane_model::Family;
use kplane_rig::cluster::objects;
use serde_json::{Value, json};

use super::model::{Affinity, Case, Condition, IpMode, Pod, Policy};
use super::service::{At, PORT, node_name, svc};

/// The name of the only port.
const PORT_NAME: &str = "web";

/// The objects of a case, of which this is the number.
pub fn objects(case: &Case, number: u16) -> Vec<Value> {
    let mut objects = vec![service(case, number)];
    objects.extend(slices(case, number));
    objects
}

fn service(case: &Case, number: u16) -> Value {
    let service = svc(number);
    let ip = |at| service.address(at, case.family, 1).ip().to_string();
    let shape = case.place.shape();
    let ingress = shape.load_balancer.map(|mode| {
        let mode = match mode {
            // Unset means the same.
            IpMode::Vip if number.is_multiple_of(2) => Value::Null,
            IpMode::Vip => json!("VIP"),
            IpMode::Proxy => json!("Proxy"),
        };
        json!([{"ip": ip(At::LoadBalancer), "ipMode": mode}])
    });
    let policy = |policy: Policy| match policy {
        Policy::Cluster => "Cluster",
        Policy::Local => "Local",
    };
    let affinity = match case.affinity {
        Affinity::None => "None",
        Affinity::ClientIp => "ClientIP",
    };
    let spec = json!({
        "type": shape.kind,
        "clusterIP": ip(At::ClusterIp), "clusterIPs": [ip(At::ClusterIp)],
        "ipFamilies": [case.family.to_string()],
        "ports": [{
            "name": PORT_NAME, "port": PORT, "protocol": case.protocol.as_str(),
            "nodePort": if shape.node_port { service.node_port() } else { 0 },
        }],
        "externalIPs": shape.external.then(|| [ip(At::ExternalIp)]),
        "internalTrafficPolicy": policy(case.internal),
        "externalTrafficPolicy": policy(case.external),
        "sessionAffinity": affinity,
        "loadBalancerSourceRanges": case.source_ranges(),
    });
    let mut object = objects::service("test", &service.name, spec);
    object["status"] = json!({"loadBalancer": {"ingress": ingress}});
    object
}

/// A slice for each target port (A28), and one more for endpoints that are said twice (A27).
fn slices(case: &Case, number: u16) -> Vec<Value> {
    let mut by_port = BTreeMap::<(u16, bool), Vec<Value>>::new();
    for pod in case.pods() {
        let endpoint = endpoint(&pod, case.family);
        by_port.entry((pod.port, false)).or_default().push(endpoint);
        if pod.reused {
            let mut gone = pod.clone();
            gone.condition = Condition::Terminated;
            let gone = self::endpoint(&gone, case.family);
            by_port.entry((pod.port, true)).or_default().push(gone);
        }
    }
    let name = svc(number).name;
    let slice = |(index, ((port, _), endpoints)): (usize, ((u16, bool), Vec<Value>))| {
        let mut slice = objects::slice("test", &format!("{name}-{index}"), &name, endpoints);
        slice["addressType"] = json!(case.family.to_string());
        slice["ports"] =
            json!([{"name": PORT_NAME, "port": port, "protocol": case.protocol.as_str()}]);
        slice
    };
    by_port.into_iter().enumerate().map(slice).collect()
}

fn endpoint(pod: &Pod, family: Family) -> Value {
    // A27: what is unset means ready, serving, not terminating.
    let conditions = match pod.condition {
        Condition::Ready if pod.name == "b" => json!({}),
        Condition::Ready => json!({"ready": true, "serving": true, "terminating": false}),
        Condition::Draining if pod.name == "c" => json!({"ready": false, "terminating": true}),
        Condition::Draining => json!({"ready": false, "serving": true, "terminating": true}),
        Condition::ServingOnly => json!({"ready": false, "serving": true, "terminating": false}),
        Condition::Terminated => json!({"ready": false, "serving": false, "terminating": true}),
    };
    let hint = |hint: &Option<String>| hint.as_ref().map(|name| json!([{"name": name}]));
    json!({
        "addresses": [pod.address(family).ip().to_string()],
        "conditions": conditions,
        "nodeName": node_name(pod.node),
        "hints": {"forZones": hint(&pod.zone_hint), "forNodes": hint(&pod.node_hint)},
    })
}
