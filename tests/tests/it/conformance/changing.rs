//! Scenarios in which something changes while both proxies run, and what it means for new and for
//! old connections.

use kplane_model::{Family, Protocol};
use serde_json::{Value, json};

use crate::conformance::picked::{everywhere, service, with};
use crate::conformance::scenario::Scenario;
use crate::conformance::stand::Kept;
use kplane_tests::support::cluster::node_in;
use kplane_tests::support::objects::{draining_in, ready_in, slices, with_endpoints, with_pods};
use kplane_tests::support::{At, Client, Question, svc};

/// Steps, each with its objects and packets.
pub(crate) struct Change {
    pub(crate) name: String,
    pub(crate) steps: Vec<Step>,
}

/// Objects that are written and deleted, and what is looked at then.
pub(crate) struct Step {
    pub(crate) scenario: Scenario,
    pub(crate) gone: Vec<Value>,
    /// Sockets that stay open from the first step to the last.
    pub(crate) kept: Vec<Kept>,
}

impl Change {
    fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            steps: Vec::new(),
        }
    }

    /// Objects are written, then everybody asks a Service everywhere.
    fn step(mut self, number: u16, objects: impl IntoIterator<Item = Value>) -> Self {
        let name = format!("{}, step {}", self.name, self.steps.len() + 1);
        self.steps.push(Step {
            scenario: Scenario::new(name).objects(objects).everybody(number, &At::ALL),
            gone: Vec::new(),
            kept: Vec::new(),
        });
        self
    }

    /// Instead, or before: objects are deleted.
    fn gone(mut self, objects: Vec<Value>) -> Self {
        if let Some(step) = self.steps.last_mut() {
            step.gone = objects;
        }
        self
    }

    /// Clients keep a flow of each protocol through all steps.
    fn keep(mut self, number: u16, kept: fn(Question) -> Kept, protocol: Protocol) -> Self {
        let clients = [
            Client::Outside,
            Client::PodHere,
            Client::PodThere,
            Client::Node,
        ];
        for step in &mut self.steps {
            for (client, family) in clients.iter().flat_map(|c| Family::ALL.map(|f| (*c, f))) {
                for at in [At::ClusterIp, At::NodePort, At::LoadBalancer] {
                    let to = svc(number).address(at, family, client.node());
                    step.kept.push(kept(Question::new(client, protocol, to)));
                }
            }
        }
        self
    }
}

pub(crate) fn changes() -> Vec<Change> {
    vec![
        moved(),
        deleted(),
        zero(),
        types(),
        external_policy(),
        affinity(),
        ranges(),
        ports(),
        draining(),
        zones(),
    ]
}

fn endpoints(number: u16, pods: &[&str]) -> Vec<Value> {
    let pods: Vec<_> = pods.iter().map(|pod| (*pod, json!({}))).collect();
    slices(&everywhere(number), &pods)
}

fn moved() -> Change {
    Change::new("F1 F5 an endpoint goes and another comes")
        .step(800, with_pods(everywhere(800), &["a"]))
        .step(800, endpoints(800, &["c"]))
        .step(800, endpoints(800, &["b", "c"]))
        .keep(800, Kept::Flow, Protocol::Udp)
        .keep(800, Kept::Flow, Protocol::Tcp)
}

fn deleted() -> Change {
    let objects = with_pods(everywhere(801), &["a", "c"]);
    Change::new("F4 a Service is deleted and comes back")
        .step(801, objects.clone())
        .step(801, [])
        .gone(objects.clone())
        .step(801, with_pods(everywhere(801), &["b"]))
}

fn zero() -> Change {
    Change::new("A18 F4 scaled to zero and back")
        .step(802, with_pods(everywhere(802), &["a"]))
        .step(802, endpoints(802, &[]))
        .step(802, endpoints(802, &["c"]))
        .keep(802, Kept::Flow, Protocol::Udp)
}

fn types() -> Change {
    let external_ips = |service| with(service, "/spec/externalIPs", Value::Null);
    let mut node_port = external_ips(everywhere(803));
    node_port["spec"]["type"] = json!("NodePort");
    Change::new("A6 A7 types change")
        .step(803, with_pods(everywhere(803), &["a", "c"]))
        .step(803, [node_port])
        .step(803, [service(803)])
        .step(803, [everywhere(803)])
}

fn external_policy() -> Change {
    let external = |policy: &str| {
        with(
            everywhere(804),
            "/spec/externalTrafficPolicy",
            json!(policy),
        )
    };
    let internal = with(
        everywhere(804),
        "/spec/internalTrafficPolicy",
        json!("Local"),
    );
    Change::new("A12 A13 policies change")
        .step(804, with_pods(external("Cluster"), &["a", "c"]))
        .step(804, [external("Local")])
        .step(804, [internal])
        .step(804, [external("Cluster")])
}

fn affinity() -> Change {
    let mut sticky = everywhere(805);
    sticky["spec"]["sessionAffinity"] = json!("ClientIP");
    let mut change = Change::new("A11 affinity survives changes of others")
        .step(805, with_pods(sticky.clone(), &["a", "b", "c"]))
        .step(805, with_pods(everywhere(806), &["a"]))
        .step(
            805,
            [with(
                sticky,
                "/metadata/annotations",
                json!({"note": "changed"}),
            )],
        )
        .keep(805, Kept::Choice, Protocol::Tcp);
    for step in &mut change.steps {
        let packets = step.scenario.packets.iter();
        step.scenario.packets = packets.map(|packet| packet.sticky()).collect();
    }
    change
}

fn ranges() -> Change {
    let ranges = |ranges: Value| with(everywhere(807), "/spec/loadBalancerSourceRanges", ranges);
    Change::new("A8 source ranges change")
        .step(807, with_pods(everywhere(807), &["a", "c"]))
        .step(807, [ranges(json!(["172.30.0.3/32", "fd30::3/128"]))])
        .step(807, [ranges(json!(["192.0.2.0/24"]))])
        .step(807, [everywhere(807)])
}

fn ports() -> Change {
    let mut other = everywhere(808);
    for port in other["spec"]["ports"].as_array_mut().into_iter().flatten() {
        port["port"] = json!(81);
        port["nodePort"] = json!(svc(808).node_port() + 1_000);
    }
    Change::new("A20 ports change")
        .step(808, with_pods(everywhere(808), &["a", "c"]))
        .step(808, [other])
        .step(808, [everywhere(808)])
}

fn draining() -> Change {
    let drains = json!({"conditions": {"ready": false, "serving": true, "terminating": true}});
    let both = |a: &Value| slices(&everywhere(809), &[("a", a.clone()), ("c", json!({}))]);
    let last = slices(&everywhere(809), &[("a", drains.clone())]);
    Change::new("B3 F2 an endpoint drains")
        .step(809, with_pods(everywhere(809), &["a"]))
        .step(809, last)
        .step(809, both(&drains))
        .step(809, both(&json!({})))
        .keep(809, Kept::Flow, Protocol::Tcp)
}

/// Last of all, because it counts for all Services.
fn zones() -> Change {
    let hinted = [("a", ready_in("zone-1")), ("c", ready_in("zone-2"))];
    let drains = slices(
        &everywhere(810),
        &[("a", draining_in("zone-1")), ("c", ready_in("zone-2"))],
    );
    Change::new("B2 B9 zones and hints change")
        .step(810, with_endpoints(everywhere(810), &hinted))
        .step(810, [node_in(1, "zone-2")])
        .step(810, [node_in(1, "zone-1")])
        .step(810, drains)
}
