//! Listing, deleting and marking flows in the kernel.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use kplane_model::{EndpointAddr, Family, Protocol, ServiceName};
use parking_lot::Mutex;

use super::{EndedConnections, FamilyState, Hand, Verdict, Work};
use crate::backend::nftables::CUT;
use crate::own_addresses;
use crate::plan::FrontendAddr;
use kplane_netlink::conntrack::{AnyFlow, Flow, Selection, probe_filter, probe_reply_filter};
use kplane_netlink::{Errno, NetlinkError, NfSocket, Request};

/// Most separate questions to the kernel, if the size of its table is not known.
pub(super) const MAX_QUESTIONS: usize = 2;

/// Time that the kernel takes for a bucket of its table while it answers a question, in nanoseconds: 9 ms for the
/// usual 262,144 buckets. An entry that it passes over takes about as long.
const PASSED_NS: usize = 35;

/// Time that a listed entry takes in the kernel and here, in nanoseconds.
const LISTED_NS: usize = 1_500;

/// Folder of the settings and counts of conntrack.
const SETTINGS: &str = "/proc/sys/net/netfilter";

/// Most flows that are stored for deletion at once, some 150 bytes each.
const MAX_HELD: usize = 1 << 16;

/// Most flows that are handed over, or requests that are encoded, at once.
const LOT: usize = 4096;

/// Most rounds of listing and deleting; together they clear a table of four million entries.
const MAX_ROUNDS: usize = 64;

/// The reason why a scan failed. All scans are repeated after a failure.
#[derive(Debug, thiserror::Error)]
pub(super) enum SweepError {
    /// The exchange with the kernel failed.
    #[error(
        "conntrack: {0} (deleting flows needs CAP_NET_ADMIN and the module nf_conntrack_netlink)"
    )]
    Netlink(#[from] NetlinkError),
    /// The node's own addresses, which node ports need, could not be listed.
    #[error("cannot list the node's own addresses: {0}")]
    Addresses(Errno),
    /// There are still more flows to end.
    #[error("flows appear faster than the agent can end them")]
    NoEnd,
}

/// The attributes by which the kernel can filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filter {
    /// None: kernels before 5.8.
    Nothing,
    /// Destinations only.
    Destinations,
    /// Destinations, and sources of replies.
    Both,
}

/// The size of the kernel's table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) buckets: usize,
    /// Number of entries of all protocols.
    pub(super) entries: usize,
}

impl Size {
    /// Reads the size; `None` if the kernel does not say.
    fn read() -> Option<Self> {
        let number = |name: &str| {
            let text = std::fs::read_to_string(format!("{SETTINGS}/{name}")).ok()?;
            text.trim().parse().ok()
        };
        Some(Self {
            buckets: number("nf_conntrack_buckets")?,
            entries: number("nf_conntrack_count")?,
        })
    }

    /// Returns the number of questions that take as long as one list of all UDP flows: for each question, the kernel
    /// walks its whole table; for the list it does so once, and hands over each entry.
    fn questions(self) -> usize {
        let walk = self.buckets.saturating_add(self.entries).saturating_mul(PASSED_NS);
        let list = self.entries.saturating_mul(LISTED_NS);
        walk.saturating_add(list).checked_div(walk).unwrap_or(1)
    }
}

/// What a pass did.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Swept {
    /// Number of deleted stale UDP flows.
    pub(super) deleted: u64,
    /// Number of deleted connections of TCP and SCTP without a reply.
    pub(super) half_open: u64,
    /// Number of deleted connections of TCP and SCTP with a reply, to dead nodes.
    pub(super) dead: u64,
    /// Number of flows that were cut because policies deny them.
    pub(super) cut: u64,
    /// Connections without a reply, and to dead nodes, that were found, by Service.
    pub(super) ended: HashMap<ServiceName, EndedConnections>,
}

/// Flows to delete, by what counts them.
#[derive(Debug, Default)]
struct StaleFlows {
    udp: Vec<Flow>,
    half_open: Vec<Flow>,
    dead: Vec<Flow>,
}

/// One pass over the flows of a family. Its state is locked for one entry at a time, so that a commit never waits for a
/// list.
pub(super) struct Pass<'a> {
    pub(super) family: Family,
    pub(super) work: &'a Work,
    pub(super) state: &'a Mutex<FamilyState>,
    pub(super) hand: &'a Hand,
    /// The node's own addresses, once they are needed.
    pub(super) own: OnceCell<Result<HashSet<IpAddr>, Errno>>,
}

impl Pass<'_> {
    /// Cuts denied flows, scans for others, and deletes stale ones, by a socket that is opened when needed. Says in `swept`
    /// what was done, also on failure.
    pub(super) fn run(
        &self,
        open_socket: &mut Option<(NfSocket, Filter)>,
        swept: &mut Swept,
    ) -> Result<(), SweepError> {
        // After a failure the socket may still hold answers, so it is not kept. A new one also finds out again what the
        // kernel can filter by.
        let (mut socket, filter) = open_socket.take().map_or_else(open, Ok)?;
        self.cut(&mut socket, swept)?;
        for selection in selections(self.work, filter, Size::read()) {
            self.clear(&mut socket, selection, swept)?;
        }
        if let Some(Err(errno)) = self.own.get() {
            return Err(SweepError::Addresses(*errno));
        }
        *open_socket = Some((socket, filter));
        Ok(())
    }

    /// Returns whether an address is the node's own; `None` if that is not known.
    fn is_own(&self, ip: IpAddr) -> Option<bool> {
        let own = self.own.get_or_init(own_addresses);
        own.as_ref().ok().map(|own| own.contains(&ip))
    }

    fn is_stale(&self, flow: &Flow) -> bool {
        if !self.work.concerns(flow) {
            return false;
        }
        let verdict = self.state.lock().tracker.verdict(flow, self.work);
        match verdict {
            Verdict::Keep => false,
            Verdict::Stale => true,
            Verdict::StaleIfLocal => self.is_own(flow.original.destination.ip()) == Some(true),
        }
    }

    /// Returns whether policies are to judge a flow. From and to the node itself everything is allowed (NP11).
    fn is_judged(&self, flow: &AnyFlow) -> bool {
        let ends = [flow.source, flow.destination];
        flow.mark != CUT
            && ends.iter().any(|ip| self.work.judged.contains(ip))
            && ends.iter().all(|ip| self.is_own(*ip) == Some(false))
    }

    /// Hands flows over. Returns whether they have to be listed again, because too many others are to be cut first.
    fn hand_over(&self, flows: Vec<AnyFlow>) -> bool {
        let is_full = self.state.lock().denied.len() >= MAX_HELD;
        if !is_full && !flows.is_empty() {
            (self.hand)(flows);
        }
        is_full
    }

    /// Cuts the flows that were found to be denied up to now.
    fn cut(&self, socket: &mut NfSocket, swept: &mut Swept) -> Result<(), NetlinkError> {
        let denied = std::mem::take(&mut self.state.lock().denied);
        let sent = send(socket, &denied, cut, &mut swept.cut);
        if sent.is_err() {
            self.state.lock().denied.extend(denied);
        }
        sent
    }

    /// Notes a stale flow, if there is room.
    fn note(
        &self,
        flow: Flow,
        stale: &mut StaleFlows,
        ended: &mut HashMap<ServiceName, EndedConnections>,
    ) -> bool {
        let is_replied = flow.is_replied();
        let found = match flow.protocol {
            Protocol::Udp => &mut stale.udp,
            Protocol::Tcp | Protocol::Sctp if is_replied => &mut stale.dead,
            Protocol::Tcp | Protocol::Sctp => &mut stale.half_open,
        };
        if found.len() >= MAX_HELD {
            return false;
        }
        if flow.protocol != Protocol::Udp
            && let Some(service) = self.state.lock().tracker.service_of(&flow)
        {
            let counts = ended.entry(service.clone()).or_default();
            *if is_replied { &mut counts.dead } else { &mut counts.half_open } += 1;
        }
        found.push(flow);
        true
    }

    /// Lists and deletes until a list had no more flows than can be stored.
    fn clear(
        &self,
        socket: &mut NfSocket,
        selection: Selection,
        swept: &mut Swept,
    ) -> Result<(), SweepError> {
        let (seeks_stale, judges) = (self.work.seeks_stale(), !self.work.judged.is_empty());
        for _ in 0..MAX_ROUNDS {
            let mut stale = StaleFlows::default();
            let (mut lot, mut more) = (Vec::new(), false);
            let listed = socket.dump_each(selection.request(self.family), |message| {
                if seeks_stale
                    && let Some(flow) = Flow::parse(message).filter(|flow| self.is_stale(flow))
                {
                    more |= !self.note(flow, &mut stale, &mut swept.ended);
                } else if judges
                    && let Some(flow) = AnyFlow::parse(message).filter(|flow| self.is_judged(flow))
                {
                    lot.push(flow);
                    if lot.len() == LOT {
                        more |= self.hand_over(std::mem::take(&mut lot));
                    }
                }
            });
            more |= self.hand_over(lot);
            // These flows are stale, whatever happened to the rest of the list.
            send(socket, &stale.udp, Flow::delete, &mut swept.deleted)?;
            send(socket, &stale.half_open, Flow::delete, &mut swept.half_open)?;
            send(socket, &stale.dead, Flow::delete, &mut swept.dead)?;
            self.cut(socket, swept)?;
            listed?;
            if !more {
                return Ok(());
            }
        }
        Err(SweepError::NoEnd)
    }
}

/// Returns the request that cuts a flow.
fn cut(flow: &AnyFlow) -> Request {
    match flow.port {
        Some((Protocol::Tcp, _)) => flow.delete(),
        _ => flow.set_mark(CUT),
    }
}

/// Sends a request for each flow, and counts those whose flow still existed.
fn send<T>(
    socket: &mut NfSocket,
    flows: &[T],
    request: impl Fn(&T) -> Request,
    count: &mut u64,
) -> Result<(), NetlinkError> {
    for lot in flows.chunks(LOT) {
        let requests: Vec<_> = lot.iter().map(&request).collect();
        *count += (lot.len() - socket.request_all(&requests)?) as u64;
    }
    Ok(())
}

/// Returns the selections for which to ask the kernel. If all flows are listed for policies, that list also shows all
/// UDP flows.
pub(super) fn selections(work: &Work, filter: Filter, size: Option<Size>) -> Vec<Selection> {
    let most = size.map_or(MAX_QUESTIONS, Size::questions);
    let by_ends = filter == Filter::Both && work.judged.iter().all(IpAddr::is_ipv4);
    let judged = if work.judged.is_empty() || by_ends && 2 * work.judged.len() <= most {
        let ends = |ip: &IpAddr| [Selection::From(*ip), Selection::RepliesFrom(*ip, None)];
        work.judged.iter().flat_map(ends).collect()
    } else {
        vec![Selection::Any]
    };
    let udp = || work.frontends.iter().filter(|at| at.protocol() == Protocol::Udp);
    let endpoints = || work.retired.union(&work.dead);
    let questions = udp().count() + endpoints().count();
    let can = match filter {
        Filter::Nothing => questions == 0,
        Filter::Destinations => endpoints().next().is_none(),
        Filter::Both => true,
    };
    if work.everything || !can || questions > most {
        let of = |protocol| endpoints().any(|(of, _)| *of == protocol);
        let is_listed = |protocol: &Protocol| match protocol {
            Protocol::Udp => work.everything || of(Protocol::Udp) || udp().next().is_some(),
            Protocol::Tcp | Protocol::Sctp => of(*protocol),
        };
        let mut all = vec![Protocol::Udp, Protocol::Tcp, Protocol::Sctp];
        all.retain(|protocol| judged != [Selection::Any] && is_listed(protocol));
        return all.into_iter().map(Selection::all_of).chain(judged).collect();
    }
    let frontends = udp().map(|at| match *at {
        FrontendAddr::Address { ip, protocol, port } => {
            Selection::To(Some(ip), Some((protocol, Some(port))))
        }
        FrontendAddr::NodePort { protocol, port } => {
            Selection::To(None, Some((protocol, Some(port))))
        }
    });
    let replies = |&(protocol, at): &(Protocol, EndpointAddr)| {
        Selection::RepliesFrom(at.ip, Some((protocol, Some(at.port))))
    };
    frontends.chain(endpoints().map(replies)).chain(judged).collect()
}

/// Opens a socket, and finds out what its kernel can filter by.
pub(crate) fn open() -> Result<(NfSocket, Filter), NetlinkError> {
    let mut socket = NfSocket::open()?;
    let filter = if !refuses(&mut socket, probe_filter(Family::V4))? {
        Filter::Nothing
    } else if !refuses(&mut socket, probe_reply_filter(Family::V4))? {
        Filter::Destinations
    } else {
        Filter::Both
    };
    tracing::debug!(?filter, "conntrack entries can be filtered in the kernel");
    Ok((socket, filter))
}

/// Returns whether the kernel refuses a probe as unknown, instead of answering with a list.
fn refuses(socket: &mut NfSocket, probe: Request) -> Result<bool, NetlinkError> {
    match socket.dump_each(probe, |_| {}) {
        Ok(()) => Ok(false),
        Err(NetlinkError::Refused {
            errno: Errno::EINVAL | Errno::EOPNOTSUPP,
            ..
        }) => Ok(true),
        Err(error) => Err(error),
    }
}
