//! Listing and deleting flows in the kernel.

use std::cell::OnceCell;
use std::collections::HashSet;
use std::net::SocketAddr;

use kplane_model::Family;

use super::{Verdict, Work};
use crate::own_addresses;
use crate::plan::FrontendAddr;
use kplane_netlink::conntrack::{Flow, Selection, probe_filter, probe_reply_filter};
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
const MAX_STALE: usize = 1 << 16;

/// Most requests that are encoded at once, some 100 bytes each.
const REQUESTS: usize = 1024;

/// Most rounds of listing and deleting; together they clear a table of four million entries.
const MAX_ROUNDS: usize = 64;

/// The reason why a scan failed. All scans are repeated after a failure.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExamineError {
    /// The exchange with the kernel failed.
    #[error(
        "conntrack: {0} (deleting flows needs CAP_NET_ADMIN and the module nf_conntrack_netlink)"
    )]
    Netlink(#[from] NetlinkError),
    /// The node's own addresses, which node ports need, could not be listed.
    #[error("cannot list the node's own addresses: {0}")]
    Addresses(Errno),
    /// There are still more stale flows.
    #[error("stale flows appear faster than the agent can delete them")]
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

/// A socket, opened when needed, in the network namespace of the thread that works with it.
#[derive(Debug, Default)]
pub(super) struct ConntrackSocket {
    open: Option<(NfSocket, Filter)>,
}

impl ConntrackSocket {
    /// Scans flows and deletes the stale ones. Returns the number of deleted flows, also on failure.
    pub(super) fn examine(
        &mut self,
        family: Family,
        work: &Work,
        verdict: impl Fn(&Flow) -> Verdict,
    ) -> (u64, Result<(), ExamineError>) {
        let mut deleted = 0;
        let result = self.try_examine(family, work, verdict, &mut deleted);
        if result.is_err() {
            // The socket may still hold answers. A new socket also finds out again what the kernel can filter
            // by.
            self.open = None;
        }
        (deleted, result)
    }

    fn try_examine(
        &mut self,
        family: Family,
        work: &Work,
        verdict: impl Fn(&Flow) -> Verdict,
        deleted: &mut u64,
    ) -> Result<(), ExamineError> {
        let (socket, filter) = match &mut self.open {
            Some(open) => open,
            closed => closed.insert(open()?),
        };
        let own = OnceCell::new();
        let is_local = |ip| match own.get_or_init(own_addresses::<HashSet<_>>) {
            Ok(own) => own.contains(&ip),
            Err(_) => false,
        };
        let is_stale = |flow: &Flow| match verdict(flow) {
            Verdict::Keep => false,
            Verdict::Stale => true,
            Verdict::StaleIfLocal => is_local(flow.original.destination.ip()),
        };
        for selection in selections(work, *filter, Size::read()) {
            clear(socket, family, selection, deleted, is_stale)?;
        }
        match own.into_inner() {
            Some(Err(errno)) => Err(ExamineError::Addresses(errno)),
            Some(Ok(_)) | None => Ok(()),
        }
    }
}

/// Lists and deletes until a list had no more stale flows than can be stored.
fn clear(
    socket: &mut NfSocket,
    family: Family,
    selection: Selection,
    deleted: &mut u64,
    is_stale: impl Fn(&Flow) -> bool,
) -> Result<(), ExamineError> {
    for _ in 0..MAX_ROUNDS {
        let (mut stale, mut more) = (Vec::new(), false);
        let listed = socket.dump_each(selection.request(family), |message| {
            if let Some(flow) = Flow::parse(message).filter(&is_stale) {
                match stale.len() {
                    ..MAX_STALE => stale.push(flow),
                    _ => more = true,
                }
            }
        });
        // These flows are stale, whatever happened to the rest of the list.
        for lot in stale.chunks(REQUESTS) {
            let requests: Vec<_> = lot.iter().map(Flow::delete).collect();
            let missing = socket.request_all(&requests)?;
            *deleted += (lot.len() - missing) as u64;
        }
        listed?;
        if !more {
            return Ok(());
        }
    }
    Err(ExamineError::NoEnd)
}

/// Returns the selections for which to ask the kernel.
pub(super) fn selections(work: &Work, filter: Filter, size: Option<Size>) -> Vec<Selection> {
    let questions = work.frontends.len() + work.retired.len();
    let can = match filter {
        Filter::Nothing => false,
        Filter::Destinations => work.retired.is_empty(),
        Filter::Both => true,
    };
    if work.everything || !can || questions > size.map_or(MAX_QUESTIONS, Size::questions) {
        return vec![Selection::All];
    }
    let frontends = work.frontends.iter().map(|at| match *at {
        FrontendAddr::Address { ip, port, .. } => Selection::To(SocketAddr::new(ip, port)),
        FrontendAddr::NodePort { port, .. } => Selection::ToPort(port),
    });
    let retired = work
        .retired
        .iter()
        .map(|at| Selection::RepliesFrom(SocketAddr::new(at.ip, at.port)));
    frontends.chain(retired).collect()
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
