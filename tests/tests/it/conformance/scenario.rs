//! Scenarios: objects for the API server, and packets that show what a proxy makes of them.

use kplane_model::{Family, Protocol};
use serde_json::{Value, json};

use crate::conformance::fate::Packet;
use kplane_tests::support::{At, Client, Question, Setup, svc};

/// `healthCheckNodePort` of Service number 0.
const FIRST_HEALTH_PORT: u16 = 31_500;

/// Objects and packets.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    /// Unique; begins with the behaviours it stands for.
    pub(crate) name: String,
    /// More about it, for messages.
    pub(crate) words: String,
    pub(crate) objects: Vec<Value>,
    pub(crate) packets: Vec<Packet>,
    /// The settings with which its packets are played; empty = all.
    pub(crate) setups: Vec<Setup>,
}

impl Scenario {
    pub(crate) fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            words: String::new(),
            objects: Vec::new(),
            packets: Vec::new(),
            setups: vec![Setup::PodRanges],
        }
    }

    /// Played with all settings.
    pub(crate) fn always(mut self) -> Self {
        self.setups.clear();
        self
    }

    /// Objects, as the API server takes them.
    pub(crate) fn objects(mut self, objects: impl IntoIterator<Item = Value>) -> Self {
        self.objects.extend(objects.into_iter().map(admissible));
        self
    }

    /// One packet.
    pub(crate) fn packet(mut self, question: Question) -> Self {
        self.packets.push(Packet::new(question));
        self
    }

    /// All clients ask a Service at these places, in both families, by TCP and UDP.
    pub(crate) fn everybody(self, number: u16, places: &[At]) -> Self {
        self.clients(number, places, &Client::ALL)
    }

    /// The same of some clients.
    pub(crate) fn clients(mut self, number: u16, places: &[At], clients: &[Client]) -> Self {
        for (at, client) in places.iter().flat_map(|at| clients.iter().map(move |c| (*at, *c))) {
            for family in Family::ALL {
                let to = svc(number).address(at, family, client.node());
                for protocol in [Protocol::Tcp, Protocol::Udp] {
                    self = self.packet(Question::new(client, protocol, to));
                }
            }
        }
        self
    }

    /// All its packets are of Services with session affinity.
    pub(crate) fn sticky(mut self) -> Self {
        self.packets = self.packets.into_iter().map(Packet::sticky).collect();
        self
    }

    /// Whether it is played with all settings.
    pub(crate) fn is_always(&self) -> bool {
        self.setups.is_empty()
    }

    pub(crate) fn is_played_with(&self, setup: Setup) -> bool {
        self.setups.is_empty() || self.setups.contains(&setup)
    }
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
