//! What the kernel does with one destination: only the elements that concern it are read, a few short questions
//! whatever the size of the table.

use kplane_model::EndpointAddr;

use super::element::{Data, Destination, Element, ElementOp, Key, NodePort, encode};
use super::readback::{ReadError, decode_elements};
use super::schema::{Balancer, Class, Set, TABLE};
use super::uapi::*;
use super::word::Word;
use crate::backend::kernel::{KernelState, MAX_ENDPOINTS, PacketTarget};
use crate::plan::Unserved;
use kplane_netlink::{Errno, NfSocket, Request};

/// Reads what the kernel has for a destination.
///
/// # Errors
/// [`ReadError`].
pub(in crate::backend) fn look_up(target: PacketTarget) -> Result<KernelState, ReadError> {
    let mut reader = Reader {
        socket: NfSocket::open()?,
        target,
    };
    let (map, usual, inside) = match target {
        PacketTarget::Address { .. } => (Set::Places, Balancer::Service, Balancer::InsideService),
        PacketTarget::NodePort { .. } => {
            (Set::Nodeports, Balancer::Nodeport, Balancer::InsideNodeport)
        }
    };
    let mut state = KernelState::default();
    let guards: &[Set] = if usual.by_address() { &[Set::FirewallServices] } else { &[] };
    for set in guards {
        state.guarded = reader.get(*set, None)?.is_some();
        state.frontends.extend(state.guarded.then(|| set.name().to_owned()));
    }
    let Some(Data::Number(word)) = reader.get(map, None)?.and_then(|element| element.data) else {
        return Ok(state);
    };
    let word = Word(word);
    state.frontends.insert(0, map.name().to_owned());
    state.refuses = word.unserved() == Some(Unserved::Reject);
    state.drops = word.unserved() == Some(Unserved::Drop);
    state.endpoints = reader.endpoints(word, usual, &mut state.more)?;
    if word.has(Word::INSIDE) {
        state.inside = Some(reader.endpoints(word, inside, &mut state.more)?);
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
        word: Word,
        balancer: Balancer,
        more: &mut usize,
    ) -> Result<Vec<EndpointAddr>, ReadError> {
        let largest = word.class(balancer).map_or(0, Class::modulus);
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
