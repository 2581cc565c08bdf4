//! Clients of session affinity, for the agent's answers. A map may hold 262,144 of them, so lists are read as they come,
//! and one client is asked for by its key.

use std::net::IpAddr;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use kplane_model::{EndpointAddr, Family};

use super::affinity::Group;
use super::affinity_id::{AffinityId, GroupPart, Scope};
use super::clients::{ip_of, port_of};
use super::element::{entry, put_ip, value};
use super::schema::TABLE;
use super::uapi::*;
use crate::backend::affinity::{AffinityClient, AffinityClients, AffinityPort, ClientQuery, LATE};
use crate::chain;
use kplane_netlink::{
    Attribute, Attributes, Errno, Message, Messages, NetlinkError, NfSocket, Request,
};

/// An element of a group's map.
struct MapElement {
    client: IpAddr,
    ip: Option<IpAddr>,
    port: Option<u16>,
    expires: Option<Duration>,
}

/// Reads which clients are remembered.
pub(in crate::backend) fn remembered(
    ports: &[AffinityPort],
    wanted: ClientQuery,
) -> Result<AffinityClients, String> {
    let mut clients = AffinityClients::default();
    for (index, port) in ports.iter().enumerate() {
        for scope in [Scope::Cluster, Scope::Local] {
            let group = AffinityId::new(&port.key, scope);
            let mut reader = GroupReader::open(port.key.family, group).map_err(|e| chain(&e))?;
            let add = |found: &MapElement, endpoint| {
                clients.add(AffinityClient {
                    port: index,
                    client: found.client,
                    endpoint,
                    expires: found.expires,
                });
            };
            let read = match wanted.client {
                Some(client) => reader.one(client, add).map(|()| true),
                None => reader.all(wanted.until, add),
            };
            if !read.map_err(|error| chain(&error))? {
                return Err(LATE.to_owned());
            }
        }
    }
    for known in &mut clients.clients {
        let port = &ports[known.port];
        if known.endpoint.is_none() {
            known.endpoint = port_in_second_map(port, known.client).map_err(|e| chain(&e))?;
        }
    }
    Ok(clients)
}

/// Finds the endpoint of an IPv6 client, whose parts are in two maps.
fn port_in_second_map(
    port: &AffinityPort,
    client: IpAddr,
) -> Result<Option<EndpointAddr>, NetlinkError> {
    for scope in [Scope::Cluster, Scope::Local] {
        let mut reader = GroupReader::open(port.key.family, AffinityId::new(&port.key, scope))?;
        let mut endpoint = None;
        reader.one(client, |_, known| endpoint = known)?;
        if endpoint.is_some() {
            return Ok(endpoint);
        }
    }
    Ok(None)
}

struct GroupReader {
    socket: NfSocket,
    family: Family,
    group: AffinityId,
}

impl GroupReader {
    fn open(family: Family, group: AffinityId) -> Result<Self, NetlinkError> {
        Ok(Self {
            socket: NfSocket::open()?,
            family,
            group,
        })
    }

    fn request(&self, map: GroupPart, client: Option<IpAddr>) -> Request {
        let name = self.group.name(map);
        let family = nfproto(self.family);
        Request::new("read clients", msg::GETSETELEM, family, |w| {
            w.str(NFTA_SET_ELEM_LIST_TABLE, TABLE);
            w.str(NFTA_SET_ELEM_LIST_SET, &name);
            if let Some(client) = client {
                w.nest(NFTA_SET_ELEM_LIST_ELEMENTS, |list| {
                    entry(list, |w| {
                        value(w, NFTA_SET_ELEM_KEY, |b| put_ip(b, client));
                    });
                });
            }
        })
    }

    /// Reads one client from a map; `None` if the map lacks it, or if there is no such map.
    fn get(&mut self, map: GroupPart, client: IpAddr) -> Result<Option<MapElement>, NetlinkError> {
        match self.socket.get(self.request(map, Some(client))) {
            Err(error) if error.errno() == Some(Errno::ENOENT) => Ok(None),
            Err(error) => Err(error),
            Ok(answer) => {
                let mut found = None;
                for message in Messages(&answer) {
                    elements(message, self.family, map, |element| found = Some(element));
                }
                Ok(found)
            }
        }
    }

    fn one(
        &mut self,
        client: IpAddr,
        mut each: impl FnMut(&MapElement, Option<EndpointAddr>),
    ) -> Result<(), NetlinkError> {
        let mut whole: Option<MapElement> = None;
        for map in Group::maps(self.family) {
            let Some(found) = self.get(*map, client)? else {
                continue;
            };
            whole = Some(match whole {
                None => found,
                Some(first) => MapElement {
                    ip: first.ip.or(found.ip),
                    port: first.port.or(found.port),
                    ..first
                },
            });
        }
        if let Some(found) = whole {
            each(&found, found.endpoint());
        }
        Ok(())
    }

    /// Passes on all clients; returns false if the time was over before the end.
    fn all(
        &mut self,
        until: Instant,
        mut each: impl FnMut(&MapElement, Option<EndpointAddr>),
    ) -> Result<bool, NetlinkError> {
        let (family, map) = (self.family, GroupPart::Clients);
        let request = self.request(map, None);
        let read = self.socket.dump_until(request, |message| {
            elements(message, family, map, |found| {
                each(&found, found.endpoint());
            });
            if Instant::now() < until {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        });
        match read {
            Err(error) if error.errno() == Some(Errno::ENOENT) => Ok(true),
            read => read,
        }
    }
}

impl MapElement {
    fn endpoint(&self) -> Option<EndpointAddr> {
        let (ip, port) = self.ip.zip(self.port)?;
        Some(EndpointAddr { ip, port })
    }
}

/// Passes on the elements of a message. Elements that cannot be decoded are skipped.
fn elements(
    message: Message<'_>,
    family: Family,
    map: GroupPart,
    mut each: impl FnMut(MapElement),
) {
    if message.kind != msg::NEWSETELEM {
        return;
    }
    let list = message.attributes().get(NFTA_SET_ELEM_LIST_ELEMENTS);
    for element in list.into_iter().flat_map(Attribute::children) {
        if let Some(found) = decode(element, family, map) {
            each(found);
        }
    }
}

fn decode(element: Attribute<'_>, family: Family, map: GroupPart) -> Option<MapElement> {
    let attributes: Attributes<'_> = element.children();
    let value = |kind| {
        let value: Attributes<'_> = attributes.get(kind)?.children();
        Some(value.get(NFTA_DATA_VALUE)?.payload)
    };
    let data: &[u8] = value(NFTA_SET_ELEM_DATA)?;
    let (ip, port) = match (map, family) {
        (GroupPart::Ports, _) => (None, port_of(data)),
        (_, Family::V6) => (ip_of(data, family), None),
        (_, Family::V4) => (
            data.get(..4).and_then(|ip| ip_of(ip, family)),
            data.get(4..).and_then(port_of),
        ),
    };
    let expires = attributes
        .get(NFTA_SET_ELEM_EXPIRATION)
        .and_then(|ms| ms.payload.try_into().ok().map(u64::from_be_bytes));
    Some(MapElement {
        client: ip_of(value(NFTA_SET_ELEM_KEY)?, family)?,
        ip,
        port,
        expires: expires.map(Duration::from_millis),
    })
}
