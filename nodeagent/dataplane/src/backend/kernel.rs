//! What the kernel does with packets to one destination, read from the kernel alone: `kpctl why` compares it with what
//! should be.

use std::net::{IpAddr, SocketAddr};

use kplane_model::{EndpointAddr, Family, Protocol, ServiceKey};

/// Maximum number of endpoints in an answer.
pub(super) const MAX_ENDPOINTS: usize = 256;

/// A destination of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PacketTarget {
    /// An address of a Service and a port.
    Address {
        /// Both.
        at: SocketAddr,
        /// The protocol.
        protocol: Protocol,
    },
    /// A port on the node's own addresses.
    NodePort {
        /// The family of the addresses.
        family: Family,
        /// The protocol.
        protocol: Protocol,
        /// The port.
        port: u16,
    },
}

impl PacketTarget {
    /// Returns where clients reach a ServicePort.
    pub fn of_port(
        key: &ServiceKey,
        addresses: impl IntoIterator<Item = IpAddr>,
        port: u16,
        node_port: Option<u16>,
    ) -> impl Iterator<Item = Self> {
        let (family, protocol) = (key.family, key.protocol);
        addresses
            .into_iter()
            .map(move |ip| Self::Address {
                at: SocketAddr::new(ip, port),
                protocol,
            })
            .chain(node_port.map(|port| Self::NodePort {
                family,
                protocol,
                port,
            }))
    }

    /// Returns the family of the addresses.
    pub fn family(self) -> Family {
        match self {
            Self::Address { at, .. } => Family::of(at.ip()),
            Self::NodePort { family, .. } => family,
        }
    }
}

/// What the kernel has for a destination.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelState {
    /// Where it has the destination, such as the names of sets.
    pub frontends: Vec<String>,
    /// The endpoints among which it chooses, 256 at most.
    pub endpoints: Vec<EndpointAddr>,
    /// The endpoints for senders inside of the cluster, if they have some of their own.
    pub inside: Option<Vec<EndpointAddr>>,
    /// The kernel refuses packets to it.
    pub refuses: bool,
    /// The kernel drops packets to it.
    pub drops: bool,
    /// The kernel admits some senders only.
    pub guarded: bool,
    /// The number of endpoints that were left out.
    pub more: usize,
}
