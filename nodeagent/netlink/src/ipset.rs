//! IP sets over nfnetlink (linux/netfilter/ipset/ip_set.h), with the types of sets that kube-proxy's
//! IPVS mode uses. Integers are in network byte order, and are flagged so.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use kplane_model::{Cidr, EndpointAddr, Family, Protocol};

use super::message::{NLM_F_CREATE, NLM_F_EXCL, Request};
use super::{Attribute, AttributeWriter, Attributes, Message, Messages};
use super::{NetlinkError, NfSocket, Refusal, nfproto};

mod uapi;

pub use self::uapi::code;
use self::uapi::{
    FLAG_NAMES, HASHSIZE, IPSET, IPSET_PROTOCOL, NETWORK_ORDER, REVISION_MAX, attr, cmd, data,
};

/// The type of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SetType {
    /// Addresses.
    Ip,
    /// Address, protocol and port.
    IpPort,
    /// Address, protocol, port, and another address.
    IpPortIp,
    /// Address, protocol, port, and an address range.
    IpPortNet,
    /// Ports.
    Port,
}

impl SetType {
    /// All types.
    pub const ALL: [Self; 5] = [
        Self::Ip,
        Self::IpPort,
        Self::IpPortIp,
        Self::IpPortNet,
        Self::Port,
    ];

    /// Returns the type's name. The kernel's module is called `ip_set_` and the name with `_` between.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ip => "hash:ip",
            Self::IpPort => "hash:ip,port",
            Self::IpPortIp => "hash:ip,port,ip",
            Self::IpPortNet => "hash:ip,port,net",
            Self::Port => "bitmap:port",
        }
    }

    /// Returns the name of the kernel's module.
    pub fn module(self) -> &'static str {
        match self {
            Self::Ip => "ip_set_hash_ip",
            Self::IpPort => "ip_set_hash_ipport",
            Self::IpPortIp => "ip_set_hash_ipportip",
            Self::IpPortNet => "ip_set_hash_ipportnet",
            Self::Port => "ip_set_bitmap_port",
        }
    }

    /// Returns whether sets of this type contain no addresses.
    fn is_bitmap(self) -> bool {
        self == Self::Port
    }
}

/// An entry of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entry {
    /// An entry of a [`SetType::Ip`].
    Ip(IpAddr),
    /// An entry of a [`SetType::IpPort`].
    IpPort(IpAddr, Protocol, u16),
    /// An entry of a [`SetType::IpPortIp`].
    IpPortIp(IpAddr, Protocol, u16, IpAddr),
    /// An entry of a [`SetType::IpPortNet`]; the range must not be all addresses.
    IpPortNet(IpAddr, Protocol, u16, Cidr),
    /// An entry of a [`SetType::Port`].
    Port(u16),
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = |ip: &IpAddr, port: &u16| EndpointAddr::new(*ip, *port);
        match self {
            Self::Ip(ip) => ip.fmt(f),
            Self::IpPort(ip, protocol, port) => write!(f, "{}/{protocol}", place(ip, port)),
            Self::IpPortIp(ip, protocol, port, other) => {
                write!(f, "{}/{protocol} with {other}", place(ip, port))
            }
            Self::IpPortNet(ip, protocol, port, range) => {
                write!(f, "{}/{protocol} with {range}", place(ip, port))
            }
            Self::Port(port) => port.fmt(f),
        }
    }
}

impl Entry {
    fn write(&self, w: &mut AttributeWriter<'_>) {
        match *self {
            Self::Ip(ip) => write_ip(w, data::IP, ip),
            Self::IpPort(ip, protocol, port) => write_place(w, ip, protocol, port),
            Self::IpPortIp(ip, protocol, port, other) => {
                write_place(w, ip, protocol, port);
                write_ip(w, data::IP2, other);
            }
            Self::IpPortNet(ip, protocol, port, range) => {
                write_place(w, ip, protocol, port);
                write_ip(w, data::IP2, range.first());
                w.u8(data::CIDR2, range.prefix_len());
            }
            Self::Port(port) => write_port(w, data::PORT, port),
        }
    }

    /// Reads one entry of a list; returns `None` if it is not an entry of this type.
    fn parse(kind: SetType, entry: Attributes<'_>) -> Option<Self> {
        let ip = |kind| parse_ip(entry.get(kind)?);
        let port = || {
            let bytes = entry.get(data::PORT)?.payload;
            bytes.try_into().ok().map(u16::from_be_bytes)
        };
        let protocol = || {
            let number = entry.get(data::PROTO)?.payload.first()?;
            Protocol::from_number(*number)
        };
        Some(match kind {
            SetType::Ip => Self::Ip(ip(data::IP)?),
            SetType::IpPort => Self::IpPort(ip(data::IP)?, protocol()?, port()?),
            SetType::IpPortIp => {
                Self::IpPortIp(ip(data::IP)?, protocol()?, port()?, ip(data::IP2)?)
            }
            SetType::IpPortNet => {
                let other = ip(data::IP2)?;
                let prefix = entry.get(data::CIDR2).and_then(|a| a.payload.first());
                let range = match prefix {
                    None => Cidr::single(other),
                    Some(prefix) => Cidr::new(other, *prefix)?,
                };
                Self::IpPortNet(ip(data::IP)?, protocol()?, port()?, range)
            }
            SetType::Port => Self::Port(port()?),
        })
    }
}

/// A set as the kernel has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The name of its type.
    pub kind: String,
    /// The family of its addresses; `None` for ports.
    pub family: Option<Family>,
    /// The maximum number of entries; 0 for `bitmap:port`, which always has room for every port.
    pub capacity: u32,
    /// The entries that belong to the type.
    pub entries: Vec<Entry>,
    /// The number of entries that do not belong to the type.
    pub strange: usize,
}

impl Found {
    /// Reads the messages of a list of one set.
    pub fn parse(messages: Messages<'_>) -> Option<Self> {
        let mut found = None;
        messages.for_each(|message| collect(message, &mut found));
        found
    }

    /// Returns whether the set has this type and family.
    pub fn is(&self, kind: SetType, family: Family) -> bool {
        let right = kind.is_bitmap() || self.family == Some(family);
        self.kind == kind.as_str() && right
    }
}

/// A command on a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetCommand<'a> {
    /// Creates a set; refused if a set of this name exists.
    Create {
        /// The name, up to 31 characters.
        name: &'a str,
        /// The type.
        kind: SetType,
        /// The family of its addresses.
        family: Family,
        /// The maximum number of entries.
        capacity: u32,
    },
    /// Removes a set that no rule uses.
    Destroy(&'a str),
    /// Exchanges two sets, even while rules use them.
    Swap(&'a str, &'a str),
    /// Adds an entry; an existing entry is no error.
    Add(&'a str, Entry),
    /// Removes an entry; a missing entry is no error.
    Delete(&'a str, Entry),
}

/// The IP sets of this thread's network namespace.
#[derive(Debug)]
pub struct IpSets {
    socket: NfSocket,
    /// The revision of each type, as far as the kernel was asked.
    revisions: BTreeMap<SetType, u8>,
}

impl IpSets {
    /// Opens a socket.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn open() -> Result<Self, NetlinkError> {
        Ok(Self {
            socket: NfSocket::open()?,
            revisions: BTreeMap::new(),
        })
    }

    /// Runs commands one by one, also after a refusal. Returns the refusals, and the number of bytes
    /// sent.
    ///
    /// # Errors
    /// [`NetlinkError`]; after any error but [`NetlinkError::Refused`] the outcome is unknown.
    pub fn perform(
        &mut self,
        commands: &[SetCommand<'_>],
    ) -> Result<(Vec<Refusal>, u64), NetlinkError> {
        let mut requests = Vec::with_capacity(commands.len());
        for command in commands {
            let revision = match command {
                SetCommand::Create { kind, family, .. } => self.revision(*kind, *family)?,
                _ => 0,
            };
            requests.push(request(*command, revision));
        }
        self.socket.perform(&requests)
    }

    /// Returns one set with its entries; `None` if no set has the name.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn list(&mut self, name: &str) -> Result<Option<Found>, NetlinkError> {
        let request = message("list an IP set", cmd::LIST, |w| w.str(attr::SETNAME, name));
        let mut found = None;
        let listed = self.socket.dump_each(request, |message| collect(message, &mut found));
        match listed {
            Ok(()) => Ok(found),
            Err(error) if error.errno() == Some(super::Errno::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the names of all sets.
    ///
    /// # Errors
    /// [`NetlinkError`]; `EINVAL` when the kernel has no IP sets.
    pub fn names(&mut self) -> Result<Vec<String>, NetlinkError> {
        let request = message("list IP sets", cmd::LIST, |w| {
            w.u32(attr::FLAGS, FLAG_NAMES);
        });
        let mut names = Vec::new();
        self.socket.dump_each(request, |message| {
            let name = message.attributes().get(attr::SETNAME);
            names.extend(name.and_then(Attribute::as_str).map(str::to_owned));
        })?;
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    /// Returns the revision of a type that new sets get.
    ///
    /// # Errors
    /// [`NetlinkError`]; refused when the kernel lacks the type.
    fn revision(&mut self, kind: SetType, family: Family) -> Result<u8, NetlinkError> {
        if let Some(revision) = self.revisions.get(&kind) {
            return Ok(*revision);
        }
        let request = message("look up a type of IP sets", cmd::TYPE, |w| {
            w.str(attr::TYPENAME, kind.as_str());
            w.u8(attr::FAMILY, set_family(kind, family));
        });
        let answer = self.socket.get(request)?;
        let attributes = Messages(&answer).next().map(Message::attributes);
        let number = |kind| Some(*attributes?.get(kind)?.payload.first()?);
        let newest = number(attr::REVISION).unwrap_or(0);
        let oldest = number(attr::REVISION_MIN).unwrap_or(0);
        let revision = newest.min(REVISION_MAX).max(oldest);
        self.revisions.insert(kind, revision);
        Ok(revision)
    }
}

/// Removes an IP set of this thread's network namespace.
///
/// # Errors
/// [`NetlinkError`]; `ENOENT` when no set has the name.
pub fn destroy_set(name: &str) -> Result<(), NetlinkError> {
    NfSocket::open()?.execute(request(SetCommand::Destroy(name), 0))
}

/// Returns the family of a set. Bitmaps have none (`NFPROTO_UNSPEC`).
fn set_family(kind: SetType, family: Family) -> u8 {
    if kind.is_bitmap() { 0 } else { nfproto(family) }
}

fn message(
    what: &'static str,
    command: u16,
    fill: impl FnOnce(&mut AttributeWriter<'_>),
) -> Request {
    Request::new(what, IPSET | command, nfproto(Family::V4), |w| {
        w.u8(attr::PROTOCOL, IPSET_PROTOCOL);
        fill(w);
    })
}

fn request(command: SetCommand<'_>, revision: u8) -> Request {
    match command {
        SetCommand::Create {
            name,
            kind,
            family,
            capacity,
        } => message("make an IP set", cmd::CREATE, |w| {
            w.str(attr::SETNAME, name);
            w.str(attr::TYPENAME, kind.as_str());
            w.u8(attr::REVISION, revision);
            w.u8(attr::FAMILY, set_family(kind, family));
            w.nest(attr::DATA, |w| {
                if kind.is_bitmap() {
                    write_port(w, data::PORT, 0);
                    write_port(w, data::PORT_TO, u16::MAX);
                } else {
                    w.u32(data::HASHSIZE | NETWORK_ORDER, HASHSIZE);
                    w.u32(data::MAXELEM | NETWORK_ORDER, capacity);
                }
            });
        })
        .flagged(NLM_F_CREATE | NLM_F_EXCL),
        SetCommand::Destroy(name) => message("remove an IP set", cmd::DESTROY, |w| {
            w.str(attr::SETNAME, name);
        }),
        SetCommand::Swap(one, other) => message("exchange IP sets", cmd::SWAP, |w| {
            w.str(attr::SETNAME, one);
            w.str(attr::TYPENAME, other);
        }),
        SetCommand::Add(name, entry) => message("add to an IP set", cmd::ADD, |w| {
            w.str(attr::SETNAME, name);
            w.nest(attr::DATA, |w| entry.write(w));
        }),
        SetCommand::Delete(name, entry) => message("remove from an IP set", cmd::DEL, |w| {
            w.str(attr::SETNAME, name);
            w.nest(attr::DATA, |w| entry.write(w));
        }),
    }
}

fn write_ip(w: &mut AttributeWriter<'_>, kind: u16, ip: IpAddr) {
    w.nest(kind, |w| match ip {
        IpAddr::V4(ip) => w.bytes(data::IPADDR_IPV4 | NETWORK_ORDER, &ip.octets()),
        IpAddr::V6(ip) => w.bytes(data::IPADDR_IPV6 | NETWORK_ORDER, &ip.octets()),
    });
}

fn write_port(w: &mut AttributeWriter<'_>, kind: u16, port: u16) {
    w.bytes(kind | NETWORK_ORDER, &port.to_be_bytes());
}

fn write_place(w: &mut AttributeWriter<'_>, ip: IpAddr, protocol: Protocol, port: u16) {
    write_ip(w, data::IP, ip);
    write_port(w, data::PORT, port);
    w.u8(data::PROTO, protocol.number());
}

fn parse_ip(attribute: Attribute<'_>) -> Option<IpAddr> {
    let address = attribute.children().next()?;
    match address.kind {
        data::IPADDR_IPV4 => {
            let bytes: [u8; 4] = address.payload.try_into().ok()?;
            Some(bytes.into())
        }
        data::IPADDR_IPV6 => {
            let bytes: [u8; 16] = address.payload.try_into().ok()?;
            Some(bytes.into())
        }
        _ => None,
    }
}

/// Reads one message of a list, which has some of a set's entries. Only the first one describes the
/// set.
fn collect(message: Message<'_>, found: &mut Option<Found>) {
    if message.kind != IPSET | cmd::LIST {
        return;
    }
    let attributes = message.attributes();
    if attributes.get(attr::TYPENAME).is_some() {
        // A list that begins again repeats everything.
        *found = parse_header(attributes);
    }
    let Some(found) = found else { return };
    let kind = SetType::ALL.into_iter().find(|kind| kind.as_str() == found.kind);
    let entries = attributes.get(attr::ADT).map(Attribute::children);
    for entry in entries.into_iter().flatten() {
        match kind.and_then(|kind| Entry::parse(kind, entry.children())) {
            Some(entry) => found.entries.push(entry),
            None => found.strange = found.strange.saturating_add(1),
        }
    }
}

fn parse_header(attributes: Attributes<'_>) -> Option<Found> {
    let kind = attributes.get(attr::TYPENAME)?.as_str()?.to_owned();
    let family = match attributes.get(attr::FAMILY)?.payload.first()? {
        2 => Some(Family::V4),
        10 => Some(Family::V6),
        _ => None,
    };
    let header = attributes.get(attr::DATA).map(Attribute::children);
    let capacity = header.and_then(|header| header.get(data::MAXELEM)?.as_u32());
    Some(Found {
        kind,
        family,
        capacity: capacity.unwrap_or(0),
        entries: Vec::new(),
        strange: 0,
    })
}

#[cfg(test)]
mod tests;
