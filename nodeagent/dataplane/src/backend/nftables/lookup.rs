//! What the kernel does with one destination: only the elements that concern it are read, some fifty short questions
//! whatever the size of the table.

use kplane_model::EndpointAddr;

use super::element::{Destination, Element, ElementOp, Key, NodePort, encode};
use super::readback::{ReadError, decode_elements};
use super::schema::{Balancer, Class, Set, TABLE};
use super::uapi::*;
use crate::backend::kernel::{KernelState, MAX_ENDPOINTS, PacketTarget};
use kplane_netlink::{Errno, NfSocket, Request};

/// Sets that name a destination by address, besides those of classes and endpoints.
const BY_ADDRESS: [Set; 7] = [
    Set::Services,
    Set::InsideServices,
    Set::RejectServices,
    Set::DropServices,
    Set::MasqueradeServices,
    Set::FirewallServices,
    Set::RememberServices,
];
/// The same for node ports.
const BY_PORT: [Set; 6] = [
    Set::Nodeports,
    Set::InsideNodeports,
    Set::RejectNodeports,
    Set::DropNodeports,
    Set::MasqueradeNodeports,
    Set::RememberNodeports,
];

/// Reads what the kernel has for a destination.
///
/// # Errors
/// [`ReadError`].
pub(in crate::backend) fn look_up(target: PacketTarget) -> Result<KernelState, ReadError> {
    let mut reader = Reader {
        socket: NfSocket::open()?,
        target,
    };
    let sets: &[Set] = match target {
        PacketTarget::Address { .. } => &BY_ADDRESS,
        PacketTarget::NodePort { .. } => &BY_PORT,
    };
    let mut held = Vec::new();
    for set in sets {
        if reader.get(*set, None)?.is_some() {
            held.push(*set);
        }
    }
    let by_address = matches!(target, PacketTarget::Address { .. });
    let (usual, inside) = if by_address {
        (Balancer::Service, Balancer::InsideService)
    } else {
        (Balancer::Nodeport, Balancer::InsideNodeport)
    };
    let has = |set| held.contains(&set);
    let inside_apart = has(Set::InsideServices) || has(Set::InsideNodeports);
    let refuses = has(Set::RejectServices) || has(Set::RejectNodeports);
    let drops = has(Set::DropServices) || has(Set::DropNodeports);
    let mut state = KernelState {
        refuses,
        drops,
        guarded: has(Set::FirewallServices),
        frontends: held.iter().map(|set| set.name().to_owned()).collect(),
        ..KernelState::default()
    };
    state.endpoints = reader.endpoints(usual, &mut state.frontends, &mut state.more)?;
    if inside_apart {
        let endpoints = reader.endpoints(inside, &mut state.frontends, &mut state.more)?;
        state.inside = Some(endpoints);
    }
    Ok(state)
}

struct Reader {
    socket: NfSocket,
    target: PacketTarget,
}

impl Reader {
    /// Returns the key of the destination, or of one of its endpoints.
    fn key(&self, index: Option<u32>) -> Key {
        match self.target {
            PacketTarget::Address { at, protocol } => {
                let destination = Destination {
                    ip: at.ip(),
                    protocol,
                    port: at.port(),
                };
                match index {
                    None => Key::Service(destination),
                    Some(index) => Key::ServiceSlot(destination, index),
                }
            }
            PacketTarget::NodePort { protocol, port, .. } => {
                let node_port = NodePort { protocol, port };
                match index {
                    None => Key::NodePort(node_port),
                    Some(index) => Key::NodePortSlot(node_port, index),
                }
            }
        }
    }

    /// Reads one element; `None` if the set lacks it, or if there is no such set.
    fn get(&mut self, set: Set, index: Option<u32>) -> Result<Option<Element>, ReadError> {
        let family = self.target.family();
        let element = Element {
            set,
            key: self.key(index),
            data: None,
        };
        let request = Request::new("read an element", msg::GETSETELEM, nfproto(family), |w| {
            w.str(NFTA_SET_ELEM_LIST_TABLE, TABLE);
            w.str(NFTA_SET_ELEM_LIST_SET, set.name());
            w.nest(NFTA_SET_ELEM_LIST_ELEMENTS, |w| {
                encode(w, ElementOp::Delete, &element);
            });
        });
        match self.socket.get(request) {
            Err(error) if error.errno() == Some(Errno::ENOENT) => Ok(None),
            answer => Ok(decode_elements(&answer?, family, set)?.pop()),
        }
    }

    /// Reads the endpoints among which the kernel draws.
    fn endpoints(
        &mut self,
        balancer: Balancer,
        frontends: &mut Vec<String>,
        more: &mut usize,
    ) -> Result<Vec<EndpointAddr>, ReadError> {
        let mut largest = 0;
        for class in Class::all() {
            let set = Set::Class(balancer, class);
            if self.get(set, None)?.is_some() {
                frontends.push(set.name().to_owned());
                largest = class.modulus();
            }
        }
        let mut endpoints = Vec::new();
        for index in 0..largest {
            let element = self.get(Set::Endpoints(balancer), Some(index))?;
            let Some(endpoint) = element.and_then(|element| element.data?.endpoint()) else {
                break;
            };
            if endpoints.len() < MAX_ENDPOINTS {
                endpoints.push(endpoint);
            } else {
                *more += 1;
            }
        }
        Ok(endpoints)
    }
}
