//! Places that no Service gets on this node, whatever the control plane sends: the addresses of control
//! planes, and the ports of the node's own programs.
//!
//! The control plane refuses such Services itself. This module protects the node from an old control plane,
//! and from Services that conflict with facts that only the node knows. A ClusterIP is never withheld: it is
//! the API server's choice, and a control plane may be reached through one.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use kplane_model::{Holder, NodeFacts, Protocol, ReservedPorts};

use super::{Frontend, FrontendAddr, Origin, ServicePlan};

/// Places in use that only the agent knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reserved {
    /// Ports of the node's programs, on its own addresses and as node ports.
    pub ports: ReservedPorts,
    /// Addresses of the node's interfaces, besides those of its Node object.
    pub own: BTreeSet<IpAddr>,
    /// Addresses at which control planes are reached.
    pub peers: BTreeSet<SocketAddr>,
    /// Whether no Service gets the address of a control plane on another machine, on any port. This is for
    /// IPVS, which makes addresses of Services the node's own, so that no packet would leave the node for
    /// that address any more.
    pub whole_peers: bool,
}

impl Reserved {
    /// Removes the frontends that no Service gets. Returns the reason if there are any.
    pub fn withhold(&self, node: &NodeFacts, plan: &mut ServicePlan) -> Option<String> {
        let mut first = None;
        let mut withheld = 0_usize;
        plan.frontends.retain(|frontend| {
            let Some(holder) = self.holder(node, frontend) else {
                return true;
            };
            withheld += 1;
            first.get_or_insert((frontend.at, holder));
            false
        });
        let (at, holder) = first?;
        let others = match withheld {
            1 => String::new(),
            _ => format!(" (and {} more like it)", withheld - 1),
        };
        Some(format!(
            "{at}{others} is where {holder}, and a Service there would take over its connections: it \
             is not served there; use another port or another address"
        ))
    }

    fn holder(&self, node: &NodeFacts, frontend: &Frontend) -> Option<Holder> {
        if frontend.origin == Origin::ClusterIp {
            return None;
        }
        match frontend.at {
            FrontendAddr::NodePort { protocol, port } => self.holder_here(node, protocol, port),
            FrontendAddr::Address { ip, protocol, port } => {
                let here = self.is_here(node, ip);
                let is_peer = |peer: &SocketAddr| {
                    let same_port = protocol == Protocol::Tcp && peer.port() == port;
                    peer.ip() == ip && (same_port || self.whole_peers && !here)
                };
                let peer = self.peers.iter().any(is_peer);
                let of_peer = peer.then_some(Holder::ControlPlane);
                of_peer.or_else(|| here.then(|| self.holder_here(node, protocol, port))?)
            }
        }
    }

    fn is_here(&self, node: &NodeFacts, ip: IpAddr) -> bool {
        self.own.contains(&ip) || node.addresses.contains(&ip)
    }

    /// Returns the holder of a port of this node. A control plane on this node listens on the node's other
    /// addresses too.
    fn holder_here(&self, node: &NodeFacts, protocol: Protocol, port: u16) -> Option<Holder> {
        let is_peers = |peer: &SocketAddr| {
            protocol == Protocol::Tcp && peer.port() == port && self.is_here(node, peer.ip())
        };
        let of_peer = self.peers.iter().any(is_peers);
        let held = self.ports.holder(protocol, port);
        held.or(of_peer.then_some(Holder::ControlPlane))
    }
}
