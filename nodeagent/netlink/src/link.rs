//! Network links and their addresses (`NETLINK_ROUTE`, linux/rtnetlink.h, linux/if_addr.h), as far as
//! a dummy device that holds addresses needs them.

use std::net::IpAddr;

use kplane_model::Family;
use netlink_sys::protocols::NETLINK_ROUTE;
use nix::net::if_::if_nametoindex;

use nix::errno::Errno;

use super::message::{Message, NLM_F_CREATE, NLM_F_EXCL, Request};
use super::{AttributeWriter, Attributes, NetlinkError, NfSocket, Refusal, nfproto};

/// `RTM_NEWLINK`.
const RTM_NEWLINK: u16 = 16;
/// `RTM_DELLINK`.
const RTM_DELLINK: u16 = 17;
/// `RTM_NEWADDR`.
const RTM_NEWADDR: u16 = 20;
/// `RTM_DELADDR`.
const RTM_DELADDR: u16 = 21;
/// `RTM_GETADDR`.
const RTM_GETADDR: u16 = 22;

/// `sizeof(struct ifinfomsg)`; all zero, since the request names the link.
const IFINFOMSG_BYTES: usize = 16;
/// `IFLA_IFNAME`.
const IFLA_IFNAME: u16 = 3;
/// `IFLA_LINKINFO`.
const IFLA_LINKINFO: u16 = 18;
/// `IFLA_INFO_KIND`.
const IFLA_INFO_KIND: u16 = 1;

/// `sizeof(struct ifaddrmsg)`.
const IFADDRMSG_BYTES: usize = 8;
/// `IFA_ADDRESS`.
const IFA_ADDRESS: u16 = 1;
/// `IFA_LOCAL`: the address itself; `IFA_ADDRESS` may be the peer's.
const IFA_LOCAL: u16 = 2;
/// `IFA_CACHEINFO`: `struct ifa_cacheinfo`.
const IFA_CACHEINFO: u16 = 6;
/// Preferred for 0 s, and valid for ever; the rest is for answers.
const DEPRECATED: [u8; 16] = [0, 0, 0, 0, 255, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0];
/// `IFA_F_NODAD`: an IPv6 address is usable at once.
const IFA_F_NODAD: u8 = 0x02;
/// `RT_SCOPE_UNIVERSE`.
const RT_SCOPE_UNIVERSE: u8 = 0;
/// `RT_SCOPE_HOST`.
const RT_SCOPE_HOST: u8 = 254;

/// Deletes a link, with its addresses, from this thread's network namespace.
///
/// # Errors
/// [`NetlinkError`]; `ENODEV` when there is no such link.
pub fn delete_link(name: &str) -> Result<(), NetlinkError> {
    let header = [0; IFINFOMSG_BYTES];
    let request = Request::with_header("delete link", RTM_DELLINK, &header, |w| {
        w.str(IFLA_IFNAME, name);
    });
    NfSocket::open_for(NETLINK_ROUTE)?.execute(request)
}

/// Returns the number of a link; `None` if no link has the name.
pub fn link_index(name: &str) -> Option<u32> {
    if_nametoindex(name).ok()
}

/// An address of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkAddress {
    /// The link's number.
    pub link: u32,
    /// The address.
    pub ip: IpAddr,
    /// Whether the address is valid on this host only (loopback).
    pub is_of_host: bool,
}

/// The links and addresses of this thread's network namespace.
#[derive(Debug)]
pub struct Links {
    socket: NfSocket,
}

impl Links {
    /// Opens a socket.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn open() -> Result<Self, NetlinkError> {
        let socket = NfSocket::open_for(NETLINK_ROUTE)?;
        Ok(Self { socket })
    }

    /// Creates a dummy device. The device stays down: its addresses are the node's all the same, and
    /// nothing is sent through it.
    ///
    /// # Errors
    /// [`NetlinkError`]; `EOPNOTSUPP` when the kernel has no such devices.
    pub fn add_dummy(&mut self, name: &str) -> Result<(), NetlinkError> {
        self.socket.execute(add_dummy(name))
    }

    /// Returns all addresses of a family.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn addresses(&mut self, family: Family) -> Result<Vec<LinkAddress>, NetlinkError> {
        let mut header = [0; IFADDRMSG_BYTES];
        header[0] = nfproto(family);
        let request = Request::with_header("list addresses", RTM_GETADDR, &header, |_| {});
        let mut addresses = Vec::new();
        self.socket.dump_each(request, |message| {
            addresses.extend(parse_address(message));
        })?;
        addresses.sort_unstable();
        addresses.dedup();
        Ok(addresses)
    }

    /// Adds an address that is valid on this host only; returns false if the link has it already. No packet gets it as its source,
    /// unless it answers one that came to it: scope host keeps IPv4 from that, and a preferred lifetime of 0 keeps IPv6.
    /// See [`Routes::is_delivered`](crate::Routes::is_delivered) for when packets reach it.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn add_of_host(&mut self, link: u32, ip: IpAddr) -> Result<bool, NetlinkError> {
        match self.socket.execute(address(link, ip, RT_SCOPE_HOST, true)) {
            Err(error) if error.errno() == Some(Errno::EEXIST) => Ok(false),
            result => result.map(|()| true),
        }
    }

    /// Removes an address from a link.
    ///
    /// # Errors
    /// [`NetlinkError`]; `EADDRNOTAVAIL` when the link does not have it.
    pub fn remove(&mut self, link: u32, ip: IpAddr) -> Result<(), NetlinkError> {
        let request = address(link, ip, RT_SCOPE_UNIVERSE, false);
        self.socket.execute(request)
    }

    /// Adds (`true`) or removes single addresses one by one, also after a refusal. Returns the
    /// refusals, and the number of bytes sent.
    ///
    /// # Errors
    /// [`NetlinkError::Socket`]: the outcome is unknown.
    pub fn perform(
        &mut self,
        link: u32,
        changes: &[(bool, IpAddr)],
    ) -> Result<(Vec<Refusal>, u64), NetlinkError> {
        let requests = changes.iter().map(|(add, ip)| address(link, *ip, RT_SCOPE_UNIVERSE, *add));
        self.socket.perform(&requests.collect::<Vec<_>>())
    }
}

fn add_dummy(name: &str) -> Request {
    let header = [0; IFINFOMSG_BYTES];
    let request = Request::with_header("make a dummy device", RTM_NEWLINK, &header, |w| {
        w.str(IFLA_IFNAME, name);
        w.nest(IFLA_LINKINFO, |w| w.str(IFLA_INFO_KIND, "dummy"));
    });
    request.flagged(NLM_F_CREATE | NLM_F_EXCL)
}

/// Returns the request to add or remove one address with its full length as prefix.
fn address(link: u32, ip: IpAddr, scope: u8, add: bool) -> Request {
    let family = Family::of(ip);
    let [index_0, index_1, index_2, index_3] = link.to_ne_bytes();
    let flags = match family {
        Family::V6 if add => IFA_F_NODAD,
        _ => 0,
    };
    let header = [
        nfproto(family),
        bits(family),
        flags,
        scope,
        index_0,
        index_1,
        index_2,
        index_3,
    ];
    let (what, kind) = if add {
        ("add an address", RTM_NEWADDR)
    } else {
        ("remove an address", RTM_DELADDR)
    };
    let request = Request::with_header(what, kind, &header, |w| {
        for kind in [IFA_LOCAL, IFA_ADDRESS] {
            push_ip(w, kind, ip);
        }
        if scope == RT_SCOPE_HOST && family == Family::V6 {
            w.bytes(IFA_CACHEINFO, &DEPRECATED);
        }
    });
    if add { request.flagged(NLM_F_CREATE | NLM_F_EXCL) } else { request }
}

/// Returns the length of an address, in bits.
pub(crate) fn bits(family: Family) -> u8 {
    family.pick(32, 128)
}

pub(crate) fn push_ip(w: &mut AttributeWriter<'_>, kind: u16, ip: IpAddr) {
    match ip {
        IpAddr::V4(ip) => w.bytes(kind, &ip.octets()),
        IpAddr::V6(ip) => w.bytes(kind, &ip.octets()),
    }
}

/// Returns the address that a link has lost, if a notification is about that.
pub fn removed_address(message: Message<'_>) -> Option<LinkAddress> {
    match message.kind {
        RTM_DELADDR => read_address(message),
        _ => None,
    }
}

/// Reads one message of the list of addresses.
fn parse_address(message: Message<'_>) -> Option<LinkAddress> {
    match message.kind {
        RTM_NEWADDR => read_address(message),
        _ => None,
    }
}

fn read_address(message: Message<'_>) -> Option<LinkAddress> {
    let (header, attributes) = message.body.split_at_checked(IFADDRMSG_BYTES)?;
    let attributes = Attributes(attributes);
    let scope = *header.get(3)?;
    let link = u32::from_ne_bytes(*header.get(4..)?.first_chunk()?);
    let ip = attributes.get(IFA_LOCAL).or_else(|| attributes.get(IFA_ADDRESS))?;
    let ip = match ip.payload.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(ip.payload).ok()?),
        16 => IpAddr::from(<[u8; 16]>::try_from(ip.payload).ok()?),
        _ => return None,
    };
    Some(LinkAddress {
        link,
        ip,
        is_of_host: scope == RT_SCOPE_HOST,
    })
}

#[cfg(test)]
mod tests;
