//! The fate of a packet for a Service on one node, from the point of view of its sender (A8, A12-A18).
//!
//! [`fate()`] states the planners' rules once more, for one packet, so that a person can follow them. Property
//! tests compare the two with each other and with packets of real kernels.

use std::net::IpAddr;

use crate::net::EndpointAddr;
use crate::node::NodeFacts;
use crate::select::{Categorized, categorize};
use crate::service::{Endpoint, ServicePort, TrafficPolicy};

#[cfg(test)]
mod tests;

/// The destination of a packet, as the sender writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The Service's address inside the cluster.
    ClusterIp,
    /// An address of the Service's load balancer.
    LoadBalancer(IpAddr),
    /// One of `spec.externalIPs`.
    ExternalIp(IpAddr),
    /// A port on the node's own addresses.
    NodePort,
}

impl Place {
    /// Returns the place of a ServicePort at an address and port; `None` if it has none there. `own`: whether the
    /// address is one of the node's own.
    pub fn find(port: &ServicePort, ip: IpAddr, number: u16, own: bool) -> Option<Self> {
        if number == port.port {
            if ip == port.cluster_ip {
                return Some(Self::ClusterIp);
            }
            if port.load_balancer_ips.contains(&ip) {
                return Some(Self::LoadBalancer(ip));
            }
            if port.external_ips.contains(&ip) {
                return Some(Self::ExternalIp(ip));
            }
        }
        (own && port.node_port == Some(number)).then_some(Self::NodePort)
    }
}

/// The sender of a packet, as the node that handles it sees the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// A Pod of the cluster, with its address if that is known.
    Pod(Option<IpAddr>),
    /// The node itself, with the address from which it sends if that is known; else it sends from one of its own.
    Node(Option<IpAddr>),
    /// A client outside of the cluster, with its address if that is known.
    Outside(Option<IpAddr>),
}

/// Settings of the node's agent about the source of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Masquerade {
    /// The agent knows which addresses are Pods' (`clusterCIDR`, `detectLocalMode`).
    pub pods_known: bool,
    /// The agent masquerades all packets to ClusterIPs (`masqueradeAll`).
    pub all: bool,
}

/// The clients for which policy Local counts on a node, which depends on its agent's backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LocalRule {
    /// Senders outside of the cluster, whose packets are dropped where the node has no endpoint (A14, A16).
    #[default]
    BySender,
    /// All senders, and endpoints of other nodes serve where the node has none (A29): mode ipvs.
    FallsBack,
    /// All senders, who get an error where the node has no endpoint: mode ipvs with `--ipvs-strict-local`. The node
    /// itself still reaches external addresses.
    Strict,
}

/// Settings of the node's agent that decide about packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// Those about the source of packets.
    pub masquerade: Masquerade,
    /// The rule for policy Local.
    pub local: LocalRule,
}

/// Whom the endpoint takes for the client (A15-A17). An endpoint that asks itself always sees the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The sender.
    Sender,
    /// The node.
    Node,
}

/// The end of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// One of the chosen endpoints gets it.
    Reaches,
    /// The sender gets an error at once: no endpoint is usable anywhere, or none on this node and
    /// [`LocalRule::Strict`].
    Refused,
    /// It is dropped: other nodes have endpoints, and the policy is Local.
    Dropped,
    /// It is dropped: the sender is in no range that the Service admits.
    NotAdmitted,
}

/// What happens to a packet, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fate {
    /// The policy that chose the endpoints.
    pub policy: TrafficPolicy,
    /// The policy is Local, and does not count for this sender (A16).
    pub short_cut: bool,
    /// The policy is Local, the node has no endpoint, and those of other nodes serve (A29).
    pub fell_back: bool,
    /// Whether the sender may use the place; `None` if its address is not known and decides.
    pub admitted: Option<bool>,
    /// The endpoints of which one gets the packet.
    pub chosen: Vec<EndpointAddr>,
    /// Whom the endpoint takes for the client.
    pub source: Source,
    /// The end.
    pub outcome: Outcome,
    /// The selection of the node.
    pub selection: Categorized,
}

/// Returns the fate of a packet that a node handles. `endpoints` come from [`merge`](crate::select::merge).
pub fn fate(
    port: &ServicePort,
    endpoints: &[Endpoint],
    node: &NodeFacts,
    setup: Setup,
    (place, sender): (Place, Sender),
) -> Fate {
    let selection = categorize(port, endpoints, &node.name, node.zone.as_deref());
    let masquerade = setup.masquerade;
    let inside = is_inside(masquerade, sender);
    let (policy, short_cut) = match setup.local {
        LocalRule::BySender => policy(port, place, inside),
        LocalRule::FallsBack | LocalRule::Strict => policy(port, place, false),
    };
    let none_here =
        policy == TrafficPolicy::Local && selection.local.as_ref().is_none_or(Vec::is_empty);
    let fell_back = none_here && falls_back(setup.local, place, sender);
    let chosen = match policy {
        TrafficPolicy::Local if !fell_back => selection.local.clone(),
        _ => selection.cluster.clone(),
    };
    let chosen = chosen.unwrap_or_default();
    let admitted = admitted(port, node, place, sender);
    let drops = setup.local == LocalRule::BySender && selection.has_any;
    let outcome = match (admitted, chosen.is_empty()) {
        (Some(false), _) => Outcome::NotAdmitted,
        (_, false) => Outcome::Reaches,
        (_, true) if drops => Outcome::Dropped,
        (_, true) => Outcome::Refused,
    };
    Fate {
        policy,
        short_cut,
        fell_back: fell_back && !chosen.is_empty(),
        admitted,
        source: source(port, masquerade, place, sender),
        chosen,
        outcome,
        selection,
    }
}

/// Returns the policy that counts (A12, A13), and whether a Local one was passed over (A16).
fn policy(port: &ServicePort, place: Place, inside: bool) -> (TrafficPolicy, bool) {
    match (place, port.external_policy) {
        (Place::ClusterIp, _) => (port.internal_policy, false),
        (_, TrafficPolicy::Cluster) => (TrafficPolicy::Cluster, false),
        (_, TrafficPolicy::Local) if inside => (TrafficPolicy::Cluster, true),
        (_, TrafficPolicy::Local) => (TrafficPolicy::Local, false),
    }
}

/// Returns whether endpoints of other nodes serve where the node has none and the policy is Local.
fn falls_back(rule: LocalRule, place: Place, sender: Sender) -> bool {
    let of_node = matches!(sender, Sender::Node(_));
    let external = matches!(place, Place::LoadBalancer(_) | Place::ExternalIp(_));
    match rule {
        LocalRule::BySender => false,
        LocalRule::FallsBack => true,
        LocalRule::Strict => of_node && external,
    }
}

/// Returns whether the agent takes the sender for a part of the cluster (A16).
fn is_inside(masquerade: Masquerade, sender: Sender) -> bool {
    match sender {
        Sender::Pod(_) => masquerade.pods_known,
        Sender::Node(_) => true,
        Sender::Outside(_) => false,
    }
}

/// Returns whether the sender may use a load-balancer address (A8, A9).
fn admitted(port: &ServicePort, node: &NodeFacts, place: Place, sender: Sender) -> Option<bool> {
    if !matches!(place, Place::LoadBalancer(_)) || port.source_ranges.is_empty() {
        return Some(true);
    }
    let within = |ip: IpAddr| port.source_ranges.iter().any(|range| range.contains(ip));
    match sender {
        Sender::Pod(ip) | Sender::Outside(ip) => ip.map(within),
        // The node reaches the address of the load balancer from that address itself, if it has it (A9).
        Sender::Node(Some(ip)) if !port.load_balancer_ips.contains(&ip) => Some(within(ip)),
        Sender::Node(_) => Some(node.addresses.iter().any(|ip| within(*ip))),
    }
}

fn source(port: &ServicePort, masquerade: Masquerade, place: Place, sender: Sender) -> Source {
    let of_pod = matches!(sender, Sender::Pod(_));
    let replaced = match (place, port.external_policy) {
        (Place::ClusterIp, _) => masquerade.all || (masquerade.pods_known && !of_pod),
        (_, TrafficPolicy::Cluster) => true,
        (_, TrafficPolicy::Local) => matches!(sender, Sender::Node(_)),
    };
    if replaced { Source::Node } else { Source::Sender }
}
