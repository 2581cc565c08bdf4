//! The text of messages between two processes. Pure, and proof against any input.
//!
//! A message is a byte that names its kind, and fields of fixed order. Numbers are big-endian; text and bytes have
//! their length first. Both ends check the version before anything else.

use std::net::{IpAddr, SocketAddr};

use kplane_model::{
    EndpointAddr, Family, FrontendAddr, KeyParts, Protocol, ServiceKey, ServiceName,
};

use crate::limits::BUFFER;
use crate::listening::{ListenerId, Role};

/// The first bytes of the first message.
const MAGIC: [u8; 8] = *b"kplaneho";

/// The version of the format. Both processes must have the same one.
pub(super) const VERSION: u16 = 1;

/// Most bytes of a message.
pub(super) const LARGEST: usize = 2 * MOST_UNSENT + 4096;

/// Most bytes that one direction of a connection has read and not sent.
const MOST_UNSENT: usize = BUFFER;

/// Most bytes of a name, which Kubernetes limits to 253.
const MOST_NAME: usize = 512;

/// A message without its descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// The successor asks for everything. It names its network namespace, to which the sockets must belong.
    Hello { version: u16, namespace: u64 },
    /// The predecessor gives nothing, for this reason.
    Refused(String),
    Listener {
        id: ListenerId,
        role: Role,
        at: SocketAddr,
        protocol: Protocol,
    },
    Connection {
        key: ServiceKey,
        endpoint: EndpointAddr,
        ways: [EncodedWay; 2],
    },
    Client {
        listener: ListenerId,
        address: SocketAddr,
    },
    Flow {
        listener: ListenerId,
        number: u32,
        key: ServiceKey,
        endpoint: EndpointAddr,
        client: (SocketAddr, Option<IpAddr>),
    },
    /// There were so many messages with descriptors.
    End(u64),
    /// The successor has so many.
    Taken(u64),
}

/// One direction of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EncodedWay {
    pub(super) has_ended: bool,
    pub(super) is_plain: bool,
    pub(super) unsent: EncodedUnsent,
}

/// Data that was read and not sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EncodedUnsent {
    None,
    Bytes(Vec<u8>),
    /// So many bytes in a pipe.
    Pipe(u64),
}

/// Encodes a message.
pub(super) fn encode(message: &Message) -> Vec<u8> {
    let mut w = Writer(Vec::new());
    match message {
        Message::Hello { version, namespace } => {
            w.u8(0);
            w.0.extend(MAGIC);
            w.u16(*version);
            w.u64(*namespace);
        }
        Message::Refused(why) => {
            w.u8(1);
            w.text(why);
        }
        Message::Listener {
            id,
            role,
            at,
            protocol,
        } => {
            w.u8(2);
            w.u64(id.0);
            w.role(*role);
            w.socket(*at);
            w.protocol(*protocol);
        }
        Message::Connection {
            key,
            endpoint,
            ways,
        } => {
            w.u8(3);
            w.key(key);
            w.endpoint(*endpoint);
            ways.iter().for_each(|way| w.way(way));
        }
        Message::Client { listener, address } => {
            w.u8(4);
            w.u64(listener.0);
            w.socket(*address);
        }
        Message::Flow {
            listener,
            number,
            key,
            endpoint,
            client: (client, local),
        } => {
            w.u8(5);
            w.u64(listener.0);
            w.0.extend(number.to_be_bytes());
            w.key(key);
            w.endpoint(*endpoint);
            w.socket(*client);
            w.u8(u8::from(local.is_some()));
            local.iter().for_each(|ip| w.ip(*ip));
        }
        Message::End(count) => {
            w.u8(6);
            w.u64(*count);
        }
        Message::Taken(count) => {
            w.u8(7);
            w.u64(*count);
        }
    }
    w.0
}

/// Decodes a message; `None` for everything that [`encode`] does not write.
pub(super) fn decode(bytes: &[u8]) -> Option<Message> {
    let mut r = Reader(bytes);
    let message = match r.u8()? {
        0 => {
            let magic = r.take(MAGIC.len())?;
            let (version, namespace) = (r.u16()?, r.u64()?);
            (magic == MAGIC).then_some(Message::Hello { version, namespace })?
        }
        1 => Message::Refused(r.text()?),
        2 => Message::Listener {
            id: ListenerId(r.u64()?),
            role: r.role()?,
            at: r.socket()?,
            protocol: r.protocol()?,
        },
        3 => Message::Connection {
            key: r.key()?,
            endpoint: r.endpoint()?,
            ways: [r.way()?, r.way()?],
        },
        4 => Message::Client {
            listener: ListenerId(r.u64()?),
            address: r.socket()?,
        },
        5 => Message::Flow {
            listener: ListenerId(r.u64()?),
            number: u32::from_be_bytes(*r.take(4)?.first_chunk()?),
            key: r.key()?,
            endpoint: r.endpoint()?,
            client: (r.socket()?, if r.flag()? { Some(r.ip()?) } else { None }),
        },
        6 => Message::End(r.u64()?),
        7 => Message::Taken(r.u64()?),
        _ => return None,
    };
    r.0.is_empty().then_some(message)
}

struct Writer(Vec<u8>);

impl Writer {
    fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    fn u16(&mut self, value: u16) {
        self.0.extend(value.to_be_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.0.extend(value.to_be_bytes());
    }

    /// Writes text. What is longer than any name is cut.
    fn text(&mut self, text: &str) {
        let bytes = &text.as_bytes()[..text.floor_char_boundary(MOST_NAME)];
        self.u16(u16::try_from(bytes.len()).unwrap_or_default());
        self.0.extend(bytes);
    }

    fn ip(&mut self, ip: IpAddr) {
        match ip {
            IpAddr::V4(ip) => {
                self.u8(4);
                self.0.extend(ip.octets());
            }
            IpAddr::V6(ip) => {
                self.u8(6);
                self.0.extend(ip.octets());
            }
        }
    }

    fn socket(&mut self, at: SocketAddr) {
        self.ip(at.ip());
        self.u16(at.port());
        // The link of a link-local address.
        let scope = match at {
            SocketAddr::V4(_) => 0,
            SocketAddr::V6(at) => at.scope_id(),
        };
        self.0.extend(scope.to_be_bytes());
    }

    fn endpoint(&mut self, at: EndpointAddr) {
        self.ip(at.ip);
        self.u16(at.port);
    }

    fn protocol(&mut self, protocol: Protocol) {
        self.u8(match protocol {
            Protocol::Tcp => 6,
            Protocol::Udp => 17,
            Protocol::Sctp => 132,
        });
    }

    fn role(&mut self, role: Role) {
        match role {
            Role::Captured => self.u8(0),
            Role::Place(FrontendAddr::Address { ip, protocol, port }) => {
                self.u8(1);
                self.ip(ip);
                self.protocol(protocol);
                self.u16(port);
            }
            Role::Place(FrontendAddr::NodePort { protocol, port }) => {
                self.u8(2);
                self.protocol(protocol);
                self.u16(port);
            }
        }
    }

    fn key(&mut self, key: &ServiceKey) {
        self.text(&key.service.namespace);
        self.text(&key.service.name);
        self.text(&key.port_name);
        self.protocol(key.protocol);
        self.u8(key.family.pick(4, 6));
    }

    fn way(&mut self, way: &EncodedWay) {
        self.u8(u8::from(way.has_ended));
        self.u8(u8::from(way.is_plain));
        match &way.unsent {
            EncodedUnsent::None => self.u8(0),
            EncodedUnsent::Bytes(bytes) => {
                self.u8(1);
                self.u64(bytes.len() as u64);
                self.0.extend(bytes);
            }
            EncodedUnsent::Pipe(held) => {
                self.u8(2);
                self.u64(*held);
            }
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        Some(*self.take(1)?.first()?)
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(*self.take(2)?.first_chunk()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_be_bytes(*self.take(8)?.first_chunk()?))
    }

    fn flag(&mut self) -> Option<bool> {
        match self.u8()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    fn text(&mut self) -> Option<String> {
        let len = usize::from(self.u16()?);
        let bytes = (len <= MOST_NAME).then(|| self.take(len))??;
        String::from_utf8(bytes.to_vec()).ok()
    }

    fn ip(&mut self) -> Option<IpAddr> {
        match self.u8()? {
            4 => Some(IpAddr::from(*self.take(4)?.first_chunk::<4>()?)),
            6 => Some(IpAddr::from(*self.take(16)?.first_chunk::<16>()?)),
            _ => None,
        }
    }

    fn socket(&mut self) -> Option<SocketAddr> {
        let mut at = SocketAddr::new(self.ip()?, self.u16()?);
        let scope = u32::from_be_bytes(*self.take(4)?.first_chunk()?);
        match &mut at {
            SocketAddr::V4(_) if scope != 0 => return None,
            SocketAddr::V4(_) => {}
            SocketAddr::V6(at) => at.set_scope_id(scope),
        }
        Some(at)
    }

    fn endpoint(&mut self) -> Option<EndpointAddr> {
        let (ip, port) = (self.ip()?, self.u16()?);
        Some(EndpointAddr { ip, port })
    }

    fn protocol(&mut self) -> Option<Protocol> {
        match self.u8()? {
            6 => Some(Protocol::Tcp),
            17 => Some(Protocol::Udp),
            132 => Some(Protocol::Sctp),
            _ => None,
        }
    }

    fn role(&mut self) -> Option<Role> {
        match self.u8()? {
            0 => Some(Role::Captured),
            1 => {
                let (ip, protocol, port) = (self.ip()?, self.protocol()?, self.u16()?);
                Some(Role::Place(FrontendAddr::Address { ip, protocol, port }))
            }
            2 => {
                let (protocol, port) = (self.protocol()?, self.u16()?);
                Some(Role::Place(FrontendAddr::NodePort { protocol, port }))
            }
            _ => None,
        }
    }

    fn key(&mut self) -> Option<ServiceKey> {
        let service = ServiceName::new(&self.text()?, &self.text()?);
        Some(ServiceKey::from(KeyParts {
            service,
            port_name: self.text()?.into(),
            protocol: self.protocol()?,
            family: match self.u8()? {
                4 => Family::V4,
                6 => Family::V6,
                _ => return None,
            },
        }))
    }

    fn way(&mut self) -> Option<EncodedWay> {
        Some(EncodedWay {
            has_ended: self.flag()?,
            is_plain: self.flag()?,
            unsent: match self.u8()? {
                0 => EncodedUnsent::None,
                1 => {
                    let len = usize::try_from(self.u64()?).ok()?;
                    let bytes = (1..=MOST_UNSENT).contains(&len).then(|| self.take(len))??;
                    EncodedUnsent::Bytes(bytes.to_vec())
                }
                2 => EncodedUnsent::Pipe(Some(self.u64()?).filter(|held| *held > 0)?),
                _ => return None,
            },
        })
    }
}

#[cfg(test)]
mod tests;
