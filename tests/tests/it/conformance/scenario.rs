//! Scenarios: objects for the API server, and packets that show what a proxy makes of them.

use serde_json::{Value, json};

use crate::conformance::stand::Kept;
use kplane_tests::support::fate::Packet;
use kplane_tests::support::objects::{self, addresses};
use kplane_tests::support::{At, Setup};

/// `healthCheckNodePort` of Service number 0.
const FIRST_HEALTH_PORT: u16 = 31_500;

/// Steps that are played one after the other while the proxies run.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    /// The settings with which it is played; empty = all.
    pub(crate) setups: Vec<Setup>,
    pub(crate) steps: Vec<Step>,
}

/// Objects that are written and deleted, and what is looked at then.
#[derive(Clone, Debug, Default)]
pub(crate) struct Step {
    /// Unique; begins with the behaviours it stands for.
    pub(crate) name: String,
    /// More about it, for messages.
    pub(crate) words: String,
    /// Where it begins in `scenarios.txt`.
    pub(crate) line: usize,
    pub(crate) objects: Vec<Value>,
    pub(crate) gone: Vec<Value>,
    pub(crate) packets: Vec<Packet>,
    /// Sockets that stay open from the first step to the last.
    pub(crate) kept: Vec<Kept>,
}

impl Step {
    pub(crate) fn named(name: String, line: usize) -> Self {
        Self {
            name,
            line,
            ..Self::default()
        }
    }
}

impl Scenario {
    /// Whether it is played with all settings.
    pub(crate) fn is_always(&self) -> bool {
        self.setups.is_empty()
    }

    pub(crate) fn is_played_with(&self, setup: Setup) -> bool {
        self.setups.is_empty() || self.setups.contains(&setup)
    }

    /// Whether something changes while the proxies run.
    pub(crate) fn changes(&self) -> bool {
        self.steps.len() > 1
    }
}

/// A ClusterIP Service with the same port in TCP and UDP, in both families.
pub(crate) fn plain(number: u16) -> Value {
    with_udp(objects::service(number))
}

/// The same of type LoadBalancer with a node port and an external IP.
pub(crate) fn everywhere(number: u16) -> Value {
    let mut service = with_udp(objects::load_balancer(number));
    service["spec"]["externalIPs"] = json!(addresses(number, At::ExternalIp));
    service
}

fn with_udp(mut service: Value) -> Value {
    let mut tcp = service["spec"]["ports"][0].take();
    tcp["name"] = json!("tcp");
    let mut udp = tcp.clone();
    udp["name"] = json!("udp");
    udp["protocol"] = json!("UDP");
    service["spec"]["ports"] = json!([tcp, udp]);
    service
}
/// A Service as the API server takes it: manifests may say what it refuses.
pub(crate) fn admissible(mut object: Value) -> Value {
    if object["kind"] != json!("Service") {
        return object;
    }
    let number = number(&object);
    let spec = &mut object["spec"];
    let balancer = spec["type"] == json!("LoadBalancer");
    let external = spec["externalIPs"].as_array().is_some_and(|ips| !ips.is_empty());
    let accessible = balancer || spec["type"] == json!("NodePort") || external;
    let ports = spec["ports"].as_array();
    let has_node_ports = ports.is_some_and(|ports| {
        ports.iter().any(|p| p["nodePort"] != json!(0) && !p["nodePort"].is_null())
    });
    if spec["ipFamilies"].as_array().map(Vec::len) == Some(2) {
        spec["ipFamilyPolicy"] = json!("RequireDualStack");
    }
    if !accessible {
        spec["externalTrafficPolicy"] = Value::Null;
    }
    if !has_node_ports {
        for port in spec["ports"].as_array_mut().into_iter().flatten() {
            port["nodePort"] = Value::Null;
        }
    }
    if balancer {
        if !has_node_ports {
            spec["allocateLoadBalancerNodePorts"] = json!(false);
        }
        if spec["externalTrafficPolicy"] == json!("Local") {
            // Else one is chosen at random that may be another's node port.
            spec["healthCheckNodePort"] = json!(FIRST_HEALTH_PORT + number);
        }
    } else {
        spec["loadBalancerSourceRanges"] = Value::Null;
        object["status"] = Value::Null;
    }
    object
}

/// The number of a Service, which is the end of its name.
fn number(service: &Value) -> u16 {
    let name = service["metadata"]["name"].as_str().unwrap_or_default();
    let digits = name.rsplit('-').next().unwrap_or_default();
    digits.parse().unwrap_or_default()
}
