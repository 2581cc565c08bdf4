//! The clients that a group of session affinity remembers: packets write them, we only let clients
//! go whose endpoint is gone (A11).

use std::collections::BTreeMap;
use std::net::IpAddr;

use kplane_model::{EndpointAddr, Family};

use super::affinity::{AffinityId, Group, Part};
use super::decode::Reader;
use super::element::{entry, put_ip, value};
use super::kernel::Kernel;
use super::schema::TABLE;
#[allow(
    clippy::wildcard_imports,
    reason = "constants named as in the kernel's headers"
)]
use super::uapi::*;
use kplane_netlink::{
    Attribute, Attributes, Batch, CommitError, Label, Messages, NetlinkError, NfSocket, Operation,
    Request,
};

/// Clients in one operation: 44 bytes each, far below what an attribute holds.
const CHUNK: usize = 1000;

/// How often a group is looked through. A client that is forgotten by itself between looking and
/// deleting spoils the deletion of the others: then all is done again.
const ATTEMPTS: u32 = 8;

/// A client, and what is remembered of its endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Client {
    pub(super) ip: IpAddr,
    pub(super) endpoint: Remembered,
}

/// What the maps of a group hold for a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Remembered {
    /// An endpoint.
    Whole(EndpointAddr),
    /// IPv6: only in one of the two maps.
    Part(Part),
}

/// Clients could not be let go.
#[derive(Debug, thiserror::Error)]
pub(super) enum ForgetError {
    #[error("cannot read who is remembered: {0}")]
    Read(#[from] NetlinkError),
    #[error("cannot forget clients: {0}")]
    Forget(#[from] CommitError),
    #[error("others appear all the time")]
    KeepsChanging,
}

/// Forgets all clients of a group whose endpoint is not one of `endpoints` (sorted). Comes behind
/// the transaction that took endpoints away: from then on, only a client that is still remembered
/// with such an endpoint can get it. A packet that is just doing so puts it back, but is done with
/// that when the kernel acknowledges the deletion, hence the last look that finds nobody.
pub(super) fn forget_stale<K: Kernel>(
    kernel: &mut K,
    family: Family,
    group: AffinityId,
    endpoints: &[EndpointAddr],
) -> Result<(), ForgetError> {
    let stays = |client: &Client| match client.endpoint {
        Remembered::Whole(endpoint) => endpoints.binary_search(&endpoint).is_ok(),
        Remembered::Part(_) => false,
    };
    for _ in 0..ATTEMPTS {
        let mut clients = kernel.clients(family, group)?;
        clients.retain(|client| !stays(client));
        if clients.is_empty() {
            return Ok(());
        }
        match kernel.forget(family, group, &clients) {
            Ok(()) => {}
            Err(CommitError::Rejected { .. } | CommitError::Refused(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(ForgetError::KeepsChanging)
}

/// Reads all clients of a group.
pub(super) fn read(
    socket: &mut NfSocket,
    family: Family,
    group: AffinityId,
) -> Result<Vec<Client>, NetlinkError> {
    let mut found: BTreeMap<IpAddr, (Option<IpAddr>, Option<u16>)> = BTreeMap::new();
    for map in Group::maps(family) {
        let name = group.name(*map);
        let request = Request::new("read clients", msg::GETSETELEM, nfproto(family), |w| {
            w.str(NFTA_SET_ELEM_LIST_TABLE, TABLE);
            w.str(NFTA_SET_ELEM_LIST_SET, &name);
        });
        let dump = socket.dump(request)?;
        for (client, data) in entries(&dump, family) {
            let (ip, port) = found.entry(client).or_default();
            match (map, family) {
                (Part::Ports, _) => *port = port_of(data),
                (_, Family::V6) => *ip = ip_of(data, family),
                (_, Family::V4) => {
                    *ip = data.get(..4).and_then(|ip_data| ip_of(ip_data, family));
                    *port = data.get(4..).and_then(port_of);
                }
            }
        }
    }
    let clients = found.into_iter().map(|(client, parts)| Client {
        ip: client,
        endpoint: match parts {
            (Some(ip), Some(port)) => Remembered::Whole(EndpointAddr { ip, port }),
            (None, Some(_)) => Remembered::Part(Part::Ports),
            (_, None) => Remembered::Part(Part::Clients),
        },
    });
    Ok(clients.collect())
}

/// Client and data of each element; what cannot be read as such is passed over.
fn entries(dump: &[u8], family: Family) -> impl Iterator<Item = (IpAddr, &[u8])> {
    let messages = Messages(dump).filter(|m| m.kind == msg::NEWSETELEM);
    let lists = messages.filter_map(|m| m.attributes().get(NFTA_SET_ELEM_LIST_ELEMENTS));
    let entries = lists.flat_map(Attribute::children);
    entries.filter_map(move |entry| {
        let value = |kind| {
            let value: Attributes<'_> = entry.children().get(kind)?.children();
            Some(value.get(NFTA_DATA_VALUE)?.payload)
        };
        let client = ip_of(value(NFTA_SET_ELEM_KEY)?, family)?;
        Some((client, value(NFTA_SET_ELEM_DATA)?))
    })
}

fn ip_of(bytes: &[u8], family: Family) -> Option<IpAddr> {
    Reader { bytes, family }.ip()
}

/// A port alone is not padded, one behind an address is.
fn port_of(bytes: &[u8]) -> Option<u16> {
    let port = bytes.first_chunk()?;
    Some(u16::from_be_bytes(*port))
}

/// Appends operations that forget clients of a group.
pub(super) fn push_forget(
    batch: &mut Batch,
    family: Family,
    group: AffinityId,
    clients: &[Client],
) {
    for map in Group::maps(family) {
        let name = group.name(*map);
        let in_map = |client: &&Client| match client.endpoint {
            Remembered::Whole(_) => true,
            Remembered::Part(part) => part == *map,
        };
        let clients: Vec<&Client> = clients.iter().filter(in_map).collect();
        for chunk in clients.chunks(CHUNK) {
            let operation = Operation {
                label: Label {
                    action: "forget clients",
                    object: "of session affinity",
                },
                kind: msg::DELSETELEM,
                flags: 0,
                family: nfproto(family),
            };
            batch.push(operation, |w| {
                w.str(NFTA_SET_ELEM_LIST_TABLE, TABLE);
                w.str(NFTA_SET_ELEM_LIST_SET, &name);
                w.nest(NFTA_SET_ELEM_LIST_ELEMENTS, |list| {
                    for client in chunk {
                        entry(list, |w| {
                            value(w, NFTA_SET_ELEM_KEY, |b| put_ip(b, client.ip));
                        });
                    }
                });
            });
        }
    }
}
