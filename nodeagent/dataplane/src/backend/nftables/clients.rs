//! The clients that a group of session affinity remembers, read from and deleted in the kernel. Packets write them;
//! kplane only deletes clients whose endpoint is gone (A11, `stale.rs`).

use std::collections::BTreeMap;
use std::net::IpAddr;

use kplane_model::{EndpointAddr, Family};

use super::affinity::Group;
use super::affinity_id::{AffinityId, GroupPart};
use super::decode::KeyReader;
use super::element::{entry, put_ip, value};
use super::schema::TABLE;
use super::uapi::*;
use kplane_netlink::{
    Attribute, Attributes, Batch, Label, Messages, NetlinkError, NfSocket, Operation, Request,
};

/// Clients in one operation, at 44 bytes each. This is far below the limit of an attribute.
const CHUNK: usize = 1000;

/// A client with its remembered endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Client {
    pub(super) ip: IpAddr,
    pub(super) endpoint: Remembered,
}

/// The data that a group's maps hold for a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Remembered {
    /// An endpoint.
    Whole(EndpointAddr),
    /// IPv6: data in only one of the two maps.
    Part(GroupPart),
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
                (GroupPart::Ports, _) => *port = port_of(data),
                (_, Family::V6) => *ip = ip_of(data, family),
                (_, Family::V4) => {
                    *ip = data.get(..4).and_then(|ip_data| ip_of(ip_data, family));
                    *port = data.get(4..).and_then(port_of);
                }
            }
        }
    }
    Ok(found
        .into_iter()
        .map(|(client, parts)| Client {
            ip: client,
            endpoint: match parts {
                (Some(ip), Some(port)) => Remembered::Whole(EndpointAddr { ip, port }),
                (None, Some(_)) => Remembered::Part(GroupPart::Ports),
                (_, None) => Remembered::Part(GroupPart::Clients),
            },
        })
        .collect())
}

/// Returns client and data of each element. Elements that cannot be decoded are skipped.
fn entries(dump: &[u8], family: Family) -> impl Iterator<Item = (IpAddr, &[u8])> {
    Messages(dump)
        .filter(|m| m.kind == msg::NEWSETELEM)
        .filter_map(|m| m.attributes().get(NFTA_SET_ELEM_LIST_ELEMENTS))
        .flat_map(Attribute::children)
        .filter_map(move |entry| {
            let value = |kind| {
                let value: Attributes<'_> = entry.children().get(kind)?.children();
                Some(value.get(NFTA_DATA_VALUE)?.payload)
            };
            let client = ip_of(value(NFTA_SET_ELEM_KEY)?, family)?;
            Some((client, value(NFTA_SET_ELEM_DATA)?))
        })
}

pub(super) fn ip_of(bytes: &[u8], family: Family) -> Option<IpAddr> {
    KeyReader { bytes, family }.ip()
}

/// Reads a port. A port alone is not padded; a port behind an address is.
pub(super) fn port_of(bytes: &[u8]) -> Option<u16> {
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
