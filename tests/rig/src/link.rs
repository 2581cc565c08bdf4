//! Links, addresses and routes of one namespace, over rtnetlink.

use std::fs;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd as _};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use futures_util::TryStreamExt as _;
use kplane_model::{Cidr, Family};
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags, AddressHeaderFlags};
use rtnetlink::packet_route::link::{InfoData, InfoVeth, LinkAttribute, LinkMessage, State};
use rtnetlink::packet_route::route::{RouteMessage, RouteScope, RouteType};
use rtnetlink::{
    Error, Handle, LinkBridge, LinkUnspec, LinkVeth, RouteMessageBuilder, new_connection,
};
use tokio::runtime::{Builder, Runtime};

use crate::wait::eventually;

/// Longest that a link may take to carry packets on a busy machine.
const DEADLINE: Duration = Duration::from_secs(30);

/// A connection to the namespace in which it was opened, usable from any thread.
#[derive(Debug)]
pub struct Netlink {
    runtime: Runtime,
    handle: Handle,
}

/// A unicast route: `Route::to(cidr).via(gateway)` or `Route::to(cidr).dev("eth0")`.
#[derive(Clone, Debug)]
pub struct Route {
    to: Cidr,
    via: Option<IpAddr>,
    dev: Option<String>,
    source: Option<IpAddr>,
}

impl Netlink {
    /// Opens a connection to the calling thread's namespace.
    ///
    /// # Errors
    /// The socket could not be opened.
    pub fn open() -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_io().build()?;
        let (connection, handle, _) = {
            let _context = runtime.enter();
            new_connection().context("open a route netlink socket")?
        };
        runtime.spawn(connection);
        Ok(Self { runtime, handle })
    }

    /// Returns the index of a link.
    ///
    /// # Errors
    /// The link does not exist.
    pub fn index(&self, link: &str) -> Result<u32> {
        Ok(self.link(link)?.header.index)
    }

    fn link(&self, link: &str) -> Result<LinkMessage> {
        let request = self.handle.link().get().match_name(link.to_owned());
        let found = async { request.execute().try_next().await };
        let message = self.wait(found).with_context(|| format!("link {link}"))?;
        message.with_context(|| format!("no link {link}"))
    }

    /// Waits until a link with both ends up carries packets. The end that came up first does so a moment later than the
    /// other, and on a busy machine that is long enough to lose packets.
    ///
    /// # Errors
    /// There is no such link, or it stays down.
    pub fn carries(&self, link: &str) -> Result<()> {
        let up = LinkAttribute::OperState(State::Up);
        eventually(DEADLINE, &format!("{link} carries packets"), || {
            let attributes = self.link(link)?.attributes;
            ensure!(attributes.contains(&up), "{link} is not up");
            Ok(())
        })
    }

    /// Creates a bridge, up, that forwards from the start and does not snoop on multicast.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn bridge(&self, name: &str) -> Result<()> {
        self.create(LinkBridge::new(name).mcast_snooping(false).build())
            .with_context(|| format!("create bridge {name}"))?;
        // The kernel gives a bridge the lowest address of its ports as long as nobody has set one. When ports came and
        // went, neighbours sent packets to the address of before, for up to 45 s.
        let attributes = self.link(name)?.attributes.into_iter();
        let mut addresses = attributes.filter_map(|attribute| match attribute {
            LinkAttribute::Address(address) => Some(address),
            _ => None,
        });
        let own = addresses.next().context("a bridge has an address")?;
        self.change(LinkUnspec::new_with_name(name).address(own).build())
            .with_context(|| format!("keep the address of {name}"))
    }

    /// Creates a pair of links: `name` here, up, and `peer` in `peer_ns`, down (the kernel cannot
    /// start it before its other end exists).
    ///
    /// # Errors
    /// The kernel's error; a name has at most 15 bytes.
    pub fn veth(&self, name: &str, peer_ns: &impl AsFd, peer: &str) -> Result<()> {
        let far = LinkUnspec::new_with_name(peer).setns_by_fd(peer_ns.as_fd().as_raw_fd()).build();
        let near = LinkVeth::new(name, peer)
            .set_info_data(InfoData::Veth(InfoVeth::Peer(far)))
            .up()
            .build();
        self.create(near)
            .with_context(|| format!("create link {name} to {peer} in another namespace"))
    }

    /// Makes a link a port of a bridge.
    ///
    /// # Errors
    /// One of them does not exist.
    pub fn attach(&self, link: &str, bridge: &str) -> Result<()> {
        let port = LinkUnspec::new_with_name(link).controller(self.index(bridge)?);
        self.change(port.build()).with_context(|| format!("attach {link} to {bridge}"))
    }

    /// Brings a link up.
    ///
    /// # Errors
    /// There is no such link.
    pub fn up(&self, link: &str) -> Result<()> {
        self.change(LinkUnspec::new_with_name(link).up().build())
            .with_context(|| format!("bring {link} up"))
    }

    /// Takes a link down.
    ///
    /// # Errors
    /// There is no such link.
    pub fn down(&self, link: &str) -> Result<()> {
        self.change(LinkUnspec::new_with_name(link).down().build())
            .with_context(|| format!("take {link} down"))
    }

    /// Sets the longest packet of a link, in bytes.
    ///
    /// # Errors
    /// There is no such link, or the kernel refuses the size.
    pub fn mtu(&self, link: &str, bytes: u32) -> Result<()> {
        self.change(LinkUnspec::new_with_name(link).mtu(bytes).build())
            .with_context(|| format!("set the MTU of {link} to {bytes}"))
    }

    /// Deletes a link. Deleting a veth also deletes its peer.
    ///
    /// # Errors
    /// The link does not exist.
    pub fn delete(&self, link: &str) -> Result<()> {
        let index = self.index(link)?;
        self.wait(self.handle.link().del(index).execute())
            .with_context(|| format!("delete link {link}"))
    }

    /// Adds an address, without duplicate detection, and waits until the kernel knows that packets to the address stay
    /// here. For IPv6, the kernel creates that route a moment later. Until then the address is already a source, but
    /// `fib saddr type local` (nftables) and `--src-type LOCAL` (iptables) do not match.
    ///
    /// # Errors
    /// There is no such link, the address is present, or its route does not appear.
    pub fn add_address(&self, link: &str, ip: IpAddr, prefix_len: u8) -> Result<()> {
        let index = self.index(link)?;
        let mut request = self.handle.address().add(index, ip, prefix_len);
        let message = request.message_mut();
        message.header.flags |= AddressHeaderFlags::Nodad;
        let nodad = AddressAttribute::Flags(AddressFlags::Nodad);
        message.attributes.push(nodad);
        self.wait(request.execute())
            .with_context(|| format!("add {ip}/{prefix_len} to {link}"))?;
        if ip.is_ipv4() {
            return Ok(());
        }
        eventually(DEADLINE, &format!("packets to {ip} stay here"), || {
            let kind = self.route_type(ip)?;
            ensure!(kind == RouteType::Local, "the route is {kind:?}");
            Ok(())
        })
    }

    /// Returns the type of the route that a packet to an address takes.
    fn route_type(&self, ip: IpAddr) -> Result<RouteType> {
        let single = Cidr::single(ip);
        let to =
            RouteMessageBuilder::<IpAddr>::new().destination_prefix(ip, single.prefix_len())?;
        let request = self.handle.route().get(to.build());
        let found = async { request.execute().try_next().await };
        let route = self.wait(found).with_context(|| format!("route to {ip}"))?;
        Ok(route.context("no route")?.header.kind)
    }

    /// Removes an address from a link.
    ///
    /// # Errors
    /// The link does not exist, or does not have the address with this prefix length.
    pub fn delete_address(&self, link: &str, ip: IpAddr, prefix_len: u8) -> Result<()> {
        let index = self.index(link)?;
        let mut like = self.handle.address().add(index, ip, prefix_len);
        let request = self.handle.address().del(like.message_mut().clone());
        self.wait(request.execute())
            .with_context(|| format!("delete {ip}/{prefix_len} from {link}"))
    }

    /// Adds a route, or replaces the one to the same destination.
    ///
    /// # Errors
    /// The gateway is not reachable, or the link does not exist or is down.
    pub fn add_route(&self, route: &Route) -> Result<()> {
        let message = self.message(route)?;
        self.wait(self.handle.route().add(message).replace().execute())
            .with_context(|| format!("add {route:?}"))
    }

    /// Deletes a route.
    ///
    /// # Errors
    /// There is no such route.
    pub fn delete_route(&self, route: &Route) -> Result<()> {
        let mut message = self.message(route)?;
        // In a deletion this means any scope.
        message.header.scope = RouteScope::NoWhere;
        self.wait(self.handle.route().del(message).execute())
            .with_context(|| format!("delete {route:?}"))
    }

    fn message(&self, route: &Route) -> Result<RouteMessage> {
        let (to, len) = (route.to.first(), route.to.prefix_len());
        let mut message = RouteMessageBuilder::<IpAddr>::new().destination_prefix(to, len)?;
        if let Some(dev) = &route.dev {
            message = message.output_interface(self.index(dev)?);
        }
        if let Some(source) = route.source {
            message = message.pref_source(source)?;
        }
        Ok(match (route.via, &route.dev) {
            (Some(gateway), Some(_)) => message.gateway(gateway)?.onlink(),
            (Some(gateway), None) => message.gateway(gateway)?,
            (None, _) if to.is_ipv4() => message.scope(RouteScope::Link),
            (None, _) => message,
        }
        .build())
    }

    fn create(&self, link: LinkMessage) -> Result<(), Error> {
        self.wait(self.handle.link().add(link).execute())
    }

    fn change(&self, link: LinkMessage) -> Result<(), Error> {
        self.wait(self.handle.link().change(link).execute())
    }

    fn wait<T>(&self, answer: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        self.runtime.block_on(answer)
    }
}

/// Waits until the calling thread's namespace answers its neighbours' questions for IPv6 addresses. The kernel begins
/// that a moment after an address was added.
///
/// # Errors
/// The kernel does not begin.
pub fn answers_neighbours(ips: &[IpAddr]) -> Result<()> {
    let v6 = ips.iter().filter_map(|ip| match ip {
        IpAddr::V4(_) => None,
        IpAddr::V6(ip) => Some(ip.octets()),
    });
    // The solicited-node multicast addresses (RFC 4291, section 2.7.1), as the kernel prints them.
    let groups: Vec<_> = v6
        .map(|[.., a, b, c]| format!("ff0200000000000000000001ff{a:02x}{b:02x}{c:02x}"))
        .collect();
    eventually(DEADLINE, "neighbours are answered", || {
        let joined = fs::read_to_string("/proc/thread-self/net/igmp6")?;
        let lacks = groups.iter().find(|group| !joined.contains(*group));
        lacks.map_or(Ok(()), |group| bail!("no member of {group}"))
    })
}

impl Route {
    /// Creates a route to every address in a prefix; it needs a gateway or a link.
    pub fn to(to: Cidr) -> Self {
        Self {
            to,
            via: None,
            dev: None,
            source: None,
        }
    }

    /// Creates a default route of `gateway`'s family.
    pub fn default_via(gateway: IpAddr) -> Self {
        Self::to(Cidr::everything(Family::of(gateway))).via(gateway)
    }

    /// Sets the gateway; together with a link the gateway needs no address in a common prefix.
    #[must_use]
    pub fn via(mut self, gateway: IpAddr) -> Self {
        self.via = Some(gateway);
        self
    }

    /// Sets the link.
    #[must_use]
    pub fn dev(mut self, link: impl Into<String>) -> Self {
        self.dev = Some(link.into());
        self
    }

    /// Sets the source address for packets whose sender has not chosen one.
    #[must_use]
    pub fn source(mut self, ip: IpAddr) -> Self {
        self.source = Some(ip);
        self
    }
}
