//! Routes and policy rules (`NETLINK_ROUTE`, linux/rtnetlink.h, linux/fib_rules.h), as far as a proxy needs them: how
//! packets to an address go, and the delivery of marked packets to this host.

use std::net::IpAddr;

use kplane_model::Family;
use netlink_sys::protocols::NETLINK_ROUTE;
use nix::errno::Errno;

use super::link::{bits, push_ip};
use super::message::{Message, Messages, NLM_F_CREATE, NLM_F_EXCL, Request};
use super::{Attribute, AttributeWriter, Attributes, NetlinkError, NfSocket, nfproto};

/// `RTM_NEWROUTE`.
const RTM_NEWROUTE: u16 = 24;
/// `RTM_DELROUTE`.
const RTM_DELROUTE: u16 = 25;
/// `RTM_GETROUTE`.
const RTM_GETROUTE: u16 = 26;
/// `RTM_NEWRULE`.
const RTM_NEWRULE: u16 = 32;
/// `RTM_DELRULE`.
const RTM_DELRULE: u16 = 33;
/// `RTM_GETRULE`.
const RTM_GETRULE: u16 = 34;

/// `sizeof(struct rtmsg)`, and of `struct fib_rule_hdr`.
const HEADER_BYTES: usize = 12;
/// The offset of `rtm_type` in the former.
const RTM_TYPE: usize = 7;
/// `RTA_DST`.
const RTA_DST: u16 = 1;
/// `RTA_OIF`.
const RTA_OIF: u16 = 4;
/// `RTA_TABLE`.
const RTA_TABLE: u16 = 15;
/// `RTN_LOCAL`.
const RTN_LOCAL: u8 = 2;
/// `RTPROT_STATIC`: an administrator's, which routing daemons leave alone.
const RTPROT_STATIC: u8 = 4;
/// `RT_SCOPE_HOST`.
const RT_SCOPE_HOST: u8 = 254;
/// The number of `lo` (`LOOPBACK_IFINDEX`).
const LOOPBACK: u32 = 1;

/// `FR_ACT_TO_TBL`.
const FR_ACT_TO_TBL: u8 = 1;
/// `FRA_PRIORITY`.
const FRA_PRIORITY: u16 = 6;
/// `FRA_FWMARK`.
const FRA_FWMARK: u16 = 10;
/// `FRA_TABLE`.
const FRA_TABLE: u16 = 15;
/// `FRA_FWMASK`.
const FRA_FWMASK: u16 = 16;

/// The way that packets to an address take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// They are for this host itself.
    Here,
    /// They leave by the link of this number.
    Link(u32),
}

/// The delivery of packets with a mark to this host, wherever they are going: `ip rule add fwmark MARK lookup TABLE` and
/// `ip route add local default dev lo table TABLE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The number of a routing table that has nothing else.
    pub table: u32,
    /// The place of the rule among others; smaller ones come first.
    pub priority: u32,
}

/// The routes and policy rules of this thread's network namespace.
#[derive(Debug)]
pub struct Routes {
    socket: NfSocket,
}

impl Routes {
    /// Opens a socket.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn open() -> Result<Self, NetlinkError> {
        let socket = NfSocket::open_for(NETLINK_ROUTE)?;
        Ok(Self { socket })
    }

    /// Returns how packets to an address go; `None` if the kernel has no route.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn to(&mut self, ip: IpAddr) -> Result<Option<Exit>, NetlinkError> {
        match self.socket.get(route_to(ip)) {
            Ok(answer) => Ok(Messages(&answer).find_map(parse_exit)),
            Err(NetlinkError::Refused { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns whether packets to an address are for this host. Linux adds the route to a new IPv6 address from a work
    /// queue (`addrconf_dad_work` of net/ipv6/addrconf.c), after it has confirmed the address.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn is_delivered(&mut self, ip: IpAddr) -> Result<bool, NetlinkError> {
        Ok(self.to(ip)? == Some(Exit::Here))
    }

    /// Has packets with a mark delivered to this host; returns false if they are already.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn deliver(
        &mut self,
        family: Family,
        delivery: Delivery,
        mark: u32,
    ) -> Result<bool, NetlinkError> {
        let mut is_new = false;
        for request in [route(family, delivery), rule(family, delivery, mark)] {
            match self.socket.execute(request) {
                Err(error) if error.errno() == Some(Errno::EEXIST) => {}
                result => {
                    result?;
                    is_new = true;
                }
            }
        }
        Ok(is_new)
    }

    /// Returns whether packets with some mark are delivered by this table.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn delivers(&mut self, family: Family, delivery: Delivery) -> Result<bool, NetlinkError> {
        let mut header = [0; HEADER_BYTES];
        header[0] = nfproto(family);
        let mut found = false;
        let request = Request::with_header("list rules", RTM_GETRULE, &header, |_| {});
        self.socket.dump_each(request, |message| {
            found |= parse_table(message) == Some(delivery.table);
        })?;
        Ok(found)
    }

    /// Ends the delivery of packets by this table, whatever their mark.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn end_delivery(&mut self, family: Family, delivery: Delivery) -> Result<(), NetlinkError> {
        // More than one if the mark has changed.
        while self.removes(delete_rule(family, delivery))? {}
        self.removes(delete_route(family, delivery)).map(|_| ())
    }

    /// Returns whether there was something to remove.
    fn removes(&mut self, request: Request) -> Result<bool, NetlinkError> {
        let missing = [Errno::ENOENT, Errno::ESRCH];
        match self.socket.execute(request) {
            Err(error) if error.errno().is_some_and(|errno| missing.contains(&errno)) => Ok(false),
            result => result.map(|()| true),
        }
    }
}

/// Returns the question how packets to an address go.
fn route_to(ip: IpAddr) -> Request {
    let family = Family::of(ip);
    let mut header = [0; HEADER_BYTES];
    header[..2].copy_from_slice(&[nfproto(family), bits(family)]);
    Request::with_header("look up a route", RTM_GETROUTE, &header, |w| {
        push_ip(w, RTA_DST, ip);
    })
}

/// Returns `struct rtmsg` of the local default route.
fn local_default(family: Family) -> [u8; HEADER_BYTES] {
    let (protocol, scope, kind) = (RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL);
    [
        nfproto(family),
        0,
        0,
        0,
        0,
        protocol,
        scope,
        kind,
        0,
        0,
        0,
        0,
    ]
}

fn route(family: Family, delivery: Delivery) -> Request {
    let header = local_default(family);
    let request = Request::with_header("add a route", RTM_NEWROUTE, &header, |w| {
        push_number(w, RTA_TABLE, delivery.table);
        push_number(w, RTA_OIF, LOOPBACK);
    });
    request.flagged(NLM_F_CREATE | NLM_F_EXCL)
}

fn delete_route(family: Family, delivery: Delivery) -> Request {
    let header = local_default(family);
    Request::with_header("remove a route", RTM_DELROUTE, &header, |w| {
        push_number(w, RTA_TABLE, delivery.table);
        push_number(w, RTA_OIF, LOOPBACK);
    })
}

/// Returns `struct fib_rule_hdr` of a rule that leads to a table, whose number is an attribute.
fn to_table(family: Family) -> [u8; HEADER_BYTES] {
    [nfproto(family), 0, 0, 0, 0, 0, 0, FR_ACT_TO_TBL, 0, 0, 0, 0]
}

fn rule(family: Family, delivery: Delivery, mark: u32) -> Request {
    let header = to_table(family);
    let request = Request::with_header("add a rule", RTM_NEWRULE, &header, |w| {
        push_number(w, FRA_PRIORITY, delivery.priority);
        push_number(w, FRA_TABLE, delivery.table);
        push_number(w, FRA_FWMARK, mark);
        push_number(w, FRA_FWMASK, u32::MAX);
    });
    request.flagged(NLM_F_CREATE | NLM_F_EXCL)
}

fn delete_rule(family: Family, delivery: Delivery) -> Request {
    let header = to_table(family);
    Request::with_header("remove a rule", RTM_DELRULE, &header, |w| {
        push_number(w, FRA_PRIORITY, delivery.priority);
        push_number(w, FRA_TABLE, delivery.table);
    })
}

/// Adds a number in this host's byte order, as rtnetlink has them.
fn push_number(w: &mut AttributeWriter<'_>, kind: u16, number: u32) {
    w.bytes(kind, &number.to_ne_bytes());
}

fn number(attribute: Attribute<'_>) -> Option<u32> {
    attribute.payload.try_into().ok().map(u32::from_ne_bytes)
}

fn attributes(message: Message<'_>) -> Option<Attributes<'_>> {
    message.body.get(HEADER_BYTES..).map(Attributes)
}

/// Reads the answer to the question how packets go.
fn parse_exit(message: Message<'_>) -> Option<Exit> {
    if message.kind != RTM_NEWROUTE {
        return None;
    }
    if *message.body.get(RTM_TYPE)? == RTN_LOCAL {
        return Some(Exit::Here);
    }
    number(attributes(message)?.get(RTA_OIF)?).map(Exit::Link)
}

/// Reads the number of the table to which a policy rule leads.
fn parse_table(message: Message<'_>) -> Option<u32> {
    match message.kind {
        RTM_NEWRULE => number(attributes(message)?.get(FRA_TABLE)?),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
