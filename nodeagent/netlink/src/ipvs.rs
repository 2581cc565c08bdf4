//! IPVS over generic netlink (linux/genetlink.h, linux/ip_vs.h): virtual servers, real servers,
//! timeouts. IPVS writes integers in host byte order; addresses and ports are as in packets.

use std::fmt;
use std::net::IpAddr;

use kplane_model::{EndpointAddr, Family, IpvsScheduler, Protocol};
use netlink_sys::protocols::NETLINK_GENERIC;

use super::message::Request;
use super::{Attribute, AttributeWriter, Attributes, Message, Messages};
use super::{NetlinkError, NfSocket, Refusal, nfproto};

/// `GENL_ID_CTRL`: the family that describes all others.
const GENL_ID_CTRL: u16 = 0x10;
/// `CTRL_CMD_GETFAMILY`.
const CTRL_CMD_GETFAMILY: u8 = 3;
/// `CTRL_ATTR_FAMILY_ID`, two bytes in host order.
const CTRL_ATTR_FAMILY_ID: u16 = 1;
/// `CTRL_ATTR_FAMILY_NAME`.
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
/// `IPVS_GENL_NAME`.
const IPVS_GENL_NAME: &str = "IPVS";

/// `IPVS_CMD_*`.
mod cmd {
    pub(super) const NEW_SERVICE: u8 = 1;
    pub(super) const SET_SERVICE: u8 = 2;
    pub(super) const DEL_SERVICE: u8 = 3;
    pub(super) const GET_SERVICE: u8 = 4;
    pub(super) const NEW_DEST: u8 = 5;
    pub(super) const SET_DEST: u8 = 6;
    pub(super) const DEL_DEST: u8 = 7;
    pub(super) const GET_DEST: u8 = 8;
    pub(super) const SET_CONFIG: u8 = 12;
    pub(super) const GET_CONFIG: u8 = 13;
}

/// `IPVS_CMD_ATTR_SERVICE`.
const ATTR_SERVICE: u16 = 1;
/// `IPVS_CMD_ATTR_DEST`.
const ATTR_DEST: u16 = 2;
/// `IPVS_CMD_ATTR_TIMEOUT_TCP`, `_TCP_FIN` and `_UDP`, in seconds.
const ATTR_TIMEOUTS: [u16; 3] = [4, 5, 6];

/// `IPVS_SVC_ATTR_*`.
mod svc {
    pub(super) const AF: u16 = 1;
    pub(super) const PROTOCOL: u16 = 2;
    pub(super) const ADDR: u16 = 3;
    pub(super) const PORT: u16 = 4;
    pub(super) const SCHED_NAME: u16 = 6;
    pub(super) const FLAGS: u16 = 7;
    pub(super) const TIMEOUT: u16 = 8;
    pub(super) const NETMASK: u16 = 9;
}

/// `IPVS_DEST_ATTR_*`.
mod dest {
    pub(super) const ADDR: u16 = 1;
    pub(super) const PORT: u16 = 2;
    pub(super) const FWD_METHOD: u16 = 3;
    pub(super) const WEIGHT: u16 = 4;
    pub(super) const U_THRESH: u16 = 5;
    pub(super) const L_THRESH: u16 = 6;
    pub(super) const ACTIVE_CONNS: u16 = 7;
    pub(super) const INACT_CONNS: u16 = 8;
    pub(super) const ADDR_FAMILY: u16 = 11;
}

/// The kernel's list of real servers, in a human-readable format that the agent parses.
const LISTING: &str = "/proc/thread-self/net/ip_vs";

/// `IP_VS_CONN_F_FWD_MASK`: the way packets reach real servers.
const FORWARD_MASK: u32 = 7;
/// `IP_VS_CONN_F_LOCALNODE`: the real server is the node itself.
const FORWARD_LOCAL: u32 = 1;
/// `IP_VS_CONN_F_MASQ`: packets are translated.
const FORWARD_MASQ: u32 = 0;

/// `IP_VS_SVC_F_PERSISTENT`: a client keeps its real server.
const FLAG_PERSISTENT: u32 = 1 << 0;
/// `IP_VS_SVC_F_HASHED`: set by the kernel.
const FLAG_HASHED: u32 = 1 << 1;
/// `IP_VS_SVC_F_SCHED_MH_PORT`: scheduler mh hashes the source port too.
const FLAG_MH_PORT: u32 = 1 << 4;

/// The identity of a virtual server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerKey {
    /// The address.
    pub ip: IpAddr,
    /// The protocol.
    pub protocol: Protocol,
    /// The port.
    pub port: u16,
}

impl ServerKey {
    /// Returns address and port.
    pub fn at(self) -> EndpointAddr {
        let Self { ip, port, .. } = self;
        EndpointAddr { ip, port }
    }
}

impl fmt::Display for ServerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.at(), self.protocol)
    }
}

/// The behaviour of a virtual server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServerMode {
    /// The scheduler, which spreads connections.
    pub scheduler: IpvsScheduler,
    /// The number of seconds for which a client keeps its real server after its last connection.
    pub persistent_s: Option<u32>,
}

impl ServerMode {
    /// Returns `struct ip_vs_flags`: the flags, and the mask of those that count.
    fn flags(self) -> [u8; 8] {
        let mut flags = 0;
        if self.persistent_s.is_some() {
            flags |= FLAG_PERSISTENT;
        }
        if self.scheduler.as_str() == "mh" {
            flags |= FLAG_MH_PORT;
        }
        let mut bytes = [0xff; 8];
        bytes[..4].copy_from_slice(&u32::to_ne_bytes(flags));
        bytes
    }
}

/// A virtual server as the kernel has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Server {
    /// The identity of the virtual server.
    pub key: ServerKey,
    /// The behaviour; `None` for one that kplane never requests.
    pub mode: Option<ServerMode>,
}

impl Server {
    /// Reads one message of the list of virtual servers; returns `None` for those that use a firewall
    /// mark.
    pub fn parse(message: Message<'_>) -> Option<Self> {
        let service = message.attributes().get(ATTR_SERVICE)?.children();
        let number = |kind| service.get(kind).and_then(host_u16);
        let family = match number(svc::AF)? {
            n if n == u16::from(nfproto(Family::V4)) => Family::V4,
            n if n == u16::from(nfproto(Family::V6)) => Family::V6,
            _ => return None,
        };
        let protocol = Protocol::from_number(u8::try_from(number(svc::PROTOCOL)?).ok()?)?;
        let ip = parse_union(family, service.get(svc::ADDR)?)?;
        let port = u16::from_be_bytes(service.get(svc::PORT)?.payload.try_into().ok()?);
        Some(Self {
            key: ServerKey { ip, protocol, port },
            mode: parse_mode(service),
        })
    }
}

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Command {
    /// Creates a virtual server without real servers.
    AddServer(ServerKey, ServerMode),
    /// Changes the behaviour of a virtual server; its real servers stay.
    SetServer(ServerKey, ServerMode),
    /// Removes a virtual server with its real servers.
    DeleteServer(ServerKey),
    /// Adds a real server, with its weight.
    AddReal(ServerKey, EndpointAddr, u32),
    /// Changes the weight of a real server.
    SetReal(ServerKey, EndpointAddr, u32),
    /// Removes a real server; its connections end.
    DeleteReal(ServerKey, EndpointAddr),
}

impl Command {
    /// Returns the message; `family` is the number of IPVS in generic netlink.
    pub fn request(&self, family: u16) -> Request {
        let (what, command) = match self {
            Self::AddServer(..) => ("add IPVS virtual server", cmd::NEW_SERVICE),
            Self::SetServer(..) => ("change IPVS virtual server", cmd::SET_SERVICE),
            Self::DeleteServer(..) => ("remove IPVS virtual server", cmd::DEL_SERVICE),
            Self::AddReal(..) => ("add IPVS real server", cmd::NEW_DEST),
            Self::SetReal(..) => ("change IPVS real server", cmd::SET_DEST),
            Self::DeleteReal(..) => ("remove IPVS real server", cmd::DEL_DEST),
        };
        Request::with_header(what, family, &genl_header(command), |w| match self {
            Self::AddServer(key, mode) | Self::SetServer(key, mode) => {
                write_server(w, *key, Some(*mode));
            }
            Self::DeleteServer(key) => write_server(w, *key, None),
            Self::AddReal(key, real, weight) | Self::SetReal(key, real, weight) => {
                write_server(w, *key, None);
                write_real(w, *real, Some(*weight));
            }
            Self::DeleteReal(key, real) => {
                write_server(w, *key, None);
                write_real(w, *real, None);
            }
        })
    }
}

/// Timeouts of connections in seconds; 0 keeps the kernel's value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeouts {
    /// The timeout of idle TCP connections.
    pub tcp_s: u32,
    /// The timeout of TCP connections after a FIN.
    pub tcp_fin_s: u32,
    /// The timeout of UDP flows.
    pub udp_s: u32,
}

/// IPVS in this thread's network namespace.
#[derive(Debug)]
pub struct Ipvs {
    socket: NfSocket,
    /// The number of IPVS in generic netlink.
    family: u16,
}

impl Ipvs {
    /// Opens a socket.
    ///
    /// # Errors
    /// [`NetlinkError`]; `ENOENT` when the kernel has no IPVS, or has not loaded it.
    pub fn open() -> Result<Self, NetlinkError> {
        let mut socket = NfSocket::open_for(NETLINK_GENERIC)?;
        let family = family_id(&mut socket, IPVS_GENL_NAME)?;
        Ok(Self { socket, family })
    }

    /// Runs commands one by one, also after a refusal. Returns the refusals, and the number of bytes
    /// sent.
    ///
    /// # Errors
    /// [`NetlinkError::Socket`]: the outcome is unknown.
    pub fn perform(&mut self, commands: &[Command]) -> Result<(Vec<Refusal>, u64), NetlinkError> {
        let requests: Vec<Request> = commands.iter().map(|c| c.request(self.family)).collect();
        self.socket.perform(&requests)
    }

    /// Returns all virtual servers of a family that are identified by address, protocol and port.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn servers(&mut self, family: Family) -> Result<Vec<Server>, NetlinkError> {
        let header = genl_header(cmd::GET_SERVICE);
        let request =
            Request::with_header("list IPVS virtual servers", self.family, &header, |_| {});
        let mut servers = Vec::new();
        self.socket.dump_each(request, |message| {
            let server = Server::parse(message);
            servers.extend(server.filter(|server| Family::of(server.key.ip) == family));
        })?;
        // A dump that begins again lists some servers twice.
        servers.sort_unstable_by_key(|server| server.key);
        servers.dedup_by_key(|server| server.key);
        Ok(servers)
    }

    /// Returns the real servers of these virtual servers.
    ///
    /// The kernel lists all real servers at once in `/proc`, but omits some where several network
    /// namespaces have IPVS (seen with Linux 6.1). Each virtual server that is missing there is
    /// requested over netlink.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn reals(&mut self, servers: &[Server], family: Family) -> Result<Vec<Real>, NetlinkError> {
        let text = std::fs::read_to_string(LISTING).unwrap_or_default();
        let Listing {
            servers: reported,
            mut reals,
        } = Listing::parse(&text, family);
        let lost = servers.iter().filter(|server| !reported.contains(&server.key));
        for Server { key, .. } in lost {
            let header = genl_header(cmd::GET_DEST);
            let what = "list IPVS real servers";
            let request = Request::with_header(what, self.family, &header, |w| {
                write_server(w, *key, None);
            });
            let listed = self.socket.dump_each(request, |message| {
                reals.extend(Real::parse(*key, message));
            });
            match listed {
                // The virtual server was removed meanwhile.
                Err(error) if error.errno() == Some(super::Errno::ESRCH) => {}
                listed => listed?,
            }
        }
        reals.sort_unstable_by_key(|real| (real.server, real.at));
        reals.dedup_by_key(|real| (real.server, real.at));
        Ok(reals)
    }

    /// Sets the timeouts that are not 0.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn set_timeouts(&mut self, timeouts: Timeouts) -> Result<(), NetlinkError> {
        let Timeouts {
            tcp_s,
            tcp_fin_s,
            udp_s,
        } = timeouts;
        let header = genl_header(cmd::SET_CONFIG);
        self.socket.execute(Request::with_header(
            "set IPVS timeouts",
            self.family,
            &header,
            |w| {
                // The kernel requires all of them, and takes 0 for no change.
                for (kind, value) in ATTR_TIMEOUTS.into_iter().zip([tcp_s, tcp_fin_s, udp_s]) {
                    w.bytes(kind, &value.to_ne_bytes());
                }
            },
        ))
    }

    /// Returns the timeouts in use.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn timeouts(&mut self) -> Result<Timeouts, NetlinkError> {
        let what = "get IPVS timeouts";
        let header = genl_header(cmd::GET_CONFIG);
        let answer = self.socket.get(Request::with_header(what, self.family, &header, |_| {}))?;
        let message = Messages(&answer).next().ok_or(NetlinkError::Unexpected { what })?;
        let [tcp_s, tcp_fin_s, udp_s] = ATTR_TIMEOUTS.map(|kind| {
            let value = message.attributes().get(kind).and_then(host_u32);
            value.unwrap_or_default()
        });
        Ok(Timeouts {
            tcp_s,
            tcp_fin_s,
            udp_s,
        })
    }
}

fn write_server(w: &mut AttributeWriter<'_>, key: ServerKey, mode: Option<ServerMode>) {
    let family = Family::of(key.ip);
    let number = u16::from(key.protocol.number());
    w.nest(ATTR_SERVICE, |w| {
        w.bytes(svc::AF, &u16::from(nfproto(family)).to_ne_bytes());
        w.bytes(svc::PROTOCOL, &number.to_ne_bytes());
        w.bytes(svc::ADDR, &address_union(key.ip));
        w.bytes(svc::PORT, &key.port.to_be_bytes());
        let Some(mode) = mode else { return };
        w.str(svc::SCHED_NAME, mode.scheduler.as_str());
        w.bytes(svc::FLAGS, &mode.flags());
        let timeout = mode.persistent_s.unwrap_or(0);
        w.bytes(svc::TIMEOUT, &timeout.to_ne_bytes());
        // Persistence applies to each client address separately.
        let netmask = family.pick(u32::MAX, 128);
        w.bytes(svc::NETMASK, &netmask.to_ne_bytes());
    });
}

fn write_real(w: &mut AttributeWriter<'_>, real: EndpointAddr, weight: Option<u32>) {
    let family = u16::from(nfproto(Family::of(real.ip)));
    w.nest(ATTR_DEST, |w| {
        w.bytes(dest::ADDR, &address_union(real.ip));
        w.bytes(dest::PORT, &real.port.to_be_bytes());
        w.bytes(dest::ADDR_FAMILY, &family.to_ne_bytes());
        let Some(weight) = weight else { return };
        w.bytes(dest::FWD_METHOD, &FORWARD_MASQ.to_ne_bytes());
        w.bytes(dest::WEIGHT, &weight.to_ne_bytes());
        w.bytes(dest::U_THRESH, &[0; 4]);
        w.bytes(dest::L_THRESH, &[0; 4]);
    });
}

/// Returns `union nf_inet_addr`, which has room for both families.
fn address_union(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&ip.octets());
            bytes
        }
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// Reads `union nf_inet_addr`.
fn parse_union(family: Family, attribute: Attribute<'_>) -> Option<IpAddr> {
    let bytes: [u8; 16] = attribute.payload.try_into().ok()?;
    let [a, b, c, d, ..] = bytes;
    Some(family.pick(IpAddr::from([a, b, c, d]), IpAddr::from(bytes)))
}

fn parse_mode(service: Attributes<'_>) -> Option<ServerMode> {
    let scheduler = IpvsScheduler::parse(service.get(svc::SCHED_NAME)?.as_str()?)?;
    let flags = u32::from_ne_bytes(*service.get(svc::FLAGS)?.payload.first_chunk()?);
    let timeout = host_u32(service.get(svc::TIMEOUT)?)?;
    let mode = ServerMode {
        scheduler,
        persistent_s: (flags & FLAG_PERSISTENT != 0).then_some(timeout),
    };
    let expected = u32::from_ne_bytes(*mode.flags().first_chunk()?);
    (flags & !FLAG_HASHED == expected).then_some(mode)
}

fn host_u16(attribute: Attribute<'_>) -> Option<u16> {
    attribute.payload.try_into().ok().map(u16::from_ne_bytes)
}

fn host_u32(attribute: Attribute<'_>) -> Option<u32> {
    attribute.payload.try_into().ok().map(u32::from_ne_bytes)
}

/// Returns `struct genlmsghdr`: command, version, two reserved bytes.
fn genl_header(command: u8) -> [u8; 4] {
    [command, 1, 0, 0]
}

/// Returns the number that the kernel assigned to a family of generic netlink.
fn family_id(socket: &mut NfSocket, name: &str) -> Result<u16, NetlinkError> {
    let what = "look up a generic netlink family";
    let header = genl_header(CTRL_CMD_GETFAMILY);
    let answer = socket.get(Request::with_header(what, GENL_ID_CTRL, &header, |w| {
        w.str(CTRL_ATTR_FAMILY_NAME, name);
    }))?;
    // `attributes` skips four bytes, which is genlmsghdr's length as well.
    Messages(&answer)
        .next()
        .and_then(|m| m.attributes().get(CTRL_ATTR_FAMILY_ID))
        .and_then(host_u16)
        .ok_or(NetlinkError::Unexpected { what })
}

mod listing;

pub use listing::{Listing, Real};

#[cfg(test)]
mod tests;
