//! What must happen to a case's packets: the sections (a) and (b) of kube-proxy's behaviours, once
//! more in plain words. Nothing here is the product's: selection and planning are said again.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use super::cluster::zone_name;
use super::fate::Source;
use super::model::{Affinity, Asker, Case, Condition, IpMode, Place, Pod, Policy, Ranges};
use super::service::{At, node_ip, node_name};
use super::under_test::UnderTest;
use super::world::Setup;

/// What must happen, and the behaviours that decided it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    pub fate: Fate,
    pub ids: Vec<&'static str>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Each of these endpoints may answer and no other.
    Reach {
        endpoints: BTreeSet<SocketAddr>,
        source: Source,
        /// All connections of a client reach the same one.
        sticky: bool,
    },
    /// The client is told that nobody is there.
    Refused,
    /// Silence.
    Dropped,
    /// Nothing is done to the packet, so it does not reach an endpoint.
    Untouched,
}

/// What must happen to a case on the calling thread's backend.
pub fn expect(case: &Case) -> Expected {
    let mut ids = Vec::new();
    let iptables = UnderTest::current().is_ok_and(UnderTest::is_iptables);
    let mut fate = fate(case, iptables, &mut ids);
    if iptables && is_left_alone(case, &fate) {
        fate = Fate::Untouched;
    }
    ids.sort_unstable();
    ids.dedup();
    Expected { fate, ids }
}

/// Refusals that mode iptables does not have: of unused ports (A20), and to the node itself where
/// it sends to others' addresses (C1).
fn is_left_alone(case: &Case, fate: &Fate) -> bool {
    let at = case.place.at();
    let unused = case.place == Place::UnusedPort;
    let elsewhere = matches!(at, At::ExternalIp | At::LoadBalancer);
    *fate == Fate::Refused && (unused || elsewhere && case.asker == Asker::Node)
}

fn fate(case: &Case, iptables: bool, ids: &mut Vec<&'static str>) -> Fate {
    if let Some(fate) = not_captured(case, ids) {
        return fate;
    }
    // A8, A10: before anything else, with endpoints or without; iptables: with endpoints only.
    let firewall = case.place.is_load_balancer() && (!iptables || has_any(case));
    if firewall && !is_admitted(case, ids) {
        ids.extend(["A8", "A10"]);
        return Fate::Dropped;
    }
    let selected = if uses_local(case, ids) { local(case, ids) } else { cluster(case, ids) };
    if !selected.is_empty() {
        return Fate::Reach {
            endpoints: selected.iter().map(|p| p.address(case.family)).collect(),
            source: source(case, ids),
            sticky: case.affinity == Affinity::ClientIp,
        };
    }
    ids.push("A18");
    if has_any(case) { Fate::Dropped } else { Fate::Refused }
}

/// Places that are no place of the Service's.
fn not_captured(case: &Case, ids: &mut Vec<&'static str>) -> Option<Fate> {
    let (id, fate) = match case.place {
        Place::UnusedPort => ("A20", Fate::Refused),
        Place::LoadBalancerProxy => ("A6", Fate::Untouched),
        Place::NodePortNotAllocated => ("A7", Fate::Untouched),
        _ => return None,
    };
    ids.push(id);
    Some(fate)
}

/// A8: /0 is as if nothing were written. A9: with a node's address the VIP itself is admitted.
fn is_admitted(case: &Case, ids: &mut Vec<&'static str>) -> bool {
    match case.ranges {
        Ranges::None => true,
        Ranges::Everything => {
            ids.push("A8");
            true
        }
        Ranges::Excluding => false,
        Ranges::Admitting if case.asker == Asker::NodeFromVip => {
            // The client's usual address is the node's own in IPv6 only.
            ids.push("A9");
            node_is_usual_source(case)
        }
        Ranges::Admitting => true,
        Ranges::Node if case.asker == Asker::NodeFromVip => {
            ids.push("A9");
            true
        }
        Ranges::Node => case.asker == Asker::Node && node_is_usual_source(case),
    }
}

/// Node-1 sends from its primary address, if not from the load balancer's.
fn node_is_usual_source(case: &Case) -> bool {
    let client = case.asker.client();
    client.source(case.family) == node_ip(client.node(), case.family)
}

/// A12 for ClusterIPs; A13, A16 for the others.
fn uses_local(case: &Case, ids: &mut Vec<&'static str>) -> bool {
    if case.place.at() == At::ClusterIp {
        ids.push("A12");
        return case.internal == Policy::Local;
    }
    ids.push("A13");
    is_external_local(case) && {
        ids.push("A16");
        !is_pod(case) && !is_node(case)
    }
}

/// A13, A14.
fn is_external_local(case: &Case) -> bool {
    case.external == Policy::Local && is_accessible(case)
}

/// A14
fn is_accessible(case: &Case) -> bool {
    let shape = case.place.shape();
    shape.node_port || shape.external || shape.load_balancer == Some(IpMode::Vip)
}

/// A16: only a detector tells pods.
fn is_pod(case: &Case) -> bool {
    let pods = [Asker::PodHere, Asker::PodThere, Asker::Endpoint];
    case.setup.knows_pods() && pods.contains(&case.asker)
}

fn is_node(case: &Case) -> bool {
    matches!(case.asker, Asker::Node | Asker::NodeFromVip)
}

/// A15, A16, A17
fn source(case: &Case, ids: &mut Vec<&'static str>) -> Source {
    ids.push("A15");
    let all = matches!(
        case.setup,
        Setup::MasqueradeAll | Setup::MasqueradeAllNoPodRanges
    );
    let masquerade = if case.place.at() == At::ClusterIp {
        ids.push("A17");
        all || (case.setup.knows_pods() && !is_pod(case))
    } else if is_external_local(case) {
        // A16 (i), (iii) keep the client; (ii) does not.
        is_node(case)
    } else {
        true
    };
    if masquerade { Source::Node } else { Source::Client }
}

/// B6: ready or draining, anywhere.
fn has_any(case: &Case) -> bool {
    case.pods().iter().any(|pod| is_ready(pod) || is_draining(pod))
}

fn is_ready(pod: &Pod) -> bool {
    pod.condition == Condition::Ready
}

/// B7: serving is not enough, it must be terminating.
fn is_draining(pod: &Pod) -> bool {
    pod.condition == Condition::Draining
}

/// The name of the node that handles the client's packets, and its zone.
fn node_and_zone(case: &Case) -> (String, String) {
    let number = case.asker.client().node();
    (node_name(number), zone_name(number))
}

/// B2, B3
fn cluster(case: &Case, ids: &mut Vec<&'static str>) -> Vec<Pod> {
    let pods = case.pods();
    let ready: Vec<Pod> = pods.iter().filter(|pod| is_ready(pod)).cloned().collect();
    if ready.is_empty() {
        ids.extend(["B3", "B7"]);
        return pods.into_iter().filter(is_draining).collect();
    }
    let (node, zone) = node_and_zone(case);
    let for_node = |pod: &Pod| pod.node_hint.as_ref() == Some(&node);
    let for_zone = |pod: &Pod| pod.zone_hint.as_ref() == Some(&zone);
    ids.push("B2");
    if ready.iter().all(|pod| pod.node_hint.is_some()) && ready.iter().any(for_node) {
        return ready.into_iter().filter(for_node).collect();
    }
    if ready.iter().all(|pod| pod.zone_hint.is_some()) && ready.iter().any(for_zone) {
        return ready.into_iter().filter(for_zone).collect();
    }
    ready
}

/// B5: topology does not count, and draining serves when nothing is ready on the node.
fn local(case: &Case, ids: &mut Vec<&'static str>) -> Vec<Pod> {
    ids.push("B5");
    let number = case.asker.client().node();
    let here: Vec<Pod> = case.pods().into_iter().filter(|pod| pod.node == number).collect();
    let ready: Vec<Pod> = here.iter().filter(|pod| is_ready(pod)).cloned().collect();
    if !ready.is_empty() {
        return ready;
    }
    ids.push("B7");
    here.into_iter().filter(is_draining).collect()
}
