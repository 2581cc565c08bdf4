//! Places that no Service gets on this node, whatever the control plane says: the way to it, and the
//! ports of the node's own programs.
//!
//! The control plane refuses such Services itself; this holds for one that is old, or that does not
//! know what only the node knows. A ClusterIP is never withheld: it is the API server's choice, and a
//! control plane may well be reached through one.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use kplane_model::{Holder, NodeFacts, Protocol, ReservedPorts};

use super::{Frontend, FrontendAddr, Origin, ServicePlan};

/// What only the agent knows of places that are taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reserved {
    /// Ports of the node's programs, on its own addresses and as node ports.
    pub ports: ReservedPorts,
    /// Addresses of the node's interfaces, besides those of its Node object.
    pub own: BTreeSet<IpAddr>,
    /// Where control planes are reached.
    pub peers: BTreeSet<SocketAddr>,
    /// No Service has an address of a control plane on another machine, on no port: the backend makes
    /// Services' addresses the node's own (IPVS), so that no packet would leave for it any more.
    pub whole_peers: bool,
}

impl Reserved {
    /// Takes the frontends out that no Service gets; says why, if there are any.
    #[must_use]
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

    /// Who has a port of this node. A control plane on it listens on its other addresses too.
    fn holder_here(&self, node: &NodeFacts, protocol: Protocol, port: u16) -> Option<Holder> {
        let is_peers = |peer: &SocketAddr| {
            protocol == Protocol::Tcp && peer.port() == port && self.is_here(node, peer.ip())
        };
        let of_peer = self.peers.iter().any(is_peers);
        let held = self.ports.holder(protocol, port);
        held.or(of_peer.then_some(Holder::ControlPlane))
    }
}
