//! Who is connected to ServicePorts, read from the kernel's tables and the userspace proxy for `kpctl get flows`. Changes
//! nothing.
//!
//! Entries are grouped as they come, so a table of any size takes little memory. Each connection is in the table of the node
//! whose rules lead it to its endpoint, and in no other list: what an endpoint's own node sees of it is not translated.

mod groups;

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kplane_model::{Family, Protocol, ProxyConnection, ProxyStage, proxy_address};
use kplane_netlink::NetlinkError;
use kplane_netlink::conntrack::{Selection, Stage, Tracked};
use nix::errno::Errno;
use parking_lot::Mutex;

use self::groups::{ConnectionGroups, Single};
pub use self::groups::{ConnectionTable, GroupKey, GroupSums};
use crate::backend::{AffinityPort, Description, Kind, PacketTarget, Proxy};
use crate::conntrack::{Filter, open};
use crate::ipvs_table::{self, Connection};
use crate::{chain, own_addresses};

/// Longest time for the userspace proxy to show its connections.
const OF_PROXY: Duration = Duration::from_secs(2);

/// The connections that a question is about.
#[derive(Clone, Debug, Default)]
pub struct ConnectedQuestion {
    /// The ServicePorts.
    pub ports: Vec<AffinityPort>,
    /// Only clients with these addresses; empty = all.
    pub clients: HashSet<IpAddr>,
    /// Only endpoints with these addresses; empty = all.
    pub endpoints: HashSet<IpAddr>,
    /// Largest number of groups in the answer.
    pub most: usize,
}

/// The groups of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connected {
    /// Those with the most connections, largest first.
    pub groups: Vec<(GroupKey, GroupSums)>,
    /// Number of connections of further groups.
    pub more: u64,
    /// Number of entries of the kernel's tables that were read.
    pub read: u64,
}

/// The reason why connections cannot be listed.
#[derive(Debug, thiserror::Error)]
enum ListError {
    #[error(
        "cannot read conntrack entries: {0} (CAP_NET_ADMIN and the module nf_conntrack_netlink are needed)"
    )]
    Conntrack(#[from] NetlinkError),
    #[error("cannot read the connections of IPVS: {0}")]
    Ipvs(#[from] std::io::Error),
    #[error("the table has too many entries to read in {} s: conntrack -C shows their number", .0.as_secs())]
    Late(Duration),
    #[error("cannot list the node's own addresses, which node ports need: {0}")]
    Addresses(#[from] Errno),
    #[error("the userspace proxy did not show its connections within {} s", OF_PROXY.as_secs())]
    Proxy,
}

/// Lists who is connected to ServicePorts: in the tables of the calling thread's network namespace, and through the proxy,
/// if there is one.
///
/// # Errors
/// The reason why that cannot be known, such as that it would take longer than `within`.
pub fn connected(
    kind: Kind,
    proxy: Option<&dyn Proxy>,
    question: &ConnectedQuestion,
    within: Duration,
) -> Result<Connected, String> {
    let facts = kind.describe();
    if proxy.is_none() && !facts.programs_kernel {
        return Err("the agent programs no kernel".to_owned());
    }
    let of_proxy = || {
        proxy.map_or_else(
            || Ok(ConnectionGroups::default()),
            |proxy| of_proxy(proxy, question),
        )
    };
    list(facts, of_proxy, question, within).map_err(|error| chain(&error))
}

/// Lists the proxy's connections and then the kernel's, all within a time.
fn list(
    facts: &Description,
    of_proxy: impl FnOnce() -> Result<ConnectionGroups, ListError>,
    question: &ConnectedQuestion,
    within: Duration,
) -> Result<Connected, ListError> {
    let until = Instant::now() + within;
    let mut reader = ConnectionReader::new(question, of_proxy()?);
    if Instant::now() > until {
        return Err(ListError::Late(within));
    }
    if facts.programs_kernel {
        reader.read_kernel(facts.has_virtual_servers, until, within)?;
    }
    let (groups, more) = reader.groups.largest(question.most);
    let read = reader.read;
    Ok(Connected { groups, more, read })
}

/// Returns the groups of the proxy's own connections.
fn of_proxy(
    proxy: &dyn Proxy,
    question: &ConnectedQuestion,
) -> Result<ConnectionGroups, ListError> {
    let groups = Arc::new(Mutex::new(ConnectionGroups::default()));
    let keys = question.ports.iter().map(|port| port.key.clone()).collect();
    let (shared, of) = (groups.clone(), question.clone());
    let show = move |port, shown: ProxyConnection| {
        let key = GroupKey {
            port,
            client: shown.client.ip(),
            endpoint: SocketAddr::new(shown.endpoint.ip, shown.endpoint.port),
            table: ConnectionTable::Proxy,
        };
        if of.wants(&key) {
            let mut groups = shared.lock();
            groups.add(key, &shown.into());
        }
    };
    if !proxy.show(keys, OF_PROXY, Box::new(show)) {
        return Err(ListError::Proxy);
    }
    let mut groups = groups.lock();
    Ok(std::mem::take(&mut groups))
}

impl From<ProxyConnection> for Single {
    fn from(shown: ProxyConnection) -> Self {
        Self {
            stage: match shown.stage {
                ProxyStage::Unanswered => Stage::Unreplied,
                ProxyStage::Open => Stage::Established,
                ProxyStage::Closing => Stage::Closing,
            },
            age: shown.age,
            bytes: shown.bytes,
            packets: None,
        }
    }
}

impl ConnectedQuestion {
    fn wants(&self, key: &GroupKey) -> bool {
        let has = |set: &HashSet<IpAddr>, ip| set.is_empty() || set.contains(&ip);
        has(&self.clients, key.client) && has(&self.endpoints, key.endpoint.ip())
    }

    /// Returns where clients reach the ServicePorts.
    fn frontends(&self) -> HashMap<PacketTarget, usize> {
        let mut frontends = HashMap::new();
        for (index, port) in self.ports.iter().enumerate() {
            let addresses = port.addresses.iter().copied();
            for place in PacketTarget::of_port(&port.key, addresses, port.port, port.node_port) {
                frontends.entry(place).or_insert(index);
            }
        }
        frontends
    }
}

/// The reader of the kernel's tables.
struct ConnectionReader<'a> {
    question: &'a ConnectedQuestion,
    frontends: HashMap<PacketTarget, usize>,
    /// The node's own addresses, at which node ports are.
    own: HashSet<IpAddr>,
    groups: ConnectionGroups,
    /// The time by which the kernel dates entries, in nanoseconds since 1970.
    now_ns: u64,
    read: u64,
}

impl<'a> ConnectionReader<'a> {
    fn new(question: &'a ConnectedQuestion, groups: ConnectionGroups) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            question,
            frontends: question.frontends(),
            own: HashSet::new(),
            groups,
            now_ns: now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)),
            read: 0,
        }
    }

    fn read_kernel(
        &mut self,
        by_ipvs: bool,
        until: Instant,
        within: Duration,
    ) -> Result<(), ListError> {
        let node_ports = |place: &PacketTarget| matches!(place, PacketTarget::NodePort { .. });
        if self.frontends.keys().any(node_ports) {
            self.own = own_addresses()?;
        }
        if by_ipvs {
            let whole = ipvs_table::each(until, |of| self.connection(&of));
            self.read += whole?.ok_or(ListError::Late(within))?;
            return Ok(());
        }
        for family in Family::ALL {
            if !self.frontends.keys().any(|place| place.family() == family) {
                continue;
            }
            // A list that is broken off spoils its socket, so each has its own.
            let (mut socket, filter) = open()?;
            let selection = self.selection(family, filter);
            let listed = socket.tracked(family, selection, until, |flow| self.tracked(&flow));
            self.read += listed?.ok_or(ListError::Late(within))?;
        }
        Ok(())
    }

    /// Returns the entries of a family that the kernel can select.
    fn selection(&self, family: Family, filter: Filter) -> Selection {
        let mut endpoints = self.question.endpoints.iter();
        if let (Filter::Both, Some(ip), None) = (filter, endpoints.next(), endpoints.next())
            && Family::of(*ip) == family
        {
            return Selection::RepliesFrom(*ip, None);
        }
        let of_family = self.frontends.keys().filter(|place| place.family() == family);
        let mut selection = Selection::Any;
        for place in of_family {
            let PacketTarget::Address { at, protocol } = *place else {
                return Selection::Any;
            };
            let port = Some((protocol, Some(at.port())));
            selection = match selection {
                Selection::Any => Selection::To(Some(at.ip()), port),
                Selection::To(ip, _) if ip == Some(at.ip()) => Selection::To(ip, None),
                _ => return Selection::Any,
            };
        }
        if filter == Filter::Nothing { Selection::Any } else { selection }
    }

    /// Returns the ServicePort at a destination.
    fn port_at(&self, protocol: Protocol, at: SocketAddr) -> Option<usize> {
        let address = self.frontends.get(&PacketTarget::Address { at, protocol });
        let by_node = || {
            let node_port = PacketTarget::NodePort {
                family: Family::of(at.ip()),
                protocol,
                port: at.port(),
            };
            let port = self.frontends.get(&node_port)?;
            self.own.contains(&at.ip()).then_some(port)
        };
        address.or_else(by_node).copied()
    }

    fn add(&mut self, key: GroupKey, one: &Single) {
        if self.question.wants(&key) {
            self.groups.add(key, one);
        }
    }

    fn tracked(&mut self, flow: &Tracked) {
        let endpoint = flow.endpoint;
        // The proxy shows what leads to itself.
        let is_proxy = endpoint.ip() == proxy_address(Family::of(endpoint.ip()));
        if flow.stage == Stage::Closed || !flow.is_translated() || is_proxy {
            return;
        }
        let Some(port) = self.port_at(flow.protocol, flow.to) else {
            return;
        };
        let age_ns = flow.began_ns.map(|began| self.now_ns.saturating_sub(began));
        let age = age_ns.map(Duration::from_nanos);
        let one = Single::tracked(flow.stage, age, flow.traffic);
        let key = GroupKey {
            port,
            client: flow.client.ip(),
            endpoint,
            table: ConnectionTable::Conntrack,
        };
        self.add(key, &one);
    }

    fn connection(&mut self, connection: &Connection) {
        if connection.is_template() || connection.stage == Stage::Closed {
            return;
        }
        let protocol = connection.protocol;
        let Some(port) = protocol.and_then(|of| self.port_at(of, connection.server)) else {
            return;
        };
        let key = GroupKey {
            port,
            client: connection.client.ip(),
            endpoint: connection.endpoint,
            table: ConnectionTable::Ipvs,
        };
        self.add(key, &Single::tracked(connection.stage, None, None));
    }
}

#[cfg(test)]
mod tests;
